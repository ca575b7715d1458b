"""What a full store costs who looks at it: orphans by the hundred thousand, and names that somebody planted in it.

    python -m bench.many

`trashd list` by root and the service's first look, without and with 10,000 planted names (they are to cost less than a
second each), and with 100,000 orphans of one user; in memory, in turn; as root only, in a mount namespace of its own.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.support import TRASHD, keep, measuring, tell, time_command
from fusefs.core.names import make_id
from fusefs.core.service_status import VolumePhase
from fusefs.store.stage import SwapOptions
from tests.support.mount_namespaces import see_own_mounts_only
from tests.support.other_users import as_user
from tests.support.peak_usage import peak_of
from tests.support.shared_volume import ALICE, MALLORY, Shared, shared_volume
from tests.support.store_calls import folder_of, forge

RESULTS = Path(__file__).with_name("results") / "many.jsonl"
KEPT = SwapOptions(retention_s=10_000_000)
_LIMIT_S = 600.0


def plant(shared: Shared, n: int) -> None:
    """Names of all kinds where anybody makes some."""
    new = shared.volume / ".trashd/new"

    def act() -> None:
        for i in range(n):
            if i % 3 == 0:
                (new / f"{20_000 + i}").mkdir()
            elif i % 3 == 1:
                (new / f"{MALLORY}.{i:012x}").mkdir()
            else:
                (new / f"-{i}\x1b").write_text("")

    as_user(MALLORY, act)


def fill(shared: Shared, uid: int, n: int) -> None:
    """So many orphans of a user's, like the first one."""
    first = folder_of(shared.volume, uid) / "orphans" / shared.throw(uid, options=KEPT)

    def act() -> None:
        for i in range(n - 1):
            identifier = make_id("20250101T000000", i % 1000, b"job", i.to_bytes(6, "big"))
            shutil.copytree(first, first.with_name(identifier))
            forge(first.with_name(identifier) / "record.json", id=identifier)

    as_user(uid, act)


def list_s(shared: Shared, n_rounds: int) -> float:
    """Seconds of `trashd list --volume`, the median."""
    command: list[str | Path] = [TRASHD, "list", "--volume", shared.volume]
    return statistics.median(time_command(command, timeout_s=_LIMIT_S) for _ in range(n_rounds))


def look(shared: Shared) -> tuple[float, int]:
    """Seconds from the service's start until it has looked at all that is there; KiB of its largest process."""
    began = time.monotonic()
    with shared.served() as running:
        running.until(lambda: running.volume(shared.volume).phase is VolumePhase.IDLE, _LIMIT_S)
        return time.monotonic() - began, max(map(peak_of, running.processes()))


@contextmanager
def told(what: str, shared: Shared, n_rounds: int) -> Iterator[None]:
    """Make something of it in the block, then measure, print and keep what it costs."""
    yield
    listed, looked = list_s(shared, n_rounds), [look(shared) for _ in range(n_rounds)]
    look_s, kib = statistics.median(one for one, _ in looked), max(kib for _, kib in looked)
    keep(RESULTS, {"what": what, "list_s": listed, "look_s": look_s, "peak_kib": kib})
    print(f"| {what} | {listed:.2f} s | {look_s:.2f} s | {kib / 1024:.0f} MiB |", flush=True)


def main() -> None:
    """Measure, keep, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", type=int, default=10_000)
    parser.add_argument("--orphans", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    words = parser.parse_args()
    see_own_mounts_only()
    with measuring(TimeoutError), shared_volume("size=2g", "nr_inodes=0") as shared:
        print("| a store with | list | first look of the service | its largest process |\n|---|---|---|---|")
        with told("two folders", shared, words.rounds):
            pass
        with told(f"{words.planted:,} planted names", shared, words.rounds):
            plant(shared, words.planted)
        tell("making orphans")
        with told(f"and {words.orphans:,} orphans", shared, words.rounds):
            fill(shared, ALICE, words.orphans)


if __name__ == "__main__":
    main()
