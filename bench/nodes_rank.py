"""A rank of a job of bench/nodes.py; each says on standard output what it did, in a line of JSON.

    mpiexec -n N python -m bench.nodes_rank reap VOLUME ID N_THREADS     one orphan, as `trashd reap --mpi` does it
    mpiexec -n N python -m bench.nodes_rank plan N_SLICES                slices that do nothing but come and go

The first tells what the plan took: the processor time of the one thread that has it and calls MPI, without the slices
that run beside it in threads.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.threads import CountsSlices
from fusefs.core.pacing import SliceBudget
from fusefs.core.results import Reaped
from fusefs.core.slices import RemovalSliceResult, Slice, SlicePlan, SliceWork, UnfinishedDirectory
from fusefs.engine.mpi_ranks import MpiJob, RankRunner, join_job
from fusefs.engine.pace import FULL_SPEED, SlicePace
from fusefs.engine.run_slices import SliceRunner
from fusefs.engine.strategy import choose_for_rank
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import RemovalOptions, reap
from fusefs.reaper.remove_by_ranks import RemovalByRanks
from fusefs.store.orphans import call_in_folder, find_container

_THREADS = 8
_NAMES, _NAMES_A_SLICE = 400, 40
"""Of a directory that is not there, and what a slice takes of them."""


class Used(NamedTuple):
    """What a rank used: seconds of processor time, all threads and that which calls MPI; and by the clock."""

    all_s: float
    main_s: float
    clock_s: float

    @classmethod
    def so_far(cls) -> Used:
        """Since the process began."""
        return cls(time.process_time(), time.thread_time(), time.monotonic())

    def since(self) -> Used:
        """From then on."""
        return Used(*(now - then for now, then in zip(Used.so_far(), self, strict=True)))


def write_figures(**figures: float) -> None:
    """Write figures as a line of JSON, in one write: the lines of other ranks can't mix with it."""
    os.write(1, json.dumps(figures).encode() + b"\n")


def reap_by(job: MpiJob, volume: Path, identifier: str, n_threads: int) -> None:
    """Be the first rank of a reap."""
    kernel, pace = Kernel(), CountsSlices()
    volumes = [os.fsencode(volume)]
    entry = find_container(kernel, volumes, identifier)
    wishes = RemovalOptions(n_workers=n_threads, pace=pace, job=RemovalByRanks(job))
    before = Used.so_far()
    done = call_in_folder(kernel, volumes, entry, lambda folder, _visible: reap(folder, entry.id, wishes), Reaped)
    used = before.since()
    if done.report.n_failed:
        raise OSError(done.report.failures[0].errno, f"{done.report.n_failed} entries are left")
    write_figures(
        seconds=used.clock_s,
        removed=done.report.removed,
        n_slices=pace.n_slices,
        busy_s=pace.busy_s,
        plan_s=used.main_s,
        used_s=used.all_s,
    )


class Nothing(NamedTuple):
    """Runs slices of directories that are not there, in no time. n_names: of each"""

    n_names: int

    def run_slice(self, work: Slice, _budget: SliceBudget) -> RemovalSliceResult:
        """Return the result of a slice that lists a directory or unlinks some of its names, without doing so."""
        rest, left, n_removed = work.work, tuple[UnfinishedDirectory, ...](), 0
        if rest.emptied:
            n_removed, rest.emptied = len(rest.emptied), []
        elif rest.names:
            n_removed = len(rest.names[-_NAMES_A_SLICE:])
            del rest.names[-_NAMES_A_SLICE:]
        elif self.n_names <= _NAMES_A_SLICE:
            rest.subdirs.pop()
            n_removed = self.n_names + 1
        else:
            begun = SliceWork(names=[f"file{number:07}" for number in range(self.n_names - _NAMES_A_SLICE)], n_passes=1)
            left, n_removed = (UnfinishedDirectory(rest.subdirs.pop(), -1, begun),), _NAMES_A_SLICE
        return RemovalSliceResult(n_removed, 0, (), 0, rest, left)


@contextmanager
def open_nothing(kernel: Kernel, n_ranks: int) -> Iterator[RankRunner[Slice, RemovalSliceResult]]:
    """See OpensRunner."""
    with kernel.open_path(b"/", os.O_RDONLY | os.O_DIRECTORY) as fd:
        yield RankRunner(Nothing(_NAMES_A_SLICE).run_slice, choose_for_rank(kernel, fd, _THREADS, n_ranks))


def plan_of(n_workers: int, n_directories: int, n_machines: int) -> tuple[SlicePlan, int]:
    """So many directories that are not there; and the key of what they are in."""
    plan = SlicePlan(n_workers, splits_names=True, n_machines=n_machines)
    return plan, plan.add(-1, b"", SliceWork(subdirs=[f"dir{number:07}" for number in range(n_directories)]))


def plan_by(job: MpiJob, n_slices: int) -> None:
    """Be the first rank of a job that does nothing, as fast as it can: a slice is one directory."""
    with open_nothing(Kernel(), job.n_ranks) as ours, job.crew(ours, open_nothing) as crew:
        (plan, top), n_done = plan_of(crew.n_workers, crew.n_workers, crew.n_ranks), 0

        def finish_slice(work: Slice, outcome: RemovalSliceResult) -> None:
            nonlocal n_done
            plan.finish_slice(work, outcome)
            n_done += 1
            plan.add_subdirs(top, (f"more{n_done:07}",))

        strategy = crew.local_runner.strategy._replace(n_workers=crew.n_workers)
        before = Used.so_far()
        SliceRunner(
            plan, ours.run_slice, strategy, SlicePace(FULL_SPEED), lambda: n_done >= n_slices, finish_slice, crew
        ).run_plan()
        used = before.since()
    write_figures(seconds=used.clock_s, n_slices=n_done, plan_s=used.main_s, used_s=used.all_s)


def plan_alone(n_workers: int, n_slices: int) -> float:
    """Seconds of processor time of a slice: the plan, and what is pickled both ways; workers elsewhere do nothing.

    One of ten comes back when one directory is begun in it; the others are of such a directory's names.

    n_workers  so many slices are under way; those end first that began first
    """
    n_directories = n_workers + (n_workers + n_slices) // (_NAMES // _NAMES_A_SLICE)
    (plan, _top), running = plan_of(n_workers, n_directories, n_workers), deque[Slice]()

    def pass_on(n: int) -> None:
        for _ in range(n):
            while len(running) < n_workers and not plan.is_dry() and (begun := plan.next()):
                running.append(begun)
            work = running.popleft()
            given: Slice = pickle.loads(pickle.dumps(work))
            plan.finish_slice(work, pickle.loads(pickle.dumps(runner.run_slice(given, SliceBudget()))))

    runner = Nothing(_NAMES)
    pass_on(n_workers)
    began_s = time.process_time()
    pass_on(n_slices)
    return (time.process_time() - began_s) / n_slices


def main() -> None:
    """Be a rank."""
    what, *words = sys.argv[1:]
    with join_job() as job:
        if not job.is_first:
            before = Used.so_far()
            job.serve(Kernel())
            write_figures(used_s=before.since().all_s)
        elif what == "reap":
            reap_by(job, Path(words[0]), words[1], int(words[2]))
        else:
            plan_by(job, int(words[0]))


if __name__ == "__main__":
    main()
