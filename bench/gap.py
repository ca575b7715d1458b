"""For how long a name is missing where the filesystem can't exchange: a swap's gap against that of two bare renames.

`two renames` is as short as the filesystem allows; `mkdir first` takes the name by mkdir and renames onto that, as it
must be where no rename spares a taken name: the name is missing until the mkdir. By itself on an sshfs of a tmpfs;
other filesystems that are mounted here are named in the environment: TRASHD_BENCH_GAP="NAME=DIR NAME=DIR".
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.runner import Bed, Benchmark, Case
from bench.support import TRASHD, time_command
from bench.verdicts import Target, times
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import swap_path
from tests.support.sshfs_volumes import sshfs_volume

SSHFS = "sshfs"
TWO_RENAMES, MKDIR_FIRST, SWAP = "two renames", "mkdir first", "swap"
MAX_TIMES = 1.3
UNCACHED = ("dir_cache=no", "entry_timeout=0", "attr_timeout=0")
_NAMED = "TRASHD_BENCH_GAP"


def two_renames(work: Path) -> float:
    """Seconds between the end of the old and the beginning of the new."""
    began = time.perf_counter()
    os.rename(work / "name", work / "aside")
    os.rename(work / "fresh", work / "name")
    return time.perf_counter() - began


def mkdir_first(work: Path) -> float:
    """Seconds up to a mkdir; onto what that made the fresh one is renamed."""
    began = time.perf_counter()
    os.rename(work / "name", work / "aside")
    os.mkdir(work / "name")
    seconds = time.perf_counter() - began
    os.rename(work / "fresh", work / "name")
    return seconds


def a_swap(work: Path) -> float:
    """As the product says it."""
    swapped = swap_path(Kernel(), os.fsencode(work / "name"), SwapOptions())
    assert swapped.gap_ns is not None
    (work / "aside").mkdir()
    return swapped.gap_ns / 1e9


WAYS: dict[str, Callable[[Path], float]] = {TWO_RENAMES: two_renames, MKDIR_FIRST: mkdir_first, SWAP: a_swap}


def take_turn(work: Path, way: Callable[[Path], float]) -> float:
    """The seconds of one, with what it needs there and nothing left behind."""
    (work / "name").mkdir()
    if way is not a_swap:
        (work / "fresh").mkdir()
    seconds = way(work)
    for left in ("name", "aside"):
        (work / left).rmdir()
    return seconds


@contextmanager
def bed(case: Case) -> Iterator[Bed]:
    """A directory to do it in, beside a store."""
    (filesystem,) = case.words
    with _volume(filesystem) as root:
        time_command([TRASHD, "init", "--known", root])
        work = root / "bench-gap"
        work.mkdir()
        yield Bed({name: partial(take_turn, work, way) for name, way in WAYS.items()})
        work.rmdir()
        time_command([TRASHD, "reap", "--all", "--now", "--yes", "--volume", root])


@contextmanager
def _volume(filesystem: str) -> Iterator[Path]:
    if filesystem == SSHFS:
        with sshfs_volume(UNCACHED, limit_s=300) as served:
            yield served.path
    else:
        yield named()[filesystem]


def named() -> dict[str, Path]:
    """Directories of the filesystems that the environment names."""
    pairs = (one.partition("=") for one in os.environ.get(_NAMED, "").split())
    return {name: Path(path) for name, _, path in pairs}


BENCHMARK = Benchmark(
    "gap",
    "for how long a name is missing where the filesystem can't exchange, beside two bare renames",
    (Case((SSHFS,)), *(Case((name,)) for name in named())),
    (Case((SSHFS,)),),
    bed,
    lambda _case: [Target(f"of {TWO_RENAMES}", times(SWAP, TWO_RENAMES), MAX_TIMES)],
    n_rounds=100,
)
