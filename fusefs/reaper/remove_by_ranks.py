"""A removal as the ranks of an MPI job share it: each has the container on its own mount, and goes by paths."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from fusefs.core.container_states import State
from fusefs.core.errors import NotFound
from fusefs.core.names import ContainerId, Name, VolumeId, join
from fusefs.core.pacing import NamesPerLook, SliceBudget
from fusefs.core.printable_names import printable
from fusefs.core.record import Failure, Record
from fusefs.core.results import CAME_IN
from fusefs.core.slices import RemovalSliceResult, Slice, SlicePlan, SliceWork, raw
from fusefs.engine.mpi_ranks import DirectoriesByPath, Look, MpiJob, RankCrew, UnseenHere, seen_in_time
from fusefs.engine.strategy import AllocationGroups, Strategy, choose_for_rank
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.reaper.reap import RemovalWishes
from fusefs.reaper.removal_stops import CUT_OFF, DOUBTFUL, InnerStores, LateArrivals, asked, may_be_away
from fusefs.reaper.remove_slice import SliceRemover
from fusefs.store.container import HeldContainer, open_record, read_record
from fusefs.store.find_stores import open_at
from fusefs.store.layout import UserFolder
from fusefs.store.standing import open_user

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""Nothing, or something else, has the name of a directory that was begun: whoever removes it from above sees what."""
_PATIENCE_S = 30.0
"""How long a rank waits until it sees a claim that the first has just made."""


class RemovalByRanks(NamedTuple):
    """See reap.SharesRemovals."""

    job: MpiJob

    def look(self, folder: UserFolder) -> None:
        """See SharesRemovals."""
        store = folder.store
        self.job.prepare(Look(partial(_look_at_store, store.path(), folder.uid, store.volume.id)))

    def crew(
        self, held: HeldContainer, wishes: RemovalWishes
    ) -> AbstractContextManager[RankCrew[Slice, RemovalSliceResult]]:
        """See SharesRemovals."""
        folder, kernel = held.folder, held.folder.store.kernel
        flags = wishes.by_force, wishes.without_doubt, wishes.with_stores
        called = held.called or held.id
        recipe = RemovalRecipe(folder.store.path(), folder.uid, called, held.record, wishes.n_workers, *flags)
        return self.job.crew(recipe.opened_in(kernel, held.fd, self.job.n_ranks, is_first=True), recipe)


class RemovalRecipe(NamedTuple):
    """Which container, as every rank finds it.

    base     the path of the directory that holds the store, the same on every machine
    called   the container's name
    record   as the first rank read it when it had claimed it: what has another one is another container
    n_slices  beside each other in a rank; None: what is best on that filesystem
    by_force, without_doubt, with_stores  as for RemovalWishes
    """

    store: bytes
    uid: int
    called: ContainerId
    record: Record
    n_slices: int | None
    by_force: bool
    without_doubt: bool
    with_stores: bool

    @contextmanager
    def opened(self, kernel: Kernel, n_ranks: int) -> Iterator[PathRemover]:
        """See Recipe. Raises  TrashdError, OSError"""
        with ExitStack() as owned:
            container = self._container(kernel, owned)
            yield owned.enter_context(self.opened_in(kernel, container, n_ranks))

    @contextmanager
    def opened_in(
        self, kernel: Kernel, container: Fd, n_ranks: int, *, is_first: bool = False
    ) -> Iterator[PathRemover]:
        """The runner where the container is open already."""
        with ExitStack() as owned:
            strategy = choose_for_rank(kernel, container, self.n_slices, n_ranks)
            given = LateArrivals(kernel, container, self.uid, self.record, without_doubt=self.without_doubt)
            remover = SliceRemover(
                kernel,
                container,
                strategy,
                owned.enter_context(AllocationGroups(kernel, None)),
                given,
                InnerStores(kernel, container, with_stores=self.with_stores),
                NamesPerLook(),
                self.by_force,
                has_server=may_be_away(kernel, container),
                by_paths=True,
            )
            directories = DirectoriesByPath(kernel, container, given.takes)
            owned.callback(directories.close)
            yield PathRemover(remover, directories, is_first)

    def _container(self, kernel: Kernel, owned: ExitStack) -> Fd:
        """The container, readable; another machine's cache may tell for a while that it is where it was before."""
        with _folder(kernel, self.store, self.uid) as folder:
            fd = seen_in_time(lambda: self._claimed(kernel, folder), _PATIENCE_S, OSError, NotFound)
            return owned.enter_context(fd)

    def _claimed(self, kernel: Kernel, folder: UserFolder) -> Fd:
        with folder.open(State.REAPING) as reaping:
            fd = kernel.open_dir(reaping, self.called.encode())
        with closed_on_error(fd), open_record(kernel, fd, self.uid) as record_fd:
            if read_record(kernel, record_fd, folder, self.called) != self.record:
                raise NotFound(f"{self.called} (another container has its name)")
        return fd


def _look_at_store(path: bytes, uid: int, volume: VolumeId, kernel: Kernel) -> None:
    """Raises  TrashdError, OSError: a user's folder is not seen here, or in another volume's store"""
    with _folder(kernel, path, uid) as folder:
        if folder.store.volume.id != volume:
            raise NotFound(f"the first rank's volume (another one is at {printable(path)})")


@contextmanager
def _folder(kernel: Kernel, path: bytes, uid: int) -> Iterator[UserFolder]:
    base, name = os.path.split(path)
    store = open_at(kernel, base, read_mounts(), Name(name))
    if store is None:
        raise NotFound(f"a trash store in {printable(base)}")
    with store:
        folder = open_user(store.judged(), uid)
        if folder is None:
            raise NotFound(f"a folder of uid {uid} in the trash store of {printable(base)}")
        with folder:
            yield folder


class PathRemover(NamedTuple):
    """Runs slices by their paths (engine.run_slices.RankRunner).

    is_first  what is not seen here is not there
    """

    remover: SliceRemover
    directories: DirectoriesByPath
    is_first: bool

    @property
    def strategy(self) -> Strategy:
        """See RankRunner."""
        return self.remover.strategy

    def run(self, work: Slice, budget: SliceBudget) -> RemovalSliceResult:
        """Do a slice; what it leaves open stays open here, for the next one that comes by.

        Raises  UnseenHere; nothing else: what the kernel refuses is in the outcome
        """
        try:
            is_ours = self.is_first and work.fd >= 0
            fd = Fd(os.dup(work.fd)) if is_ours else self.directories.open(work.path)
        except OSError as error:
            return self._not_opened(work, error)
        with fd:
            outcome = self.remover.run(work._replace(fd=fd), budget)
        left, paths = [], [work.path]
        for one in outcome.left:
            paths.append(join(paths[one.above + 1], raw(one.name)))
            self.directories.keep(paths[-1], Fd(one.fd))
            left.append(one._replace(fd=-1))
        return outcome._replace(left=tuple(left))

    def may_share(self, work: Slice) -> bool:
        """See RankRunner."""
        return SharedRemoval.takes(work)

    def shared(self, work: Slice) -> SharedRemoval:
        """See RankRunner."""
        return SharedRemoval(work, self.strategy)

    def _not_opened(self, work: Slice, error: OSError) -> RemovalSliceResult:
        number = error.errno or errno.EIO
        if number in _GONE:
            if not self.is_first:
                raise UnseenHere from error
            return RemovalSliceResult(0, 0, (), 0, SliceWork())
        doubts = frozenset[int]()
        if self.remover.has_server and number in CUT_OFF | DOUBTFUL:
            away = asked(self.remover.kernel, self.remover.container)
            if away:
                return RemovalSliceResult(0, 0, (), 0, work.work, away=away)
            doubts = frozenset({number})
        call = CAME_IN if number == errno.EPERM else "open"
        failure = Failure(os.fspath(error.filename or work.path), number, call)
        return RemovalSliceResult(0, 0, (failure,), 1, SliceWork(n_failed=1), doubts=doubts)


class SharedRemoval:
    """Directories that all threads of a rank empty: a plan within the first rank's (run_slices.SharedSlice)."""

    def __init__(self, work: Slice, strategy: Strategy) -> None:
        """Begin with that. strategy: of the rank"""
        self._plan = SlicePlan(
            strategy.n_workers, splits_names=strategy.splits, least_share=strategy.least_share, n_machines=1
        )
        self._plan.add(work.fd, work.path, work.work, is_hoisted=work.is_hoisted)
        self._hoisted: list[str] = []
        self._made_hoisted = False
        self._busy_s = 0.0
        self._away = 0

    @staticmethod
    def takes(work: Slice) -> bool:
        """Slices of directories; at one directory's names there are as many threads as the first plan says."""
        return bool(work.work.subdirs) and work.max_depth > 0

    def is_dry(self) -> bool:
        """See SharedSlice; nor does it go on when the server is away."""
        return self._away != 0 or self._plan.is_dry()

    def is_crowded(self) -> bool:
        """See SharedSlice."""
        return not self._plan.has_free()

    def next(self) -> Slice | None:
        """See SharedSlice."""
        return None if self._away else self._plan.next()

    def lost(self, lost: Slice) -> None:
        """See SharedSlice."""
        self._plan.lost(lost)

    def done(self, part: Slice, outcome: RemovalSliceResult) -> None:
        """See SharedSlice."""
        self._plan.done(part, outcome)
        self._hoisted += outcome.hoisted
        self._made_hoisted |= outcome.made_hoisted
        self._busy_s += outcome.busy_s
        self._away = self._away or outcome.away

    def told(self, *, goes_on: bool) -> RemovalSliceResult:
        """See SharedSlice."""
        told = self._plan.told()._replace(
            hoisted=tuple(self._hoisted), made_hoisted=self._made_hoisted, busy_s=self._busy_s, away=self._away
        )
        self._hoisted, self._made_hoisted, self._busy_s = [], False, 0.0
        if goes_on:
            return told
        rest, left = self._plan.left()
        return told._replace(rest=rest, left=left, goes_on=False)
