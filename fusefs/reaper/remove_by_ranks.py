"""Shares removals among the ranks of an MPI job: each rank opens the container, and directories in it, by path."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import NamedTuple

from fusefs.core.container_states import State
from fusefs.core.errors import NotFound
from fusefs.core.names import ContainerId, Name, VolumeId, join_path
from fusefs.core.pacing import NamesPerClockCheck, SliceBudget
from fusefs.core.printable_names import printable
from fusefs.core.record import Failure, Record
from fusefs.core.results import LATE_ARRIVAL
from fusefs.core.slices import RemovalSliceResult, Slice, SliceWork, encode_name
from fusefs.engine.mpi_ranks import DirectoriesByPath, MpiJob, RankCrew, RankRunner
from fusefs.engine.strategy import AllocationGroups, choose_for_rank
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.reaper.inner_stores import InnerStores
from fusefs.reaper.late_arrivals import LateArrivals
from fusefs.reaper.reap import RemovalOptions
from fusefs.reaper.remove_slice import SliceRemover
from fusefs.reaper.server_outage import CUT_OFF, DOUBTFUL, may_be_away, probe_server
from fusefs.store.container import HeldContainer, open_record, read_record
from fusefs.store.find_stores import open_store_at
from fusefs.store.layout import UserFolder
from fusefs.store.user_folders import open_user_folder

_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""Errors that mean that a slice's directory is no longer at its path; the parent directory's slice handles this."""
_PATIENCE_S, _PAUSE_S = 30.0, 0.2
"""How long a rank tries to find a container that the first rank has just claimed, and the pause between attempts."""
_PathRunner = RankRunner[Slice, RemovalSliceResult | None]


class RemovalByRanks(NamedTuple):
    """Shares removals among the ranks of an MPI job (see SharesRemovals)."""

    job: MpiJob

    def check_folder(self, folder: UserFolder) -> None:
        self.job.prepare(SharedFolder.of(folder).opened)

    @contextmanager
    def crew(self, held: HeldContainer, options: RemovalOptions) -> Iterator[RankCrew[Slice, RemovalSliceResult]]:
        flags = options.by_force, options.without_doubt, options.with_stores
        folder, called = SharedFolder.of(held.folder), held.stored_as or held.id
        removal = SharedRemoval(folder, called, held.record, options.n_workers, *flags)
        with removal.opened(held.folder.store.kernel, self.job.n_ranks) as path_runner:
            local_runner = RankRunner(partial(_run_local, path_runner), path_runner.strategy)
            with self.job.crew(local_runner, removal.opened) as crew:
                yield crew


def _run_local(runner: _PathRunner, work: Slice, budget: SliceBudget) -> RemovalSliceResult:
    """Run a slice in the first rank. If its directory is not found, it has been removed, so the result is empty."""
    return runner.run_slice(work, budget) or RemovalSliceResult(0, 0, (), 0, SliceWork())


class SharedFolder(NamedTuple):
    """A user's folder, in a store that has the same path on every machine."""

    store: bytes
    uid: int
    volume: VolumeId

    @classmethod
    def of(cls, folder: UserFolder) -> SharedFolder:
        return cls(folder.store.path(), folder.uid, folder.store.volume.id)

    @contextmanager
    def opened(self, kernel: Kernel, _n_ranks: int) -> Iterator[UserFolder]:
        """Open the folder on this rank's mount. Raises  TrashdError, OSError if it is missing or on another volume"""
        base, name = os.path.split(self.store)
        store = open_store_at(kernel, base, read_mounts(), Name(name))
        if store is None:
            raise NotFound(f"trash store in {printable(base)}")
        with store:
            folder = open_user_folder(store.with_maker(), self.uid)
            if folder is None:
                raise NotFound(f"uid {self.uid}'s directory in the trash store of {printable(base)}")
            with folder:
                if store.volume.id != self.volume:
                    raise NotFound(
                        f"the volume of the first rank (on this node, {printable(self.store)} is a different volume)"
                    )
                yield folder


class SharedRemoval(NamedTuple):
    """A container that every rank can find, and the options for its removal.

    called  the container's name
    record  the record that the first rank read after its claim; a different record belongs to a different container
    n_workers, by_force, without_doubt, with_stores  see RemovalOptions
    """

    folder: SharedFolder
    called: ContainerId
    record: Record
    n_workers: int | None
    by_force: bool
    without_doubt: bool
    with_stores: bool

    @contextmanager
    def opened(self, kernel: Kernel, n_ranks: int) -> Iterator[_PathRunner]:
        """Open the container on this rank's mount and return the runner of its slices."""
        with self._claimed(kernel) as container:
            strategy = choose_for_rank(kernel, container, self.n_workers, n_ranks)
            late_arrivals = LateArrivals(
                kernel, container, self.folder.uid, self.record, without_doubt=self.without_doubt
            )
            inner_stores = InnerStores(kernel, container, with_stores=self.with_stores)
            remover = SliceRemover(
                kernel, container, strategy, AllocationGroups(kernel, None), late_arrivals, inner_stores,
                NamesPerClockCheck(),
                self.by_force, has_server=may_be_away(kernel, container), by_paths=True,
            )  # fmt: skip
            with closing(DirectoriesByPath(kernel, container, late_arrivals.admit)) as directories:
                yield RankRunner(PathRemover(remover, directories).run_slice, strategy)

    def _claimed(self, kernel: Kernel) -> Fd:
        """Open the container. Retry for a while, because this machine's cache may be older than the claim."""
        ends_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with self.folder.opened(kernel, 0) as folder, folder.open(State.REAPING) as reaping:
                    fd = kernel.open_dir(reaping, self.called.encode())
                    with close_on_error(fd), open_record(kernel, fd, folder.uid) as record_fd:
                        if read_record(kernel, record_fd, folder, self.called) == self.record:
                            return fd
                        raise NotFound(f"{self.called} (a different orphan now has this name)")
            except (OSError, NotFound):
                if time.monotonic() >= ends_s:
                    raise
            time.sleep(_PAUSE_S)


class PathRemover(NamedTuple):
    """Runs slices whose directories it opens by their paths."""

    remover: SliceRemover
    directories: DirectoriesByPath

    def run_slice(self, work: Slice, budget: SliceBudget) -> RemovalSliceResult | None:
        """Run a slice. Unfinished directories stay open in this process for the next slice.

        Returns  the result, including kernel errors; None if the directory is not visible on this machine
        """
        try:
            fd = self.directories.open(work.path)
        except OSError as error:
            return None if error.errno in _GONE else self._not_opened(work, error)
        with fd:
            outcome = self.remover.run_slice(work._replace(fd=fd), budget)
        unfinished, path = [], work.path
        for one in outcome.remaining:
            path = join_path(path, encode_name(one.name))
            self.directories.keep(path, Fd(one.fd))
            unfinished.append(one._replace(fd=-1))
        return outcome._replace(remaining=tuple(unfinished))

    def _not_opened(self, work: Slice, error: OSError) -> RemovalSliceResult:
        number = error.errno or errno.EIO
        is_doubtful = self.remover.has_server and number in CUT_OFF | DOUBTFUL
        if is_doubtful and (away := probe_server(self.remover.kernel, self.remover.container)):
            return RemovalSliceResult(0, 0, (), 0, work.work, server_errno=away)
        failure = Failure(
            os.fspath(error.filename or work.path), number, LATE_ARRIVAL if number == errno.EPERM else "open"
        )
        doubts = frozenset({number} if is_doubtful else ())
        return RemovalSliceResult(0, 0, (failure,), 1, SliceWork(n_failed=1), doubts=doubts)
