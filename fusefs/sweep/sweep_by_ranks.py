"""Share a deleting sweep among the ranks of an MPI job; each rank reaches the directory through its own mount.

Only deletions are shared. Trashing and moving use renames, and a filesystem has only one lock for these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

from fusefs.core.errors import Refused
from fusefs.core.pacing import NamesPerClockCheck, SliceBudget
from fusefs.core.printable_names import printable
from fusefs.core.selection import Matcher, Selection
from fusefs.engine.mpi_ranks import MpiJob, RankCrew, RankRunner
from fusefs.engine.strategy import AllocationGroups, choose_for_rank
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import FUSE_MAGIC, Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.sweep.actions import DeleteMatches
from fusefs.sweep.agenda import Job, SweepSlice, SweepSliceResult
from fusefs.sweep.matcher import Dirs, SweepStrategy
from fusefs.sweep.run_sweep import open_top, usual_boundary
from fusefs.sweep.sweep_slice import SweepWorker

_NO_DEVICE = -1
"""Replaces st_dev, which differs from machine to machine."""


DirectoryIdentity = tuple[int, int, int]
"""A directory's identity on all machines: its filesystem's magic, inode number, and birth time (0: not known)."""


def identify_anywhere(kernel: Kernel, fd: Fd) -> DirectoryIdentity:
    return kernel.filesystem(fd), kernel.fstat(fd).st_ino, kernel.statx(fd, asks_server=True).btime_ns


class SweepByRanks(NamedTuple):
    """The ranks of a job, as a sweep uses them (SweepOptions)."""

    job: MpiJob

    def crew(
        self, worker: SweepWorker, directory: bytes, selection: Selection, n_workers: int | None
    ) -> AbstractContextManager[RankCrew[SweepSlice, SweepSliceResult]]:
        """Prepare all ranks for a sweep. Raises  Refused: a rank finds another directory; TrashdError, OSError"""
        kernel, root = worker.kernel, worker.root.fd
        shared = SharedSweep(
            directory, identify_anywhere(kernel, root), boot_id(), selection, worker.strategy.dirs, n_workers
        )
        strategy = choose_for_rank(kernel, root, n_workers, self.job.n_ranks)
        return self.job.crew(RankRunner(partial(_run_slice, worker), strategy), shared.opened)


class SharedSweep(NamedTuple):
    """The directory, as every rank must find it, and the selection to delete there.

    boot  boot ID of the first rank's machine; on another machine, a local filesystem is a different one
    """

    directory: bytes
    identity: DirectoryIdentity
    boot: str
    selection: Selection
    dirs: Dirs
    n_workers: int | None

    @contextmanager
    def opened(self, kernel: Kernel, n_ranks: int) -> Iterator[RankRunner[SweepSlice, SweepSliceResult]]:
        """See OpensRunner."""
        with open_top(kernel, self.directory, None) as top, kernel.open_dir(top.sides.fd) as root:
            if kernel.is_local(root) and self.boot != boot_id():
                raise Refused(f"{printable(self.directory)}: on a local filesystem", "--mpi needs a shared filesystem")
            if identify_anywhere(kernel, root) != self.identity:
                raise Refused(f"{printable(self.directory)}: not the same directory as on the first rank")
            strategy = choose_for_rank(kernel, root, self.n_workers, n_ranks)
            sweep_strategy = SweepStrategy(
                self.dirs, strategy.window, strategy.by_inode, strategy.is_at_once, top.mounts
            )
            worker = SweepWorker(
                kernel, BackingAndMount(root, top.sides.mounted), Matcher(self.selection), DeleteMatches(),
                sweep_strategy, AllocationGroups(kernel, None), None, lambda: False, NamesPerClockCheck(),
                usual_boundary(top),
            )  # fmt: skip
            yield RankRunner(partial(_run_slice, worker), strategy)


def _run_slice(worker: SweepWorker, work: SweepSlice, budget: SliceBudget) -> SweepSliceResult:
    """Run a slice, using this machine's identities of directories."""
    kernel, root = worker.kernel, worker.root.fd
    outcome = worker.run_slice(work._replace(jobs=_on_device(work.jobs, kernel.fstat(root).st_dev)), budget)
    if kernel.filesystem(root) == FUSE_MAGIC:
        # libfuse may assign inode numbers dynamically, so these are meaningless on another machine.
        return outcome._replace(rest=tuple(job._replace(inode=None) for job in outcome.rest))
    return outcome._replace(rest=_on_device(outcome.rest, _NO_DEVICE))


def _on_device(jobs: tuple[Job, ...], device: int) -> tuple[Job, ...]:
    return tuple(job if job.inode is None else job._replace(inode=(device, job.inode[1])) for job in jobs)
