"""What a full store costs who looks at it: orphans by the hundred thousand, and names that somebody planted in it.

`trashd list` by root and the service's first look, beside those at a store with next to nothing in it; in memory.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

from bench.runner import Bed, Benchmark, Case, Turn
from bench.support import TRASHD, time_command
from bench.verdicts import Figure, Target, value
from fusefs.core.names import make_id
from fusefs.core.service_status import VolumePhase
from fusefs.store.stage import SwapOptions
from tests.support.hostile_volume import ALICE, MALLORY, Shared, shared_volume
from tests.support.other_users import as_user
from tests.support.peak_usage import peak_of
from tests.support.store_verbs import folder_of, forge

KEPT = SwapOptions(retention_s=10_000_000)
MANY = 100_000
PLAIN, PLANTED, LIST, LOOK = "plain", "planted", "list", "first look"
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


def measure_first_scan(shared: Shared) -> dict[str, float]:
    """Return the seconds from the service's start to the end of its first scan, and the MiB of its largest process."""
    began = time.monotonic()
    with shared.served() as running:
        running.until(lambda: running.volume(shared.volume).phase is VolumePhase.IDLE, _LIMIT_S)
        seconds = time.monotonic() - began
        return {"": seconds, "MiB": max(map(peak_of, running.processes())) / 1024}


KINDS = MappingProxyType[str, Callable[[Shared, int], None]](
    {PLANTED: plant, "orphans": lambda shared, n: fill(shared, ALICE, n)}
)


@contextmanager
def bed(case: Case) -> Iterator[Bed]:
    """A store with next to nothing in it, and one with very much."""
    (what,) = case.words
    options = ("size=2g", "nr_inodes=0")
    with shared_volume(*options) as plain, shared_volume(*options) as full:
        KINDS[what](full, case.n)
        turns: dict[str, Turn] = {}
        for name, one in ((PLAIN, plain), (what, full)):
            turns[f"{LIST}, {name}"] = partial(time_command, [TRASHD, "list", "--volume", one.volume])
            turns[f"{LOOK}, {name}"] = partial(measure_first_scan, one)
        yield Bed(turns)


def targets(case: Case) -> Sequence[Target]:
    """Planted names delay nobody by more than a second; 100,000 orphans are listed in one second, and read in two."""
    if case.words != (PLANTED,):
        (what,) = case.words
        limits = ((LIST, 1), (LOOK, 2)) if case.n == MANY else ()
        return [Target(step, value(f"{step}, {what}"), limit, unit=" s") for step, limit in limits]
    return [Target(f"{who}, more", _more(f"{who}, {PLANTED}", f"{who}, {PLAIN}"), 1, unit=" s") for who in (LIST, LOOK)]


def _more(key: str, than: str) -> Figure:
    return lambda rounds: [one[key] - one[than] for one in rounds if key in one and than in one]


BENCHMARK = Benchmark(
    "many",
    "what names that somebody planted, or very many orphans, cost who looks at a store",
    (Case((PLANTED,), 10_000), Case(("orphans",), MANY)),
    (Case((PLANTED,), 3000), Case(("orphans",), 3000)),
    bed,
    targets,
    n_rounds=6,
)
