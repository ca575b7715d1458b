"""Reaps an orphan: claims it, and removes its contents and the container, or quarantines what remains."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fusefs.core.container_states import State
from fusefs.core.errors import BadRecord
from fusefs.core.names import ContainerId, join_path
from fusefs.core.orphan_sums import Survey
from fusefs.core.pacing import NamesPerClockCheck, SliceBudget
from fusefs.core.record import MAX_ENTERED, Entered, Failure, Record, quote_path
from fusefs.core.results import Progress, Reaped, Report, ShouldStop, own_reasons_first
from fusefs.core.slices import RemovalSliceResult, Slice, SlicePlan, SliceWork
from fusefs.engine.pace import FULL_SPEED, DeviceQueue, Pacer, SlicePace
from fusefs.engine.run_slices import SliceRunner
from fusefs.engine.strategy import AllocationGroups, choose_strategy
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.inner_stores import InnerStores
from fusefs.reaper.late_arrivals import LateArrivals
from fusefs.reaper.remove_slice import SliceRemover
from fusefs.reaper.server_outage import CUT_OFF, OutageOptions, ServerOutage, ServerWasAway, may_be_away
from fusefs.store.container import ClaimLost, HeldContainer, claim, dissolve, move_to_state, resume, rewrite_record
from fusefs.store.layout import HOISTED, TREE, UserFolder
from fusefs.store.mounted_paths import refuse_mounted
from fusefs.store.recover import Origin
from fusefs.store.reserve import SPARE_FOR_REAPER, call_with_room
from fusefs.store.stage import restock

if TYPE_CHECKING:
    from fusefs.engine.mpi_ranks import RankCrew  # imported late: only --mpi needs it

Crew = AbstractContextManager["RankCrew[Slice, RemovalSliceResult]"]


class SharesRemovals(Protocol):
    """An MPI job whose ranks share the removals of the first rank (RemovalByRanks)."""

    def check_folder(self, folder: UserFolder) -> None:
        """Check, before anything is claimed, that all ranks find the folder. Raises  Refused if one does not"""

    def crew(self, held: HeldContainer, options: RemovalOptions) -> Crew:
        """Return the ranks that remove a container's contents, for a `with` block.

        held    the container; its record must be the same as on disk
        Raises  Refused if a rank can't find the container; TrashdError, OSError
        """


class RemovalOptions(NamedTuple):
    """Options for a removal.

    n_workers  how many slices run at a time; None: the best number for the filesystem
    pace       the speed, read before each slice; full speed by default
    progress   called after each slice with the numbers of entries and bytes removed
    stops      called between slices; returns whether to stop
    parks      like `stops`, but not called while a large file is being truncated step by step, because a stop would
               free the rest of the file at once
    by_force   whether to clear immutable and append-only flags that forbid a removal
    without_doubt  whether to remove late arrivals (reaper/late_arrivals.py), too, at the user's request
    with_stores  whether to remove inner stores with content, too, except for their pinned orphans
    counted    called with the size before anything is removed; None: do not count, since counting costs a stat per file
    counting   called with the progress of the count
    outage     how long to wait for a server that does not answer
    """

    n_workers: int | None = None
    pace: Pacer = FULL_SPEED
    progress: Progress = lambda _entries, _bytes: None
    stops: ShouldStop = lambda: False
    parks: ShouldStop = lambda: False
    by_force: bool = False
    without_doubt: bool = False
    with_stores: bool = False
    counted: Callable[[Survey], None] | None = None
    counting: Progress = lambda _entries, _bytes: None
    outage: OutageOptions = OutageOptions()
    job: SharesRemovals | None = None

    def ends(self) -> bool:
        """Return whether to stop; must be called only where no large file is being truncated."""
        return self.stops() or self.parks()


DEFAULT_REMOVAL = RemovalOptions()


_NAME_MAX_BYTES = 4000
_NAMES_MAX_BYTES = 16_000
_NOTHING = Report(0, (), 0)


def reap(
    folder: UserFolder,
    container: ContainerId,
    options: RemovalOptions = DEFAULT_REMOVAL,
    is_still_due: Callable[[Record], bool] = lambda _record: True,
) -> Reaped:
    """Reap an orphan, or complete a reap after the reaper was killed. Must run as the folder's owner.

    If the reap is stopped, or the server stays away, the orphan stays in reaping/, where the next reap continues.
    is_still_due  called with the record after the claim; returns whether to reap the orphan, since its owner may have
                  pinned it in the meantime
    Raises   BadRecord; ServerAway; OSError; NoBacking if the folder is reached through one of our mounts
    """
    return _ReapRun(folder, container, options, is_still_due).reap()


class _ReapRun:
    """A reap, which claims the orphan and removes its contents, and starts again after each server outage."""

    def __init__(
        self,
        folder: UserFolder,
        container: ContainerId,
        options: RemovalOptions,
        is_still_due: Callable[[Record], bool],
    ) -> None:
        self._folder = folder
        self._kernel = folder.store.kernel
        self._container = container
        self._options = options
        self._is_still_due = is_still_due
        self._outage = ServerOutage(self._kernel, options.outage, options.ends)
        self._has_server = may_be_away(self._kernel, folder.fd)
        self._is_whole = False
        self._is_emptied = False
        self._counts: Survey | None = None
        self._entered: tuple[Entered, ...] = ()
        self._before = self._removed_now = _NOTHING._replace(n_bytes=0)

    def reap(self) -> Reaped:
        while True:
            try:
                reaped = self._claim_and_remove()
            except ServerWasAway as away:
                self._before = _sum(self._before, away.report)
                self._entered = (*away.entered, *self._entered)
                continue
            except OSError as error:
                if not self._has_server:
                    raise
                goes_on = self._outage.wait_after(error, self._folder.fd)
                self._before = _sum(self._before, self._removed_now)._replace(failures=(), n_failed=0)
                if not goes_on:
                    stopped = self._before._replace(stopped=True)
                    return Reaped(self._container, None, stopped, self._counts)
                continue
            if reaped.lost is None:
                self._outage.note_progress()
            return reaped._replace(report=_sum(self._before, reaped.report))

    def _claim_and_remove(self) -> Reaped:
        folder, options = self._folder, self._options
        self._removed_now = _NOTHING._replace(n_bytes=0)
        refuse_mounted(self._kernel, folder.fd)
        if options.job is not None:
            options.job.check_folder(folder)
        held = self._hold()
        if isinstance(held, ClaimLost):
            lost = None if held is ClaimLost.GONE and self._is_emptied else held.value
            return Reaped(self._container, lost, _NOTHING, self._counts)
        with held:
            crew = None if options.job is None else options.job.crew(held, options)
            held = held._replace(record=_with_entered(held.record, self._entered))
            if self._counts is None:
                self._counts = _survey(self._kernel, held.fd, options)
            late_arrivals = LateArrivals(
                self._kernel, held.fd, folder.uid, held.record, without_doubt=options.without_doubt
            )
            report, entered = remove_contents(self._kernel, held.fd, late_arrivals, options, self._outage, crew)
            self._removed_now = report
            if report.stopped:
                if entered:
                    with suppress(OSError):  # if the volume is full, these directories are in doubt in the next reap
                        rewrite_record(held, _with_entered(held.record, entered))
                return Reaped(self._container, None, report, self._counts)
            if report.n_failed == 0:
                self._is_emptied = True
                report = _with_recorded_size(_retire(held, report), held.record, is_whole=self._is_whole)
            if report.n_failed:
                _set_aside(held, report, entered)
        restock(folder)
        return Reaped(self._container, None, report, self._counts)

    def _hold(self) -> HeldContainer | ClaimLost:
        folder, container = self._folder, self._container
        try:
            held = call_with_room(
                folder, SPARE_FOR_REAPER, lambda: claim(folder, State.ORPHANS, container, self._is_still_due)
            )
            self._is_whole |= held is not ClaimLost.GONE
            if held is ClaimLost.GONE:
                held = resume(folder, container, self._is_still_due)
            if held is ClaimLost.GONE:
                held = claim(folder, State.QUARANTINE, container)
        except FileNotFoundError as error:
            if self._is_emptied and self._drop_empty():
                return ClaimLost.GONE
            if self._is_ending():
                return ClaimLost.GONE
            raise BadRecord(container) from error
        return held

    def _is_ending(self) -> bool:
        """Return whether a container without a record has no tree either, so another reap must be removing it."""
        try:
            with self._folder.open(State.REAPING) as reaping:
                self._kernel.stat(reaping, join_path(self._container.encode(), TREE))
        except FileNotFoundError:
            return True
        return False

    def _drop_empty(self) -> bool:
        """Remove a container that we emptied and that lost its record. Return whether it is gone. Raises  OSError"""
        try:
            with self._folder.open(State.REAPING) as reaping:
                self._kernel.rmdir(reaping, self._container.encode())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
            return error.errno == errno.ENOENT
        return True


def _sum(before: Report, report: Report) -> Report:
    """Add an earlier attempt's removals to a report; only the failures of the last attempt count."""
    n_bytes = None if report.n_bytes is None or before.n_bytes is None else report.n_bytes + before.n_bytes
    return report._replace(removed=before.removed + report.removed, n_bytes=n_bytes)


def _survey(kernel: Kernel, container: Fd, options: RemovalOptions) -> Survey | None:
    """Count a container's contents if requested. If the reap is stopped during the count, it is incomplete."""
    if options.counted is None:
        return None
    from fusefs.engine.count_tree import survey  # imported late: few reaps count

    counts = survey(kernel, container, options.counting, stops=options.stops)
    options.counted(counts)
    return counts


def _with_recorded_size(report: Report, record: Record, *, is_whole: bool) -> Report:
    """Take the removed size from the record if files were not counted. is_whole: no earlier reap removed a part"""
    size = record.size
    if size is None or size.is_at_least or record.partial or not is_whole or report.n_failed:
        return report
    return report if report.n_bytes is not None else report._replace(n_bytes=size.surely_freed())


def _retire(held: HeldContainer, report: Report) -> Report:
    """Remove the container itself. Report ENOTEMPTY if a process is still creating files in it."""
    try:
        with Origin(held) as origin:
            origin.unmark()
        dissolve(held)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        failure = Failure(b"", error.errno, "rmdir")
        return report._replace(failures=(failure,), n_failed=1)
    return report


def _within(failures: Iterable[Failure], size_bytes: int) -> Iterator[Failure]:
    """Yield the first failures whose quoted names fit into `size_bytes` together; shorten long names."""
    for failure in failures:
        name = failure.name[-_NAME_MAX_BYTES:]
        size_bytes -= len(quote_path(name))
        if size_bytes < 0:
            return
        yield failure._replace(name=name)


def _with_entered(record: Record, entered: tuple[Entered, ...]) -> Record:
    """Add the directories that this reap noted to a record; keep earlier ones that this reap did not reach."""
    handles = {one.handle for one in entered}
    all_entered = (*entered, *(one for one in record.entered if one.handle not in handles))[:MAX_ENTERED]
    return record._replace(entered=all_entered)


def _set_aside(held: HeldContainer, report: Report, entered: tuple[Entered, ...]) -> None:
    failures = tuple(_within(own_reasons_first(report.failures), _NAMES_MAX_BYTES))
    with suppress(OSError):
        # A full volume might have no room for the reasons; the move to quarantine itself needs no room.
        record = _with_entered(held.record, entered)
        held = rewrite_record(held, record._replace(failures=failures, partial=True, size=None))
    move_to_state(held, State.QUARANTINE)


def remove_contents(
    kernel: Kernel,
    container: Fd,
    late_arrivals: LateArrivals,
    options: RemovalOptions = DEFAULT_REMOVAL,
    outage: ServerOutage | None = None,
    crew: Crew | None = None,
) -> tuple[Report, tuple[Entered, ...]]:
    """Remove a container's `tree` and `hoisted`, and continue after failures.

    Late arrivals (directories that other users moved in after the swap) are kept. Entries that other processes create
    in the tree during the removal are removed, too.
    Returns  the report, which contains the failures of entries; the directories noted for the next attempt by
             `LateArrivals.note`
    Raises   ServerWasAway: the caller must open the container again and repeat the call; ServerAway, OSError; Refused
             if a rank can't find the container
    """
    with ExitStack() as owned:
        outage = outage or ServerOutage(kernel, options.outage, options.ends)
        return _Removal(kernel, container, late_arrivals, options, outage, crew, owned).remove()


class _Removal:
    def __init__(
        self,
        kernel: Kernel,
        container: Fd,
        late_arrivals: LateArrivals,
        options: RemovalOptions,
        outage: ServerOutage,
        crew: Crew | None,
        owned: ExitStack,
    ) -> None:
        self._kernel = kernel
        self._container = container
        self._late_arrivals = late_arrivals
        self._options = options
        self._outage = outage
        self._away = 0
        self._owned = owned
        self._ranks: RankCrew[Slice, RemovalSliceResult] | None = None
        self._run_slice: Callable[[Slice, SliceBudget], RemovalSliceResult]
        if crew is None:
            self._strategy = strategy = choose_strategy(kernel, container, options.n_workers)
            self._run_slice = self._remover_here().run_slice
        else:
            self._ranks = ranks = owned.enter_context(crew)
            self._strategy = strategy = ranks.local_runner.strategy._replace(n_workers=ranks.n_workers)
            self._run_slice = ranks.local_runner.run_slice
        self._plan = SlicePlan(
            strategy.n_workers,
            splits_names=strategy.splits,
            least_share=strategy.least_share,
            n_machines=0 if self._ranks is None else self._ranks.n_ranks,
        )
        queue = owned.enter_context(closing(DeviceQueue(container)))
        self._pace = SlicePace(options.pace, queue.is_busy, strategy.afterwork)
        self._hoisted: int | None = None
        owned.callback(self._close)

    def _remover_here(self) -> SliceRemover:
        kernel, container, options = self._kernel, self._container, self._options
        groups = self._owned.enter_context(AllocationGroups(kernel, self._strategy.group_shift))
        inner_stores = InnerStores(kernel, container, with_stores=options.with_stores)
        return SliceRemover(
            kernel,
            container,
            self._strategy,
            groups,
            self._late_arrivals,
            inner_stores,
            NamesPerClockCheck(),
            options.by_force,
            has_server=may_be_away(kernel, container),
        )

    def remove(self) -> tuple[Report, tuple[Entered, ...]]:
        names = [TREE.decode()]
        try:
            self._open_hoisted()
        except OSError:
            names.append(HOISTED.decode())  # unlinked like a file, since it is not a directory
        self._plan.add(self._container, b"", SliceWork(names=names))
        slices = SliceRunner(
            self._plan, self._run_slice, self._strategy, self._pace, self._is_stopped, self._finish_slice, self._ranks
        )
        slices.run_plan()
        stopped = not self._plan.is_dry()
        doubts = frozenset() if stopped else self._plan.doubts
        number = self._away or min(doubts & CUT_OFF, default=0)
        if number or doubts:
            goes_on = self._outage.wait(number, self._container) if number else self._outage.wait_in_doubt()
            if goes_on:
                raise ServerWasAway(*self._end(stopped=True))
            stopped = number != 0 or self._options.ends()
        if self._hoisted is not None and not stopped:
            with suppress(OSError):  # failures in it are already in the report
                self._kernel.rmdir(self._container, HOISTED)
                self._plan.count_removed(1)
        return self._end(stopped=stopped)

    def _end(self, *, stopped: bool) -> tuple[Report, tuple[Entered, ...]]:
        report = self._plan.report(paced=self._pace.was_always_limited, stopped=stopped)
        self._note(self._plan.unfinished_fds())
        return report, self._plan.entered()

    def _note(self, fds: list[int]) -> None:
        """Note directories that remain, so that the next reap accepts them."""
        with suppress(OSError):
            self._plan.record_entered(self._late_arrivals.note(fds))

    def _open_hoisted(self) -> None:
        """Add the container's `hoisted` to the plan if it exists; a killed reaper may have left it behind."""
        if self._hoisted is None:
            with suppress(FileNotFoundError):
                fd = self._owned.enter_context(self._kernel.open_dir(self._container, HOISTED))
                if not self._late_arrivals.admit(fd, HOISTED):
                    raise OSError(errno.EPERM, os.strerror(errno.EPERM))  # moved in by another process
                work = SliceWork(is_listed=False)
                self._hoisted = self._plan.add(fd, HOISTED, work, is_hoisted=True, is_whole=True)

    def _is_stopped(self) -> bool:
        return self._away != 0 or self._options.stops() or (self._options.parks() and not self._plan.is_cutting())

    def _finish_slice(self, work: Slice, outcome: RemovalSliceResult) -> None:
        for fd, has_failed in self._plan.finish_slice(work, outcome):
            if fd < 0:
                continue  # this removal uses paths: the slice has finished the directories that would have to be noted
            if has_failed:
                self._note([fd])
            Fd(fd).close()
        if outcome.hoisted or outcome.made_hoisted:
            with suppress(OSError):  # another process removed it; what remains is found when the container is removed
                self._open_hoisted()
            if self._hoisted is not None:
                self._plan.add_subdirs(self._hoisted, outcome.hoisted)
        if outcome.removed:
            self._outage.note_progress()
        self._away = self._away or outcome.server_errno
        self._options.progress(outcome.removed, outcome.n_bytes)

    def _close(self) -> None:
        for fd in self._plan.unfinished_fds():
            Fd(fd).close()
