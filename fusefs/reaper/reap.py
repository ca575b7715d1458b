"""Reaping one orphan: claim, remove its contents, retire; what can't be removed goes to quarantine."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from fusefs.core.errors import BadRecord
from fusefs.core.freed_space import Survey
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId
from fusefs.core.record import MAX_ENTERED, Entered, Failure, Record, quote
from fusefs.core.report import Reaped, Report, ours_first
from fusefs.engine.count_tree import survey
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.late_arrivals import LateArrivals
from fusefs.reaper.remove_tree import NOTHING_SPECIAL, RemovalWishes, remove_contents
from fusefs.store.claim import ClaimLost, claim, hold
from fusefs.store.container import HeldContainer, dissolve, move, rewrite
from fusefs.store.layout import UserFolder
from fusefs.store.mounted_paths import refuse_mounted
from fusefs.store.origin import Origin
from fusefs.store.spare_space import FOR_REAPER, with_room
from fusefs.store.stage import restock

_NAME_MAX_BYTES = 4000
_NAMES_MAX_BYTES = 16_000


def reap(
    folder: UserFolder,
    container: ContainerId,
    wishes: RemovalWishes = NOTHING_SPECIAL,
    is_meant: Callable[[Record], bool] = lambda _record: True,
) -> Reaped:
    """Reap an orphan, or finish one that a killed reaper left; to be run as the folder's owner.

    is_meant  asked about an orphan's record when it is ours: its owner may have pinned it meanwhile
    If it is stopped the orphan stays in reaping/, where the next reap goes on.
    Raises  BadRecord; NoBacking if it is seen through a mount of ours; OSError of the container itself
    """
    refuse_mounted(folder.store.kernel, folder.fd)
    try:
        held = with_room(folder, FOR_REAPER, lambda: claim(folder, State.ORPHANS, container, is_meant))
        is_whole = held is not ClaimLost.GONE
        if held is ClaimLost.GONE:
            held = hold(folder, State.REAPING, container)
        if held is ClaimLost.GONE:
            held = claim(folder, State.QUARANTINE, container)
    except FileNotFoundError as error:
        raise BadRecord(container) from error
    if isinstance(held, ClaimLost):
        return Reaped(container, held.value, Report(0, (), 0))
    with held:
        seen = _survey(folder.store.kernel, held.fd, wishes)
        kernel, left_bytes = folder.store.kernel, 0
        given = LateArrivals(kernel, held.fd, folder.uid, held.record, without_doubt=wishes.without_doubt)
        report, entered = remove_contents(kernel, held.fd, given, wishes)
        if report.stopped:
            if entered:
                with suppress(OSError):  # a full volume has no room: they are in doubt then
                    rewrite(held, held.record._replace(entered=_with_those_before(entered, held.record)))
            return Reaped(container, None, report, seen)
        if report.n_failed == 0:
            report = _with_known_size(_retire(held, report), held.record, is_whole=is_whole)
        if report.n_failed:
            if wishes.waits:
                left_bytes = survey(folder.store.kernel, held.fd).n_bytes
            _set_aside(held, report, entered)
    restock(folder)
    return Reaped(container, None, report, seen, left_bytes)


def _survey(kernel: Kernel, container: Fd, wishes: RemovalWishes) -> Survey | None:
    """What is in a container, if that is asked for; stopped it is less than that, and nothing is removed then."""
    if wishes.counted is None and not wishes.waits:
        return None
    seen = survey(kernel, container, wishes.counting, with_shared=wishes.waits, stops=wishes.stops)
    if wishes.counted is not None:
        wishes.counted(seen)
    return seen


def _with_known_size(report: Report, record: Record, *, is_whole: bool) -> Report:
    """Of a removal that looked at no file: what the record knows of the tree that is gone. is_whole: it all went now"""
    size = record.size
    if size is None or size.is_at_least or record.partial or not is_whole or report.n_failed:
        return report
    return report if report.n_bytes is not None else report._replace(n_bytes=size.surely_freed())


def _retire(held: HeldContainer, report: Report) -> Report:
    """The container goes too; a late writer who still has a directory of it open makes that fail (ENOTEMPTY)."""
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
    """The first failures whose names, as a record writes them, have room in that many bytes; at least one, cut."""
    for failure in failures:
        name = failure.name[-_NAME_MAX_BYTES:]
        size_bytes -= len(quote(name))
        if size_bytes < 0:
            return
        yield failure._replace(name=name)


def _with_those_before(entered: tuple[Entered, ...], record: Record) -> tuple[Entered, ...]:
    """What this reap noted, and what those before it had and it did not come to."""
    noted = {one.handle for one in entered}
    return (*entered, *(one for one in record.entered if one.handle not in noted))[:MAX_ENTERED]


def _set_aside(held: HeldContainer, report: Report, entered: tuple[Entered, ...]) -> None:
    failures = tuple(_within(ours_first(report.failures), _NAMES_MAX_BYTES))
    with suppress(OSError):
        # On a full volume the reasons may find no room; the quarantine itself needs none.
        noted = _with_those_before(entered, held.record)
        held = rewrite(held, held.record._replace(failures=failures, entered=noted, partial=True, size=None))
    move(held, State.QUARANTINE)
