"""A sweep that deletes, as the ranks of an MPI job share it: each has the directory on its own mount.

Nothing else is shared: to trash or move is a rename, for which a filesystem has one lock, and what comes of it is one
container's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

from fusefs.core.errors import Refused
from fusefs.core.pacing import NamesPerLook, SliceBudget
from fusefs.core.printable_names import printable
from fusefs.core.selection import Matcher, Selection
from fusefs.engine.mpi_ranks import MpiJob, RankCrew, seen_in_time
from fusefs.engine.strategy import AllocationGroups, Strategy, choose_for_rank
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import FUSE_MAGIC, Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.sweep.actions import DeleteMatches
from fusefs.sweep.agenda import Agenda, Job, JobKind, SliceCounts, SweepSlice, SweepSliceResult
from fusefs.sweep.matcher import Dirs, SweepStrategy
from fusefs.sweep.run import open_top, usual_boundary
from fusefs.sweep.sweep_slice import SweepWorker

_PATIENCE_S = 5.0
_NO_DEVICE = -1
"""In place of st_dev, which each machine numbers for itself."""


class SeenDirectory(NamedTuple):
    """What a directory is on whichever machine.

    magic    of its filesystem
    born_ns  0: the filesystem does not tell
    """

    magic: int
    ino: int
    born_ns: int

    @classmethod
    def of(cls, kernel: Kernel, fd: Fd) -> SeenDirectory:
        """As this machine sees it. Raises  OSError"""
        return cls(kernel.filesystem(fd), kernel.fstat(fd).st_ino, kernel.statx(fd, asks=True).btime_ns)


class SweepByRanks(NamedTuple):
    """The ranks of a job, as a sweep has them share it (SweepWishes)."""

    job: MpiJob

    def crew(
        self, worker: SweepWorker, directory: bytes, selection: Selection, n_workers: int | None
    ) -> AbstractContextManager[RankCrew[SweepSlice, SweepSliceResult]]:
        """Who does the slices of a sweep, for the block.

        worker     does them in this process
        directory  its path, the same on every machine
        n_workers  asked for by a person
        Raises     Refused: a rank has another directory there; TrashdError, OSError
        """
        kernel, root = worker.kernel, worker.root.fd
        seen = SeenDirectory.of(kernel, root)
        recipe = SweepRecipe(directory, seen, boot_id(), selection, worker.way.dirs, n_workers)
        ours = RankSweeper(worker, choose_for_rank(kernel, root, n_workers, self.job.n_ranks))
        return self.job.crew(nullcontext(ours), recipe)


class SweepRecipe(NamedTuple):
    """Which directory, as every rank finds it, and what is deleted there.

    boot  of the first rank's machine: a filesystem of one machine alone is not another's
    """

    directory: bytes
    seen: SeenDirectory
    boot: str
    selection: Selection
    dirs: Dirs
    n_slices: int | None

    @contextmanager
    def opened(self, kernel: Kernel, n_ranks: int) -> Iterator[RankSweeper]:
        """See Recipe. Raises  TrashdError, OSError"""
        with ExitStack() as owned:
            top = owned.enter_context(open_top(kernel, self.directory, None))
            root = owned.enter_context(kernel.open_dir(top.sides.fd))
            self._check(kernel, root)
            strategy = choose_for_rank(kernel, root, self.n_slices, n_ranks)
            way = SweepStrategy(self.dirs, strategy.window, strategy.by_inode, strategy.is_at_once, top.mounts)
            sides = BackingAndMount(root, top.sides.mounted)
            groups = owned.enter_context(AllocationGroups(kernel, None))
            matcher = Matcher(self.selection)
            worker = SweepWorker(
                kernel, sides, matcher, DeleteMatches(), way, groups, None, lambda: False, NamesPerLook(),
                usual_boundary(top),
            )  # fmt: skip
            yield RankSweeper(worker, strategy)

    def _check(self, kernel: Kernel, root: Fd) -> None:
        """Raises  Refused: it is not the first rank's directory"""
        if kernel.is_local(root) and self.boot != boot_id():
            raise Refused("that is a filesystem of this machine alone", "a sweep by ranks needs one that all have")
        seen_in_time(lambda: self._compare(kernel, root), _PATIENCE_S, Refused)

    def _compare(self, kernel: Kernel, root: Fd) -> None:
        if SeenDirectory.of(kernel, root) != self.seen:
            raise Refused(f"the first rank has another {printable(self.directory)}")


class RankSweeper(NamedTuple):
    """Runs slices of a sweep in a rank (engine.run_slices.RankRunner)."""

    worker: SweepWorker
    strategy: Strategy

    def run(self, work: SweepSlice, budget: SliceBudget) -> SweepSliceResult:
        """Do a slice, in which directories are known as they are on this machine."""
        root = self.worker.root.fd
        device = self.worker.kernel.fstat(root).st_dev
        # libfuse may number what it shows as it goes: such a number says nothing on another machine.
        numbers_last = self.worker.kernel.filesystem(root) != FUSE_MAGIC
        jobs = [_seen_from(job, device) for job in work.jobs]
        outcome = self.worker.run(work._replace(jobs=tuple(jobs)), budget)
        return outcome._replace(rest=_for_all(outcome.rest, numbers_last=numbers_last))

    def may_share(self, work: SweepSlice) -> bool:
        """See RankRunner: directories to enter."""
        return work.jobs[-1].kind is JobKind.ENTER

    def shared(self, work: SweepSlice) -> SharedSweep:
        """See RankRunner."""
        return SharedSweep(work, self.strategy)


class SharedSweep:
    """Directories that all threads of a rank sweep: an agenda within the first rank's (run_slices.SharedSlice)."""

    def __init__(self, work: SweepSlice, strategy: Strategy) -> None:
        """Begin with that. strategy: of the rank"""
        jobs = reversed(work.jobs)
        self._agenda = Agenda(jobs, strategy.n_workers, None, splits=strategy.splits, lists_whole=True)
        self._counts = SliceCounts(None)
        self._why = ""
        self._busy_s = 0.0

    def is_dry(self) -> bool:
        """See SharedSlice; nor does it go on where that is useless."""
        return self._why != "" or self._agenda.is_dry()

    def is_crowded(self) -> bool:
        """See SharedSlice: an agenda does not tell."""
        return False

    def next(self) -> SweepSlice | None:
        """See SharedSlice."""
        return None if self._why else self._agenda.next()

    def lost(self, lost: SweepSlice) -> None:
        """See SharedSlice."""
        self._agenda.lost(lost)

    def done(self, part: SweepSlice, outcome: SweepSliceResult) -> None:
        """See SharedSlice."""
        self._agenda.done(part, outcome)
        self._counts.add(outcome.sums, outcome.failures, outcome.spared)
        self._why = self._why or outcome.why
        self._busy_s += outcome.busy_s

    def told(self, *, goes_on: bool) -> SweepSliceResult:
        """See SharedSlice."""
        counts, busy_s = self._counts, self._busy_s
        self._counts, self._busy_s = SliceCounts(None), 0.0
        rest = () if goes_on else self._agenda.left()
        failures, spared = tuple(counts.failures), tuple(counts.spared)
        return SweepSliceResult(counts.sums, failures, spared, rest, self._why, busy_s=busy_s, goes_on=goes_on)


def _seen_from(job: Job, device: int) -> Job:
    return job if job.inode is None else job._replace(inode=(device, job.inode[1]))


def _for_all(jobs: Sequence[Job], *, numbers_last: bool) -> tuple[Job, ...]:
    return tuple(
        job if job.inode is None else job._replace(inode=(_NO_DEVICE, job.inode[1]) if numbers_last else None)
        for job in jobs
    )
