"""Run a sweep: open the directory and the action, run slices of work, and finish the action."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Self

from fusefs.core.errors import AcrossUsers, NotFound, from_os
from fusefs.core.pacing import NamesPerClockCheck
from fusefs.core.printable_names import printable
from fusefs.core.results import OUTSIDE, Swept
from fusefs.core.selection import ListedNames, ListedPath, Matcher
from fusefs.engine.pace import DeviceQueue, SlicePace
from fusefs.engine.run_slices import SliceRunner
from fusefs.engine.strategy import AllocationGroups, Strategy, Workers, choose_strategy
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import every_place, mounts_inside, place_of, relative_to, trashd_views
from fusefs.store.backing_and_mount import BackingAndMount, Scope
from fusefs.store.layout import trusted_owners
from fusefs.store.victim import find_scope
from fusefs.store.walk import must_check_owners
from fusefs.sweep.actions import (
    CountMatches,
    DeleteMatches,
    OutputError,
    PrintMatches,
    open_destination,
    open_move,
    open_trash,
)
from fusefs.sweep.agenda import Agenda, Job, JobKind, SliceCounts, SweepSlice, SweepSliceResult
from fusefs.sweep.matcher import Dirs, SweepStrategy
from fusefs.sweep.names_from_list import BrokenList, jobs_of
from fusefs.sweep.open_directories import open_directory
from fusefs.sweep.request import (
    Action,
    ActionRequest,
    Identified,
    Request,
    SweepOptions,
    SweepRoot,
    TakingBoundary,
    ToDelete,
    ToMove,
    ToPrint,
    ToTrash,
    identify,
)
from fusefs.sweep.sweep_slice import SweepWorker

DEFAULT_SWEEP = SweepOptions()
_FIRST_S = 0.005
"""Time for the first slice, which runs in this process: enough for most sweeps."""
_WINDOW = 65_536


def run_request(kernel: Kernel, request: Request, options: SweepOptions = DEFAULT_SWEEP) -> Swept:
    """Run a sweep.

    Raises  TrashdError, before any change; whatever `ToPrint.print_names` raises
    Failures of single entries are not raised, but returned in the result.
    """
    with ExitStack() as owned:
        top = owned.enter_context(open_top(kernel, request.directory, request.inode))
        boundary = request.boundary
        if boundary is None and not isinstance(request.action, ToPrint):
            boundary = usual_boundary(top)
        action = owned.enter_context(_open(kernel, top, request))
        try:
            walk = _walk(kernel, top, request, request.wraps(action), _dirs(request.action), options, boundary)
        except OutputError as untellable:
            raise untellable.error from None
        except OSError as error:
            raise from_os(error, top.path) from error
        return action.end(walk._replace(looks=walk.sums.n_bytes > 0))


def usual_boundary(top: SweepRoot) -> TakingBoundary | None:
    """Return the default limits of a sweep for root, or None for any other user. Raises  AcrossUsers"""
    if not must_check_owners():
        return None
    if top.whose is None:
        why = f"{printable(top.path)} (the path leads from one user's directory into another's)"
        raise AcrossUsers(
            why, "sweep the directory as its owner, or by a rule in a plan, which includes it from the second run on"
        )
    return TakingBoundary(top.whose)


@contextmanager
def _open(kernel: Kernel, top: SweepRoot, request: Request) -> Iterator[Action]:
    with ExitStack() as owned:
        match request.action:
            case ToTrash() as to:
                yield owned.enter_context(open_trash(kernel, top, to))
            case ToDelete():
                yield DeleteMatches()
            case ToMove() as to:
                yield owned.enter_context(open_move(kernel, top, to))
            case ToPrint() as to:
                yield PrintMatches(to)
            case _:  # ToCount: a type checker reports a missing case (`assert_never` would load typing)
                instead = request.action.instead
                avoided: frozenset[Identified] = frozenset()
                if isinstance(instead, ToMove):
                    # This refuses what a move would refuse, and changes nothing.
                    avoided = frozenset({owned.enter_context(open_destination(kernel, top, instead.target)).identified})
                yield CountMatches(request.selection, avoided, takes_dirs=_dirs(instead) is Dirs.WHOLE)


def _dirs(action: ActionRequest | None) -> Dirs:
    match action:
        case ToTrash() | ToMove():
            return Dirs.WHOLE
        case ToDelete(recursive):
            return Dirs.STRIPPED if recursive else Dirs.LAST
        case ToPrint() | None:
            return Dirs.FIRST
    # ToCount: if a directory is taken whole, its content does not count as separate matches.
    return Dirs.FIRST if _dirs(action.instead) in (Dirs.FIRST, Dirs.LAST) else Dirs.WHOLE


def _walk(
    kernel: Kernel,
    top: SweepRoot,
    request: Request,
    action: Action,
    dirs: Dirs,
    options: SweepOptions,
    boundary: TakingBoundary | None,
) -> Swept:
    """Act on all matches below a directory, but do not finish the action.

    Raises  OSError: the directory itself can't be read
    """
    with ExitStack() as owned:
        root = owned.enter_context(kernel.open_dir(top.sides.fd))
        n_workers = 1 if action.is_single or request.most is not None else request.n_workers
        strategy = choose_strategy(kernel, root, n_workers)
        if dirs is Dirs.WHOLE and n_workers is None and strategy.workers is Workers.PROCESSES:
            # The kernel has one lock per filesystem for renames between directories, so two workers are slower.
            strategy = strategy._replace(n_workers=1, group_shift=None)
        sweep_strategy = SweepStrategy(
            dirs, min(_WINDOW, strategy.window), strategy.by_inode, strategy.is_at_once, top.mounts
        )
        sides = BackingAndMount(root, top.sides.mounted)
        groups = owned.enter_context(AllocationGroups(kernel, strategy.group_shift))
        matcher = Matcher(request.selection)
        stops = _StopFlag(options).is_set
        worker = SweepWorker(
            kernel,
            sides,
            matcher,
            action,
            sweep_strategy,
            groups,
            request.spares,
            stops,
            NamesPerClockCheck(),
            boundary,
        )
        queue = owned.enter_context(closing(DeviceQueue(root)))
        pace = SlicePace(options.pacer, queue.is_busy, strategy.afterwork)
        run_slice, ranks = worker.run_slice, None
        if options.job is not None:
            ranks = owned.enter_context(options.job.crew(worker, top.path, request.selection, n_workers))
            run_slice, strategy = ranks.local_runner.run_slice, strategy._replace(n_workers=ranks.n_workers)
        with _SweepInProgress(top, request, options, worker, strategy) as walking:
            slices = SliceRunner(
                walking.agenda, run_slice, strategy, pace, walking.is_over, walking.finish_slice, ranks
            )
            slices.run_plan(_FIRST_S)
            return walking.result()


class _StopFlag:
    """A request to stop, which is shared between this process and its forks."""

    def __init__(self, options: SweepOptions) -> None:
        self._options = options
        self._shared = mmap.mmap(-1, 1)

    def is_set(self) -> bool:
        """Whether a stop was requested, in this process or in another."""
        if not self._shared[0] and self._options.stops():
            self._shared[0] = 1
        return self._shared[0] != 0


class _SweepInProgress:
    """A sweep in progress: the remaining work, and the results so far."""

    def __init__(
        self, top: SweepRoot, request: Request, options: SweepOptions, worker: SweepWorker, strategy: Strategy
    ) -> None:
        self._path = top.path
        self._options = options
        self._strategy = worker.strategy
        self._is_stopped = worker.is_stopped
        self._tally = SliceCounts(None)
        self._why = ""
        self._why_list = ""
        self._is_limited = False
        # Some servers use an entry's position as its offset, and skip entries if others are deleted during a listing.
        # A listing that was started on one machine can't be continued on another.
        lists_whole = strategy.workers is Workers.THREADS or options.job is not None
        first = self._first(top, request)
        self.agenda = Agenda(
            first, strategy.n_workers, request.most,
            splits=strategy.splits, lists_whole=lists_whole, reads_late=request.late,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for fd in self.agenda.fds():
            Fd(fd).close()

    def _first(self, top: SweepRoot, request: Request) -> Iterator[Job]:
        if request.names is None:
            return iter([Job(JobKind.ENTER, b"", [""])])
        tops = dict.fromkeys((os.path.abspath(request.directory), top.path))
        return jobs_of(self._read(request.names), tops, self._refuse, 1 if request.late else None)

    def _read(self, names: Iterable[ListedPath | ListedNames]) -> Iterator[ListedPath | ListedNames]:
        """Yield the listed names. If the rest of the list can't be read, the names before it are still processed."""
        try:
            yield from names
        except BrokenList as error:
            self._why_list = f"the rest of the list was ignored: {error.detail}"

    def _refuse(self, name: bytes, why: str) -> None:
        self._tally.fail(name, errno.EXDEV if why == OUTSIDE else errno.EINVAL, why)

    def is_over(self) -> bool:
        """Whether the sweep is over, even if jobs remain."""
        return (self._is_limited and self._strategy.ends_at_limit()) or bool(self._why) or self._is_stopped()

    def finish_slice(self, share: SweepSlice, outcome: SweepSliceResult) -> None:
        for fd in self.agenda.finish_slice(share, outcome):
            Fd(fd).close()
        self._tally.add(outcome.sums, outcome.failures, outcome.spared)
        self._why = self._why or outcome.why
        self._is_limited |= outcome.is_limited
        self._options.progress(self._tally.sums)

    def result(self) -> Swept:
        failures, spared = tuple(self._tally.failures), tuple(self._tally.spared)
        why = self._why or self._why_list
        is_stopped = bool(why) or self._is_stopped()
        return Swept(self._path, self._tally.sums, failures, spared, is_stopped, why, self._is_limited)


@contextmanager
def open_top(kernel: Kernel, directory: bytes, inode: Identified | None) -> Iterator[SweepRoot]:
    """Open the directory of a sweep.

    inode   identity that the directory must have, on the side that the path leads to; None: any
    Raises  the errors of `find_scope`; NotFound: the path leads to another directory; for root, also the errors of
            `open_directory`, since a link that another user can change could lead root anywhere
    """
    whose: int | None = 0
    with find_scope(kernel, directory) as scope:
        sides = scope.sides
        if inode is not None:
            is_it = inode == identify(kernel, sides.names_fd())
        elif os.geteuid() == 0:
            with open_directory(kernel, directory, scope.mounts) as opened:
                # The path may lead to the view of a trashd mount, or to its backing directory.
                is_it = identify(kernel, opened.fd) in [identify(kernel, one) for one in sides if one is not None]
                whose = opened.whose
        else:
            is_it = True
        if not is_it:
            raise NotFound(directory, "it was moved in the meantime")
        yield SweepRoot(scope.path(), sides, tuple(_mounts(scope)), whose)


def _mounts(scope: Scope) -> Iterator[bytes]:
    by_id = {mount.mnt_id: mount for mount in scope.mounts}
    our_views = trashd_views(scope.mounts, trusted_owners(os.geteuid()))
    for place in every_place(scope.place(), our_views):
        for mount in mounts_inside(place, scope.mounts):
            inside = place_of(mount.point, by_id[mount.parent_id])
            yield relative_to(inside.path, place.path)
