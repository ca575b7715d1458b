"""Threads of a reap on a slow server: a flat directory, and a tree of a hundred files a directory.

    python -m bench.threads                                         1 ms a call; two minutes
    python -m bench.threads --delay-ms 14 --rounds 1                as a busy metadata server has it; ten minutes

Every call of a FUSE filesystem in C takes that long, whatever it is (tests/support/slowfs.c). Numbers of threads take
turns, each on a fresh tree; medians of the rounds. The longest slice is to take 50 ms, and the call that it ends with;
the calls are what the server was asked, for each entry.

Each run appends a line to bench/results/threads.jsonl. As root only.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bench.support import FILES_PER_DIRECTORY, keep, make_files, make_flat, measuring, tell
from fusefs.core.slice_budget import AT_ONCE, Speed
from fusefs.linux.kernel import Kernel
from fusefs.reaper.remove_tree import RemovalWishes
from tests.support.fuse_slow import slow_volume
from tests.support.mount_namespaces import see_own_mounts_only
from tests.support.real_filesystems import tmpfs_volume
from tests.support.reap_process import empty_container

RESULTS = Path(__file__).with_name("results") / "threads.jsonl"
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


class Run(NamedTuple):
    """What one removal took, and what the server was asked."""

    seconds: float
    n_entries: int
    longest_s: float
    n_calls: int


class _FullSpeed:
    """As fast as it can be; remembers the longest slice."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def tempo(self) -> Speed:
        """See SetsSpeed."""
        return AT_ONCE

    def done(self, _n_entries: int, _n_bytes: int, busy_s: float) -> None:
        """See SetsSpeed."""
        self.longest_s = max(self.longest_s, busy_s)

    def wait(self, seconds: float) -> None:
        """See SetsSpeed."""
        time.sleep(seconds)


def measure(make: Callable[[Path, int], int], n_files: int, n_threads: int, delay_us: int) -> Run:
    """Remove one fresh tree."""
    with tmpfs_volume() as source, slow_volume(source, delay_us, limit_s=_LIMIT_S) as slow:
        (source / "container").mkdir()
        make(source / "container" / "tree", n_files)
        slow.delay_all()
        kernel, pace = Kernel(), _FullSpeed()
        with kernel.open_path(os.fsencode(slow.path / "container"), os.O_RDONLY | os.O_DIRECTORY) as fd:
            before, began_s = sum(slow.n_messages.values()), time.perf_counter()
            report = empty_container(kernel, fd, RemovalWishes(n_workers=n_threads, pace=pace))
            seconds = time.perf_counter() - began_s
        if report.n_failed:
            raise OSError(report.failures[0].errno, f"{report.n_failed} entries are left")
        return Run(seconds, report.removed, pace.longest_s, sum(slow.n_messages.values()) - before)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=1.0)
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    asked = parser.parse_args()
    found: dict[str, dict[int, list[Run]]] = {}
    with measuring():
        see_own_mounts_only()
        for shape in asked.shape or SHAPES:
            runs: dict[int, list[Run]] = {n_threads: [] for n_threads in THREADS}
            found[shape] = runs
            for number in range(asked.rounds):
                for n_threads in THREADS:
                    run = measure(SHAPES[shape], asked.files, n_threads, round(asked.delay_ms * 1000))
                    runs[n_threads].append(run)
                    tell(f"{shape}, {n_threads} threads, round {number + 1}: {run.seconds:.2f} s")
    kept = {
        shape: {str(n): [run._asdict() for run in some] for n, some in runs.items()} for shape, runs in found.items()
    }
    keep(RESULTS, {"delay_ms": asked.delay_ms, "n_files": asked.files, "shapes": kept})
    print("| shape | a call | threads | seconds | entries/s | times one thread | longest slice | calls an entry |")
    print("|---|---|---|---|---|---|---|---|")
    for shape, runs in found.items():
        alone_s = statistics.median(run.seconds for run in runs[1])
        for n_threads, some in runs.items():
            seconds, longest_s = (
                statistics.median(one) for one in zip(*((r.seconds, r.longest_s) for r in some), strict=True)
            )
            print(
                f"| {shape} | {asked.delay_ms:g} ms | {n_threads} | {seconds:.2f} | {some[0].n_entries / seconds:,.0f} "
                f"| {alone_s / seconds:.2f} | {longest_s * 1e3:.0f} ms | {some[0].n_calls / some[0].n_entries:.1f} |"
            )


if __name__ == "__main__":
    _main()
