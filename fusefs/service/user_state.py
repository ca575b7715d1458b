"""The service's state of one user of a volume: folders to scan, orphans that are due, and the next order; no I/O."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

from fusefs.core.orphan_age import Clock, FirstSight, FirstSights
from fusefs.core.policy import KnownOrphan
from fusefs.core.service_status import HeldBytes
from fusefs.service import timers
from fusefs.service.messages import ContainerEntry, DueContainer, Measure, Order, ReadRecords, Reap, Tend
from fusefs.store.user_folders import FolderVerdict

BATCH = 20
"""Number of orphans in one order: most are small, and each order costs a round trip."""
_ENOUGH_DUE = 500
"""With this many due orphans, reap first and continue the scan later."""
_MOST_REMEMBERED = 1000
_LEAST_OF_PART = 20
"""Minimum number of orphans remembered per store, for a user with folders in many stores."""
_MOST_MEASURED = 5
"""Maximum number of attempts to measure an orphan while the disk is idle."""
_SLACK_NS = 5_000_000_000
"""An orphan created while a page was read may be missing from it."""
T = TypeVar("T", bound=Hashable)


class _DueEntry(NamedTuple):
    """An entry, sorted by its due time; there is at most one per id."""

    at_s: float
    id: str
    retention_s: int | None


class DueQueue:
    """Containers and the times at which they may be reaped, soonest first.

    Times are in seconds of the service's clock. If there are too many entries, the latest are dropped; `must_rescan`
    reports when a new scan must find them again.
    """

    def __init__(self, most: int) -> None:
        """most: maximum number of entries"""
        self._most = most
        self._times: dict[str, float] = {}
        self._queue: list[_DueEntry] = []
        self._soonest_dropped_s = math.inf

    def __len__(self) -> int:
        return len(self._queue)

    def clear(self) -> None:
        self._times.clear()
        self._queue.clear()
        self._soonest_dropped_s = math.inf

    def add(self, chosen: DueContainer, at_s: float | None) -> None:
        """Add a container, or change its time; None: remove it."""
        identifier = chosen.id
        self.remove(identifier)
        if at_s is None:
            return
        insort(self._queue, _DueEntry(at_s, *chosen))
        self._times[identifier] = at_s
        if len(self._queue) > self._most:
            dropped = self._queue.pop()
            del self._times[dropped.id]
            self._soonest_dropped_s = min(self._soonest_dropped_s, dropped.at_s)

    def remove(self, identifier: str) -> None:
        at_s = self._times.pop(identifier, None)
        if at_s is not None:
            self._queue.pop(bisect_left(self._queue, (at_s, identifier)))

    def n_due(self, now_s: float) -> int:
        """Return how many containers may be reaped now; there may be more if `is_cut`."""
        return bisect_left(self._queue, (now_s, "\U0010ffff"))

    def take(self, now_s: float, most: int) -> list[DueContainer]:
        """Remove and return containers that may be reaped now, the longest overdue first."""
        taken = [DueContainer(entry.id, entry.retention_s) for entry in self._queue[: min(most, self.n_due(now_s))]]
        del self._queue[: len(taken)]
        for chosen in taken:
            del self._times[chosen.id]
        return taken

    def is_cut(self) -> bool:
        """Return whether entries were dropped."""
        return self._soonest_dropped_s < math.inf

    def must_rescan(self) -> bool:
        """Return whether a dropped entry is due before all others."""
        return self.is_cut() and (not self._queue or self._queue[0].at_s > self._soonest_dropped_s)

    def next_at_s(self) -> float:
        """Return when the next entry is due; infinity if there is none."""
        return self._queue[0].at_s if self._queue else math.inf


class ReapProgress(NamedTuple):
    """Work done on an orphan: entries, bytes (None: not completely known), time."""

    n_removed: int = 0
    n_bytes: int | None = 0
    seconds: float = 0.0

    def plus(self, more: ReapProgress) -> ReapProgress:
        has_sizes = self.n_bytes is not None and more.n_bytes is not None
        n_bytes = (self.n_bytes or 0) + (more.n_bytes or 0) if has_sizes else None
        return ReapProgress(self.n_removed + more.n_removed, n_bytes, self.seconds + more.seconds)


class SizeSums:
    """The sizes of a folder's orphans by id, as far as they are recorded and memory allows.

    Unknown sizes, and sizes beyond the limit, are missing; the caller counts these.
    """

    def __init__(self, most: int) -> None:
        """most: maximum number of sizes"""
        self._most = most
        self._sizes: dict[str, int] = {}
        self._scanned_ids: set[str] | None = None
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def note(self, identifier: str, n_bytes: int | None) -> None:
        self.forget(identifier)
        if n_bytes is not None and len(self._sizes) < self._most:
            self._sizes[identifier] = n_bytes
            self.n_bytes += n_bytes
            if self._scanned_ids is not None:
                self._scanned_ids.add(identifier)

    def forget(self, identifier: str) -> None:
        self.n_bytes -= self._sizes.pop(identifier, 0)

    def begin_scan(self) -> None:
        """Begin a scan in which every existing orphan is noted; `end_scan` then removes the others."""
        self._scanned_ids = set()

    def end_scan(self) -> None:
        """End a scan, and remove the orphans that it did not note."""
        if self._scanned_ids is not None:
            for identifier in self._sizes.keys() - self._scanned_ids:
                self.forget(identifier)
            self._scanned_ids = None


class FolderPart:
    """A user's folder in one store. Most users have one folder; users of lower stores have several."""

    def __init__(self, base: bytes, most: int, reported_until_ns: int) -> None:
        """Start with a scan.

        base  the directory that holds the store
        most  maximum number of remembered orphans
        reported_until_ns  wall time: orphans created later are not reported yet
        """
        self.base = base
        self.most = most
        self.upcoming = DueQueue(most)  # orphans that may be reaped, and when
        self.sizes = SizeSums(most)
        self.warnings = DueQueue(most)  # orphans to read, in order to warn that they expire soon
        self.warned: dict[DueContainer, None] = {}
        self.unread_ids: set[str] = set()
        self.pending: dict[str, DueContainer] = {}
        self._pending_since_s = math.inf
        self.orphans: dict[str, KnownOrphan] = {}  # all orphans, if a quota needs their sizes
        self.to_measure: list[str] = []
        self.unmeasured = DueQueue(most)  # orphans to measure once the disk is idle, and the earliest time
        self.measuring: str | None = None
        self._n_measured: dict[str, int] = {}
        self._sights = FirstSights(_MOST_REMEMBERED)
        self.reported_until_ns = reported_until_ns
        self._scan_began_ns = reported_until_ns
        self.n_orphans = 0
        self.n_quarantined = 0
        self.departed_ids: dict[
            str, None
        ] = {}  # orphans that have left since the last read began; its page may still contain them
        self._after: str | None = ""  # last id of the scan; "": start; None: no scan in progress
        self.is_unread = True

    def mark_unread(self, identifier: str) -> None:
        """Schedule a new or changed orphan to be read; if there are too many, schedule a scan of the whole folder."""
        self.departed_ids.pop(identifier, None)
        if len(self.unread_ids) < _MOST_REMEMBERED:
            self.unread_ids.add(identifier)
        else:
            self.unread_ids.clear()
            self.rescan()

    def note_departed(self, identifier: str) -> None:
        """Remove an orphan that was restored or claimed."""
        self.unread_ids.discard(identifier)
        self._drop(identifier)
        note_once(self.departed_ids, identifier)

    def forget(self, identifier: str) -> None:
        self._drop(identifier)
        self._sights.forget(identifier)

    def sight(self, entry: ContainerEntry, clock: Clock) -> FirstSight:
        """Return when the service first saw a container, and the container's age then, by a clock that can't be set.

        If the record has a time of the current boot, the age does not depend on the wall clock. Otherwise, it depends
        on the wall clock only until this first sight.
        """
        if entry.boot_ns is not None:
            return FirstSight(entry.boot_ns, 0)
        return self._sights.get(clock, entry.id, entry.created_ns)

    def rescan(self) -> None:
        """Start the scan again, because the known state may be outdated."""
        self._after = ""
        self.upcoming.clear()
        self.warnings.clear()

    def measure_at(self, identifier: str, at_s: float | None) -> None:
        """Schedule an orphan's measurement for when the disk is idle, after this time; None: no measurement."""
        if self._n_measured.get(identifier, 0) >= _MOST_MEASURED:
            at_s = None
        self.unmeasured.add(DueContainer(identifier, None), at_s)

    def _drop(self, identifier: str) -> None:
        self.upcoming.remove(identifier)
        self.warnings.remove(identifier)
        self.unmeasured.remove(identifier)
        self._n_measured.pop(identifier, None)
        self.sizes.forget(identifier)
        self.orphans.pop(identifier, None)

    def is_scanned(self) -> bool:
        """Return whether every orphan has been read, and measured if requested."""
        return self._after is None and not (self.unread_ids or self.to_measure)

    def note_page(self, last: str, now_s: float, wall_ns: int) -> None:
        """Note that a page was read up to the id `last`, which is empty for the last page."""
        if not self._after:
            self._scan_began_ns = wall_ns - _SLACK_NS
        if not last:
            self.sizes.end_scan()
            self.reported_until_ns = max(self.reported_until_ns, self._scan_began_ns)
        is_full_of_due = self.upcoming.is_cut() and self.upcoming.n_due(now_s) == len(self.upcoming)
        self._after = None if is_full_of_due else last or None  # there is no space for later entries

    def next_order(self, now_s: float) -> Order | None:
        """Return the next order for a child; None if there is none now."""
        if self.unread_ids:
            ids = sorted(self.unread_ids)[:BATCH]
            self.unread_ids.difference_update(ids)
            self.departed_ids.clear()
            return ReadRecords(self.base, ids=ids)
        if self.upcoming.must_rescan() or self.warnings.must_rescan():
            self.rescan()
        n_due = self.upcoming.n_due(now_s)
        if self._after is not None and n_due < _ENOUGH_DUE:
            is_first, self.is_unread = self.is_unread, False
            if not self._after:
                self.rescan()
                self.sizes.begin_scan()
            self.departed_ids.clear()
            return ReadRecords(self.base, after=self._after, and_quarantined=is_first)
        if self.warnings.n_due(now_s):
            return ReadRecords(self.base, ids=[one.id for one in self.warnings.take(now_s, BATCH)])
        if n_due:
            self._pending_since_s = self.upcoming.next_at_s()
            chosen = self.upcoming.take(now_s, BATCH)
            self.pending = {one.id: one for one in chosen}
            return Reap(self.base, chosen)
        if self.to_measure:
            ids, self.to_measure = self.to_measure[:BATCH], self.to_measure[BATCH:]
            return Measure(self.base, ids)
        for one in self.unmeasured.take(now_s, 1):
            self.measuring = one.id
            _count(self._n_measured, one.id)
            return Measure(self.base, [one.id], when_idle=True)
        return None

    def next_at_s(self) -> float:
        """Return when `next_order` will have an order, as far as is known: 0 for now, infinity for never."""
        return min(self.urgent_at_s(), self.unmeasured.next_at_s())

    def urgent_at_s(self) -> float:
        """Return when `next_order` will have an order other than a measurement on an idle disk."""
        queues = (self.upcoming, self.warnings)
        must_rescan = any(queue.must_rescan() for queue in queues)
        return 0.0 if must_rescan or not self.is_scanned() else min(queue.next_at_s() for queue in queues)

    def n_due(self, now_s: float) -> int:
        """Return how many known orphans may be reaped now, including those being reaped."""
        return self.upcoming.n_due(now_s) + len(self.pending)

    def due_at_s(self) -> float:
        """Return when the next orphan is or was due, including those being reaped; infinity for never."""
        return min(self._pending_since_s if self.pending else math.inf, self.upcoming.next_at_s())

    def put_back(self, at_s: float) -> None:
        """Schedule unfinished reaps again, for the given time."""
        for chosen in self.pending.values():
            self.upcoming.add(chosen, at_s)
        self.pending = {}
        if self.measuring is not None:
            self.measure_at(self.measuring, at_s + timers.current.measure_pause_s)
            self.measuring = None


class RetryClock:
    """The time of the next attempt after failures, with growing intervals."""

    def __init__(self, first_s: float, last_s: float) -> None:
        """first_s: the first interval; last_s: the longest interval"""
        self._first_s = first_s
        self._last_s = last_s
        self.n_failed = 0
        self.at_s = 0.0

    def note_failure(self, now_s: float) -> float:
        """Note a failure, and return the interval until the next attempt."""
        wait_s = min(self._first_s * 2.0**self.n_failed, self._last_s)
        self.n_failed = min(self.n_failed + 1, 20)
        self.at_s = now_s + wait_s
        return wait_s

    def note_success(self) -> None:
        """Start with the first interval again."""
        self.n_failed = 0


class UserState:
    """The state of one user, including failures."""

    def __init__(self, uid: int, base: bytes, most: Callable[[], int], reported_until_ns: int) -> None:
        """Start with a scan of everything.

        base  the directory of the store in which the user was found
        most  returns the maximum number of remembered orphans for a part
        reported_until_ns  wall time: orphans created later are not reported yet
        """
        self.uid = uid
        self.parts = {base: FolderPart(base, most(), reported_until_ns)}
        self.tend_at_s = 0.0
        self.current: str | None = None
        self.had_s = 0.0
        self.n_removed = 0
        self.reaping_ids: dict[str, None] = {}  # orphans that this service has been reaping
        self.arrived_ids: dict[str, None] = {}  # arrivals in orphans/ reported by watches
        self.reported_ids: dict[str, None] = {}
        self._reported_until_ns = reported_until_ns
        self.most_remembered = most
        self._base = base
        self.retry = RetryClock(timers.current.child_pause_s, timers.current.last_pause_s)
        self._tending = RetryClock(timers.current.tend_pause_s, timers.current.last_pause_s)
        self._n_parked: dict[str, int] = {}
        self._retries: dict[str, RetryClock] = {}
        self._sofar: dict[str, ReapProgress] = {}

    def set_stores(self, bases: Iterable[bytes]) -> bool:
        """Note the stores in which the user has folders, after a Tend; return whether some are new."""
        all_bases = set(bases) | {self._base}
        new = all_bases - self.parts.keys()
        most = max(self.most_remembered() // len(all_bases), _LEAST_OF_PART)
        for base in new:
            self.parts[base] = FolderPart(base, most, self._reported_until_ns)
        for base in self.parts.keys() - all_bases:
            del self.parts[base]
        return bool(new)

    def note_problems(self, now_s: float, *, is_so: bool) -> None:
        """Note whether a Tend left problems; if so, repeat it after growing intervals."""
        if is_so:
            self.tend_at_s = min(self.tend_at_s, now_s + self._tending.note_failure(now_s))
        else:
            self._tending.note_success()

    def rescan(self) -> None:
        self.tend_at_s = 0.0
        for part in self.parts.values():
            part.rescan()

    def next_order(self, now_s: float) -> Order | None:
        """Return the next order for the user's child; None if there is none now."""
        if now_s < self.retry.at_s:
            return None
        if now_s >= self.tend_at_s:
            self.tend_at_s = math.inf
            return Tend()
        parts = sorted(self.parts.values(), key=lambda part: part.urgent_at_s() > now_s)
        orders = (part.next_order(now_s) for part in parts if part.next_at_s() <= now_s)
        return next((order for order in orders if order is not None), None)

    def take_back_order(self, order: Order) -> None:
        match order:
            case Tend():
                self.tend_at_s = 0.0
            case ReadRecords():
                self.parts[order.base].unread_ids.update(order.ids or ())
            case Measure(when_idle=False):
                self.parts[order.base].to_measure += order.ids
            case Measure() | Reap():
                pass  # `put_back` handles pending ones

    def has_work(self, now_s: float) -> bool:
        """Return whether `next_order` has an order now."""
        return self.next_at_s() <= now_s

    def next_at_s(self) -> float:
        """Return when the user will next have work, as far as is known; infinity for never."""
        return max(min([self.tend_at_s, *(part.next_at_s() for part in self.parts.values())]), self.retry.at_s)

    def is_urgent(self, now_s: float) -> bool:
        """Return whether `next_order` has an order other than a measurement on an idle disk."""
        urgent_at_s = min([self.tend_at_s, *(part.urgent_at_s() for part in self.parts.values())])
        return max(urgent_at_s, self.retry.at_s) <= now_s

    def due_at_s(self) -> float:
        """Return when the user's next orphan is or was due; infinity for never."""
        return min(part.due_at_s() for part in self.parts.values())

    def held(self) -> HeldBytes:
        """Return the sum of the known sizes of the user's orphans, and the number of unknown sizes."""
        parts = self.parts.values()
        n_unknown = sum(max(part.n_orphans - len(part.sizes), 0) for part in parts)
        return HeldBytes(sum(part.sizes.n_bytes for part in parts), n_unknown)

    def n_due(self, now_s: float) -> int:
        """Return how many of the user's known orphans may be reaped now."""
        return sum(part.n_due(now_s) for part in self.parts.values())

    def note_ordered(self, identifiers: Iterable[str]) -> None:
        """Note orphans that this service is reaping."""
        for identifier in identifiers:
            note_once(self.reaping_ids, identifier)

    def put_back(self, at_s: float) -> None:
        """Schedule unfinished reaps again, for the given time.

        Such an orphan no longer counts as reaped by this service. If a watch reports only now that the orphan left
        orphans/, the orphan is removed from the schedule, but the watch on reaping/ then schedules a new read.
        """
        for part in self.parts.values():
            for identifier in part.pending:
                self.reaping_ids.pop(identifier, None)
            part.put_back(at_s)

    def set_current(self, identifier: str | None) -> None:
        """Note the orphan that is being reaped now; None: no orphan."""
        self.current = identifier
        self.had_s = 0.0
        self.n_removed = 0

    def should_park(self, now_s: float) -> bool:
        """Return whether the current orphan should be parked in favour of other work for the user."""
        # New arrivals must be read first.
        others = (part.next_at_s() <= now_s or len(part.pending) > 1 for part in self.parts.values())
        if self.current is None or not (now_s >= self.tend_at_s or any(others)):
            return False
        patience_s = timers.current.patience_s * 2.0 ** min(self._n_parked.get(self.current, 0), 10)
        return self.had_s >= min(patience_s, timers.current.last_patience_s)

    def note_parked(self, identifier: str, sofar: ReapProgress) -> None:
        """Note that an orphan was parked; its next turn is longer."""
        _count(self._n_parked, identifier)
        self._sofar[identifier] = self.sofar(identifier).plus(sofar)
        _bound(self._sofar)

    def sofar(self, identifier: str) -> ReapProgress:
        """Return the work done on an orphan before it was parked."""
        return self._sofar.get(identifier, ReapProgress())

    def note_success(self, now_s: float) -> None:
        """Note a success; if the last failure was long ago, make the next interval the shortest again."""
        if now_s > self.retry.at_s + timers.current.grudge_s:
            self.retry.note_success()

    def retry_at_s(self, identifier: str, now_s: float) -> float:
        """Return when to retry an orphan that failed, or that another process holds; the intervals grow."""
        first_s, last_s = timers.current.retry_pause_s, timers.current.last_pause_s
        retry = self._retries[identifier] = self._retries.pop(identifier, RetryClock(first_s, last_s))
        _bound(self._retries)
        return now_s + retry.note_failure(now_s)

    def tries(self, identifier: str) -> RetryClock:
        """Return how often the reap of an orphan has failed, and the earliest time of the next attempt."""
        return self._retries.get(identifier) or RetryClock(0.0, 0.0)

    def forget(self, identifier: str) -> None:
        self.arrived_ids.pop(identifier, None)
        self._n_parked.pop(identifier, None)
        self._sofar.pop(identifier, None)
        self._retries.pop(identifier, None)
        for part in self.parts.values():
            part.forget(identifier)


def _count(counts: dict[str, int], identifier: str) -> int:
    """Increment a count, and return it; if there are too many counts, drop the oldest."""
    counts[identifier] = counts.pop(identifier, 0) + 1
    _bound(counts)
    return counts[identifier]


def note_once(remembered: dict[T, None], one: T, most: int = _MOST_REMEMBERED) -> bool:
    """Remember a value, and return whether it is new. If there are too many values, drop the oldest."""
    is_new = one not in remembered
    remembered[one] = None
    _bound(remembered, most)
    return is_new


def _bound(remembered: dict[Any, Any], most: int = _MOST_REMEMBERED) -> None:
    while len(remembered) > most:
        del remembered[next(iter(remembered))]


class UnreadUsers:
    """Users whose folders are unreadable, and the reasons."""

    def __init__(self) -> None:
        self._clocks: dict[int, RetryClock] = {}
        self._refused: dict[int, list[FolderVerdict]] = {}

    def __contains__(self, uid: int) -> bool:
        return uid in self._refused

    def resting(self, now_s: float) -> set[int]:
        """Return the users who are not checked now."""
        return {uid for uid, clock in self._clocks.items() if clock.at_s > now_s}

    def note(self, unread: Iterable[FolderVerdict], resting: set[int], now_s: float) -> None:
        """Note the unreadable folders that a check found; the check did not include resting users."""
        failed: dict[int, list[FolderVerdict]] = {}
        for refusal in unread:
            failed.setdefault(refusal.uid, []).append(refusal)
        for uid in self._clocks.keys() - failed.keys() - resting:
            del self._clocks[uid], self._refused[uid]
        for uid, refused in failed.items():
            clock = self._clocks.setdefault(
                uid, RetryClock(timers.current.unread_pause_s, timers.current.last_unread_pause_s)
            )
            if uid not in resting:
                clock.note_failure(now_s)
            self._refused[uid] = refused

    def refused(self) -> list[FolderVerdict]:
        return [refusal for refused in self._refused.values() for refusal in refused]

    def next_at_s(self) -> float:
        """Return when one of the users is checked again; infinity if there are none."""
        return min((clock.at_s for clock in self._clocks.values()), default=math.inf)
