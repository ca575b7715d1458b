"""Threads of a reap on a slow server: a flat directory, and a tree of a hundred files a directory.

Every call of a FUSE filesystem in C takes that long, whatever it is (tests/support/slowfs.c): 1 ms, or 14 as a busy
metadata server has it. Numbers of threads take turns, each on a fresh tree. The longest slice is to take 50 ms, and the
call that it ends with; the calls are what the server was asked, for each entry.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

from bench.runner import Bed, Benchmark, Case
from bench.support import FILES_PER_DIRECTORY, make_files, make_flat
from bench.verdicts import Target, times
from fusefs.core.pacing import UNLIMITED, Speed
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import RemovalOptions
from tests.support.fuse_slow import slow_volume
from tests.support.real_filesystems import tmpfs_volume
from tests.support.reap_process import empty_container

THREADS = (1, 4, 16)
PER_DIRECTORY = FILES_PER_DIRECTORY // 10
_LIMIT_S = 3600.0


def make_small_tree(path: Path, n_files: int) -> int:
    """Directories of a hundred files; the number of files."""
    path.mkdir()
    for number in range(n_files // PER_DIRECTORY):
        (path / str(number)).mkdir()
        make_files(path / str(number), PER_DIRECTORY)
    return n_files


SHAPES = MappingProxyType[str, Callable[[Path, int], int]]({"flat": make_flat, "tree": make_small_tree})


class CountsSlices:
    """As fast as it can be; remembers how many slices there were, and how long they took."""

    def __init__(self) -> None:
        self.n_slices = 0
        self.busy_s = self.longest_s = 0.0

    def tempo(self) -> Speed:
        """See Pacer."""
        return UNLIMITED

    def record_work(self, _n_entries: int, _n_bytes: int, busy_s: float) -> None:
        """See Pacer."""
        self.n_slices += 1
        self.busy_s += busy_s
        self.longest_s = max(self.longest_s, busy_s)

    def wait(self, seconds: float) -> None:
        """See Pacer."""
        time.sleep(seconds)


def take_turn(make: Callable[[Path, int], int], n_files: int, n_threads: int, delay_us: int) -> dict[str, float]:
    """Remove one fresh tree: seconds, those of the longest slice, and what the server was asked for each entry."""
    with tmpfs_volume() as source, slow_volume(source, delay_us, limit_s=_LIMIT_S) as slow:
        (source / "container").mkdir()
        make(source / "container" / "tree", n_files)
        slow.delay_all()
        kernel, pace = Kernel(), CountsSlices()
        with kernel.open_path(os.fsencode(slow.path / "container"), os.O_RDONLY | os.O_DIRECTORY) as fd:
            before, began_s = sum(slow.n_messages.values()), time.perf_counter()
            report = empty_container(kernel, fd, RemovalOptions(n_workers=n_threads, pace=pace))
            seconds = time.perf_counter() - began_s
        if report.n_failed:
            raise OSError(report.failures[0].errno, f"{report.n_failed} entries are left")
        n_calls = sum(slow.n_messages.values()) - before
        return {"": seconds, "longest slice": pace.longest_s, "calls an entry": n_calls / report.removed}


def _called(n_threads: int) -> str:
    return f"{n_threads} threads" if n_threads > 1 else "one thread"


@contextmanager
def bed(case: Case) -> Iterator[Bed]:
    """Each turn makes what it needs."""
    shape, delay = case.words
    delay_us = round(float(delay.removesuffix("ms")) * 1000)
    yield Bed({_called(n): partial(take_turn, SHAPES[shape], case.n, n, delay_us) for n in THREADS})


def _targets(_case: Case) -> Sequence[Target]:
    return [Target(f"{_called(n)}, of one thread's time", times(_called(n), _called(1)), 1) for n in THREADS[1:]]


BENCHMARK = Benchmark(
    "threads",
    "threads of a reap on a server each of whose answers takes 1 or 14 ms",
    tuple(Case((shape, delay), 3000) for delay in ("1ms", "14ms") for shape in SHAPES),
    tuple(Case((shape, "1ms"), 300) for shape in SHAPES),
    bed,
    _targets,
    n_rounds=3,
)
