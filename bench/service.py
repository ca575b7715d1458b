"""What the service costs when nothing happens, and how it does when very much waits.

    python -m bench.service                    all of it on ext4; five minutes
    python -m bench.service --part queue --filesystem tmpfs

idle   an empty store for a minute: processor time, wake-ups and memory of all its processes
queue  100,000 orphans: until it is ready, until the first is gone, a look at the status, memory, until all are gone
fair   somebody's ten files behind another's tree of a million, in a loop: how long they wait

It runs the real command in directories of its own: a tmpfs lies over /run/trashd meanwhile. Each run appends a line to
bench/results/service.jsonl. As root only.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.support import TRASHD, compiled, keep, make_tree, time_command, volume
from fusefs.core.service_status import VolumePhase
from fusefs.store.stage import SwapOptions
from tests.support.many_orphans import many_orphans
from tests.support.other_users import as_user
from tests.support.service_process import Service, places, service
from tests.support.store_calls import init, swap

RESULTS = Path(__file__).with_name("results") / "service.jsonl"
IDLE_S = 60.0
N_QUEUED, N_BIG, N_SMALL, N_ROUNDS = 100_000, 1_000_000, 10, 9
_BIG, _SMALL = 1001, 1002
_EVERY_S = 0.005
_DUE = SwapOptions(0, "")
_HZ = os.sysconf("SC_CLK_TCK")
LIMITS = MappingProxyType(
    {
        "idle": {"cpu_percent": 0.1, "wakeups_per_30_s": 1.0, "pss_mib": 60.0},
        "queue": {"ready_s": 5.0, "status_s": 0.3},
        "fair": {"waited_s": 2.0},
    }
)


def _processes(one: Service) -> list[int]:
    """Of the service: itself, the forker, children and their workers."""
    found = [one.process.pid]
    for pid in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
    return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _HZ


def _switches(pid: int) -> int:
    """How often it went to sleep by itself: once for each time that it was woken."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def _pss_mib(pids: list[int]) -> float:
    """Memory of all together: what they share counts once."""
    sizes = []
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            sizes.append(int(next(line for line in lines if line.startswith("Pss:")).split()[1]))
    return sum(sizes) / 1024


def _until(one: Service, condition: Callable[[], object]) -> float:
    """Seconds until something is true, to 5 ms."""
    began = time.monotonic()
    while not condition():
        assert one.process.poll() is None, one.log.read_text(encoding="utf-8")
        time.sleep(_EVERY_S)
    return time.monotonic() - began


def idle(base: Path, root: Path) -> dict[str, Any]:
    """An empty store, as the service is for most of its life."""
    with service(base, root) as one:
        one.until_phase(root, VolumePhase.IDLE)
        time.sleep(15.0)  # trio keeps a thread for ten seconds after its last use
        pids = _processes(one)
        cpu_s, switches = sum(map(_cpu_s, pids)), sum(map(_switches, pids))
        time.sleep(IDLE_S)
        cpu_s, switches = sum(map(_cpu_s, pids)) - cpu_s, sum(map(_switches, pids)) - switches
        return {
            "cpu_percent": cpu_s / IDLE_S * 100,
            "wakeups_per_30_s": switches / IDLE_S * 30,
            "pss_mib": _pss_mib(_processes(one)),
        }


def queue(base: Path, root: Path) -> dict[str, Any]:
    """Very many orphans at once."""
    many_orphans(root, N_QUEUED)
    states = [root / ".trashd/u/0" / state for state in ("orphans", "reaping")]
    began = time.monotonic()
    with service(base, root) as one:
        ready_s = time.monotonic() - began
        first_s = ready_s + _until(one, lambda: one.volume(root).n_reaped)
        status_s = [time_command([TRASHD, "status"]) for _ in range(N_ROUNDS)]
        pss_mib = 0.0
        while any(os.listdir(state) for state in states):
            pss_mib = max(pss_mib, _pss_mib(_processes(one)))
            time.sleep(0.5)
        return {
            "ready_s": ready_s,
            "first_s": first_s,
            "status_s": statistics.median(status_s),
            "pss_mib": pss_mib,
            "orphans_per_s": N_QUEUED / (time.monotonic() - began - ready_s),
        }


def fair(base: Path, root: Path) -> dict[str, Any]:
    """A user with next to nothing behind one with very much."""
    for uid in (_BIG, _SMALL):
        home = root / str(uid)
        home.mkdir()
        os.chown(home, uid, uid)

    def throw_away(uid: int, n_files: int) -> None:
        victim = root / str(uid) / "job"
        make_tree(victim, n_files)
        swap(victim, options=_DUE)
        victim.rmdir()

    as_user(_BIG, lambda: throw_away(_BIG, N_BIG))
    big, small = (root / f".trashd/u/{uid}" for uid in (_BIG, _SMALL))
    waited: list[float] = []
    with service(base, root) as one:
        _until(one, lambda: os.listdir(big / "reaping"))
        while os.listdir(big / "reaping") and len(waited) < N_ROUNDS:
            as_user(_SMALL, lambda: throw_away(_SMALL, N_SMALL))
            waited.append(_until(one, lambda: not (os.listdir(small / "orphans") or os.listdir(small / "reaping"))))
        was_behind = bool(os.listdir(big / "reaping"))
    if not was_behind:
        waited = waited[:-1]  # the last one may have had none before it
    return {"waited_s": max(waited), "median_s": statistics.median(waited), "n_rounds": len(waited)}


PARTS = MappingProxyType({"idle": idle, "queue": queue, "fair": fair})


def measure(part: str, filesystem: str) -> dict[str, Any]:
    """One part on one filesystem, as a line of the results."""
    with volume(filesystem) as root, places() as base:
        init(root)
        return {"part": part, "filesystem": filesystem, "figures": PARTS[part](base, root)}


def verdicts(row: dict[str, Any]) -> Iterator[str]:
    """Each target, met or MISSED."""
    for name, limit in LIMITS[row["part"]].items():
        figure = row["figures"][name]
        word = "met" if figure <= limit else "MISSED"
        yield f"{row['part']} on {row['filesystem']}: {name} {figure:.3g} (target {limit:g}): {word}"


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--filesystem", choices=("tmpfs", "ext4", "xfs", "btrfs"), action="append")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("only root can: it mounts volumes and serves several users")
    with compiled():
        for part in arguments.part or PARTS:
            for filesystem in arguments.filesystem or ("ext4",):
                row = keep(RESULTS, measure(part, filesystem))
                print("\n".join(verdicts(row)))


if __name__ == "__main__":
    main()
