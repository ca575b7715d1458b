"""One user of a volume as the service has it: folders to look at, orphans that are due, the next order; pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

from fusefs.core.orphan_age import Clock, FirstSight, FirstSights
from fusefs.core.policy import KnownOrphan
from fusefs.core.service_status import HeldBytes
from fusefs.service import timers
from fusefs.service.messages import DueContainer, Measure, Order, ReadRecords, Reap, SeenContainer, Tend
from fusefs.store.user_folders import Standing

BATCH = 20
"""Orphans in one order: most are small, and each order costs a round trip."""
_ENOUGH_DUE = 500
"""With so many due it is time to reap, and to look on later."""
_MOST_REMEMBERED = 1000
_LEAST_OF_PART = 20
"""Orphans that are remembered of each store of a user who has folders in many."""
_MOST_MEASURED = 5
"""Attempts to measure an orphan while the disk is idle."""
_SLACK_NS = 5_000_000_000
"""What was made while a page was read may be on it or not."""
T = TypeVar("T", bound=Hashable)


class _DueEntry(NamedTuple):
    """In the order in which they are due; of an id there is one at a time."""

    at_s: float
    id: str
    retention_s: int | None


class DueQueue:
    """Containers and the times at which they may be reaped, soonest first; pure.

    Times are the service's, in seconds. When there are too many the latest are dropped: once the others are taken,
    look again.
    """

    def __init__(self, most: int) -> None:
        """most: so many are kept at a time."""
        self._most = most
        self._times: dict[str, float] = {}
        self._queue: list[_DueEntry] = []
        self._soonest_dropped_s = math.inf

    def __len__(self) -> int:
        return len(self._queue)

    def clear(self) -> None:
        """Forget all: it is looked for from the beginning."""
        self._times.clear()
        self._queue.clear()
        self._soonest_dropped_s = math.inf

    def add(self, chosen: DueContainer, at_s: float | None) -> None:
        """Note a container, or another time for it; None: no time is known."""
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
        """Forget a container; one that is not known is none."""
        at_s = self._times.pop(identifier, None)
        if at_s is not None:
            self._queue.pop(bisect_left(self._queue, (at_s, identifier)))

    def n_due(self, now_s: float) -> int:
        """How many may be reaped now; there may be more if it `is_cut`."""
        return bisect_left(self._queue, (now_s, "\U0010ffff"))

    def take(self, now_s: float, most: int) -> list[DueContainer]:
        """Some that may be reaped now, the longest overdue first; they are not kept any more."""
        taken = [DueContainer(entry.id, entry.retention_s) for entry in self._queue[: min(most, self.n_due(now_s))]]
        del self._queue[: len(taken)]
        for chosen in taken:
            del self._times[chosen.id]
        return taken

    def is_cut(self) -> bool:
        """Whether there were more than are kept."""
        return self._soonest_dropped_s < math.inf

    def must_look(self) -> bool:
        """Whether something that was dropped comes before all that is kept."""
        return self.is_cut() and (not self._queue or self._queue[0].at_s > self._soonest_dropped_s)

    def next_at_s(self) -> float:
        """When the next one is due; infinity if none is known."""
        return self._queue[0].at_s if self._queue else math.inf


class ReapProgress(NamedTuple):
    """What was done of an orphan: entries, bytes (None: not all were looked at), time."""

    n_removed: int = 0
    n_bytes: int | None = 0
    seconds: float = 0.0

    def plus(self, more: ReapProgress) -> ReapProgress:
        """Both."""
        known = self.n_bytes is not None and more.n_bytes is not None
        n_bytes = (self.n_bytes or 0) + (more.n_bytes or 0) if known else None
        return ReapProgress(self.n_removed + more.n_removed, n_bytes, self.seconds + more.seconds)


class SizeSums:
    """What a folder's orphans take, by their ids, as far as their records tell and memory allows.

    What is not known, or finds no room, is not in it: it is for others to count those.
    """

    def __init__(self, most: int) -> None:
        """most: so many are remembered."""
        self._most = most
        self._sizes: dict[str, int] = {}
        self._seen: set[str] | None = None
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def note(self, identifier: str, n_bytes: int | None) -> None:
        """What one takes; None: that is not known, or not any more."""
        self.forget(identifier)
        if n_bytes is not None and len(self._sizes) < self._most:
            self._sizes[identifier] = n_bytes
            self.n_bytes += n_bytes
            if self._seen is not None:
                self._seen.add(identifier)

    def forget(self, identifier: str) -> None:
        """It is gone."""
        self.n_bytes -= self._sizes.pop(identifier, 0)

    def look(self) -> None:
        """All that are there are noted from now on, until `looked`: what is not seen then is gone."""
        self._seen = set()

    def looked(self) -> None:
        """All were noted."""
        if self._seen is not None:
            for identifier in self._sizes.keys() - self._seen:
                self.forget(identifier)
            self._seen = None


class FolderPart:
    """His folder in one store: most have one, users of lower stores several."""

    def __init__(self, base: bytes, most: int, told_until_ns: int) -> None:
        """Begin with a look.

        base  the directory that holds the store
        most  so many orphans are remembered
        told_until_ns  wall time: what was made later is not told yet
        """
        self.base = base
        self.most = most
        self.upcoming = DueQueue(most)  # what may be reaped, and when
        self.sizes = SizeSums(most)
        self.warnings = DueQueue(most)  # what is looked at, to tell that its term ends soon
        self.warned: dict[DueContainer, None] = {}
        self.fresh: set[str] = set()
        self.pending: dict[str, DueContainer] = {}
        self._pending_since_s = math.inf
        self.known: dict[str, KnownOrphan] = {}  # all, where a quota wants their sizes
        self.to_measure: list[str] = []
        self.unmeasured = DueQueue(most)  # whose size is found out when the disk is idle, and not before
        self.measuring: str | None = None
        self._n_measured: dict[str, int] = {}
        self._sights = FirstSights(_MOST_REMEMBERED)
        self.told_until_ns = told_until_ns
        self._looked_since_ns = told_until_ns
        self.n_orphans = 0
        self.n_quarantined = 0
        self.left: dict[str, None] = {}  # since the last look began, which may have seen them before
        self._after: str | None = ""  # None: no look is under way
        self.is_unread = True

    def look_at(self, identifier: str) -> None:
        """Look at one that is new or has changed; at all of it where they are too many to remember."""
        self.left.pop(identifier, None)
        if len(self.fresh) < _MOST_REMEMBERED:
            self.fresh.add(identifier)
        else:
            self.fresh.clear()
            self.look_again()

    def leaves(self, identifier: str) -> None:
        """It is no orphan any more: restored, or claimed."""
        self.fresh.discard(identifier)
        self._drop(identifier)
        note_once(self.left, identifier)

    def forget(self, identifier: str) -> None:
        """It is gone: nothing need be known of it."""
        self._drop(identifier)
        self._sights.forget(identifier)

    def sight(self, seen: SeenContainer, clock: Clock) -> FirstSight:
        """Since when a container has been there, and how old it was then, by the clock that is never set.

        Where its record tells, it is as if the service had been there: whoever set the wall clock since, it is so old.
        Otherwise since it was first seen.
        """
        if seen.boot_ns is not None:
            return FirstSight(seen.boot_ns, 0)
        return self._sights.of(clock, seen.id, seen.created_ns)

    def look_again(self) -> None:
        """Look at all of it from the beginning: what is known may not be true any more."""
        self._after = ""
        self.upcoming.clear()
        self.warnings.clear()

    def measure_at(self, identifier: str, at_s: float | None) -> None:
        """Find out when the disk is idle, from that time on, what one takes; None: that is known, or not wanted."""
        if self._n_measured.get(identifier, 0) >= _MOST_MEASURED:
            at_s = None
        self.unmeasured.add(DueContainer(identifier, None), at_s)

    def _drop(self, identifier: str) -> None:
        self.upcoming.remove(identifier)
        self.warnings.remove(identifier)
        self.unmeasured.remove(identifier)
        self._n_measured.pop(identifier, None)
        self.sizes.forget(identifier)
        self.known.pop(identifier, None)

    def is_known(self) -> bool:
        """Whether nothing is left to be looked at, or measured."""
        return self._after is None and not (self.fresh or self.to_measure)

    def looked(self, last: str, now_s: float, wall_ns: int) -> None:
        """A page was read, up to that id; empty: the last one."""
        if not self._after:
            self._looked_since_ns = wall_ns - _SLACK_NS
        if not last:
            self.sizes.looked()
            self.told_until_ns = max(self.told_until_ns, self._looked_since_ns)
        is_full_of_due = self.upcoming.is_cut() and self.upcoming.n_due(now_s) == len(self.upcoming)
        self._after = None if is_full_of_due else last or None  # there is no room for what comes later

    def next_order(self, now_s: float) -> Order | None:
        """What is to be done now, if anything."""
        if self.fresh:
            ids = sorted(self.fresh)[:BATCH]
            self.fresh.difference_update(ids)
            self.left.clear()
            return ReadRecords(self.base, ids=ids)
        if self.upcoming.must_look() or self.warnings.must_look():
            self.look_again()
        n_due = self.upcoming.n_due(now_s)
        if self._after is not None and n_due < _ENOUGH_DUE:
            is_first, self.is_unread = self.is_unread, False
            if not self._after:
                self.look_again()
                self.sizes.look()
            self.left.clear()
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
        """When `next_order` has one, as far as is known: 0 for now, infinity for never."""
        return min(self.urgent_at_s(), self.unmeasured.next_at_s())

    def urgent_at_s(self) -> float:
        """When `next_order` has one that does not wait for the disk to be idle: all but sizes that are to be noted."""
        queues = (self.upcoming, self.warnings)
        must_look = any(queue.must_look() for queue in queues)
        return 0.0 if must_look or not self.is_known() else min(queue.next_at_s() for queue in queues)

    def n_due(self, now_s: float) -> int:
        """How many may be reaped now, as far as they are known; those that are being reaped too."""
        return self.upcoming.n_due(now_s) + len(self.pending)

    def due_at_s(self) -> float:
        """When the next one is due, or was: of those that are being reaped too; infinity for never."""
        return min(self._pending_since_s if self.pending else math.inf, self.upcoming.next_at_s())

    def put_back(self, at_s: float) -> None:
        """What was ordered and not done is due again at that time."""
        for chosen in self.pending.values():
            self.upcoming.add(chosen, at_s)
        self.pending = {}
        if self.measuring is not None:
            self.measure_at(self.measuring, at_s + timers.current.measure_pause_s)
            self.measuring = None


class RetryClock:
    """When something of one user's that failed is tried again: later each time."""

    def __init__(self, first_s: float, last_s: float) -> None:
        """Wait for so long the first time, and at most."""
        self._first_s = first_s
        self._last_s = last_s
        self.n_failed = 0
        self.at_s = 0.0

    def failed(self, now_s: float) -> float:
        """It failed, once more: for how long to leave it alone."""
        wait_s = min(self._first_s * 2.0**self.n_failed, self._last_s)
        self.n_failed = min(self.n_failed + 1, 20)
        self.at_s = now_s + wait_s
        return wait_s

    def succeeded(self) -> None:
        """The next failure is the first again."""
        self.n_failed = 0


class UserState:
    """What is known of one user, and what went wrong with him."""

    def __init__(self, uid: int, base: bytes, most: Callable[[], int], told_until_ns: int) -> None:
        """Begin with a look at everything.

        base  of the store that the user was found in
        most  how many orphans may be remembered of a part
        told_until_ns  wall time: what was made later is not told yet
        """
        self.uid = uid
        self.parts = {base: FolderPart(base, most(), told_until_ns)}
        self.tend_at_s = 0.0
        self.current: str | None = None
        self.had_s = 0.0
        self.n_removed = 0
        self.ours: dict[str, None] = {}  # which we have been reaping
        self.came: dict[str, None] = {}  # into orphans/ while we watched
        self.told: dict[str, None] = {}
        self._told_until_ns = told_until_ns
        self.most_remembered = most
        self._base = base
        self.retry = RetryClock(timers.current.child_pause_s, timers.current.last_pause_s)
        self._tending = RetryClock(timers.current.tend_pause_s, timers.current.last_pause_s)
        self._n_parked: dict[str, int] = {}
        self._retries: dict[str, RetryClock] = {}
        self._sofar: dict[str, ReapProgress] = {}

    def tended(self, bases: Iterable[bytes]) -> bool:
        """The user's folders are in order, and in these stores; whether some were not known."""
        wanted = set(bases) | {self._base}
        new = wanted - self.parts.keys()
        most = max(self.most_remembered() // len(wanted), _LEAST_OF_PART)
        for base in new:
            self.parts[base] = FolderPart(base, most, self._told_until_ns)
        for base in self.parts.keys() - wanted:
            del self.parts[base]
        return bool(new)

    def has_problems(self, now_s: float, *, is_so: bool) -> None:
        """Something could not be settled or taken in: it is tried again, later each time. Or nothing, any more."""
        if is_so:
            self.tend_at_s = min(self.tend_at_s, now_s + self._tending.failed(now_s))
        else:
            self._tending.succeeded()

    def look_again(self) -> None:
        """Look at everything from the beginning."""
        self.tend_at_s = 0.0
        for part in self.parts.values():
            part.look_again()

    def next_order(self, now_s: float) -> Order | None:
        """What is to be done for the user now, if anything."""
        if now_s < self.retry.at_s:
            return None
        if now_s >= self.tend_at_s:
            self.tend_at_s = math.inf
            return Tend()
        parts = sorted(self.parts.values(), key=lambda part: part.urgent_at_s() > now_s)
        orders = (part.next_order(now_s) for part in parts if part.next_at_s() <= now_s)
        return next((order for order in orders if order is not None), None)

    def give_back(self, order: Order) -> None:
        """An order was not carried out: it is to be given again."""
        match order:
            case Tend():
                self.tend_at_s = 0.0
            case ReadRecords():
                self.parts[order.base].fresh.update(order.ids or ())
            case Measure(when_idle=False):
                self.parts[order.base].to_measure += order.ids
            case Measure() | Reap():
                pass  # what is pending is put back anyway

    def wants(self, now_s: float) -> bool:
        """Whether `next_order` has one."""
        return self.next_at_s() <= now_s

    def next_at_s(self) -> float:
        """When he wants something next, as far as is known; infinity for never."""
        return max(min([self.tend_at_s, *(part.next_at_s() for part in self.parts.values())]), self.retry.at_s)

    def is_urgent(self, now_s: float) -> bool:
        """Whether `next_order` has one that does not wait for the disk to be idle."""
        urgent_at_s = min([self.tend_at_s, *(part.urgent_at_s() for part in self.parts.values())])
        return max(urgent_at_s, self.retry.at_s) <= now_s

    def due_at_s(self) -> float:
        """When the user's next orphan is due, or was; infinity for never."""
        return min(part.due_at_s() for part in self.parts.values())

    def held(self) -> HeldBytes:
        """What the user's orphans take, as far as that is known."""
        parts = self.parts.values()
        n_unknown = sum(max(part.n_orphans - len(part.sizes), 0) for part in parts)
        return HeldBytes(sum(part.sizes.n_bytes for part in parts), n_unknown)

    def n_due(self, now_s: float) -> int:
        """His orphans that may be reaped now, as far as they are known."""
        return sum(part.n_due(now_s) for part in self.parts.values())

    def ordered(self, identifiers: Iterable[str]) -> None:
        """These are being reaped for the user, by us."""
        for identifier in identifiers:
            note_once(self.ours, identifier)

    def begins(self, identifier: str | None) -> None:
        """An orphan is being reaped now; None: none."""
        self.current = identifier
        self.had_s = 0.0
        self.n_removed = 0

    def has_had_enough(self, now_s: float) -> bool:
        """Whether the current orphan should make way for another one of the user's."""
        # What fell in meanwhile must be looked at first.
        others = (part.next_at_s() <= now_s or len(part.pending) > 1 for part in self.parts.values())
        if self.current is None or not (now_s >= self.tend_at_s or any(others)):
            return False
        patience_s = timers.current.patience_s * 2.0 ** min(self._n_parked.get(self.current, 0), 10)
        return self.had_s >= min(patience_s, timers.current.last_patience_s)

    def parked(self, identifier: str, sofar: ReapProgress) -> None:
        """It made way; next time it has longer."""
        _count(self._n_parked, identifier)
        self._sofar[identifier] = self.sofar(identifier).plus(sofar)
        _bound(self._sofar)

    def sofar(self, identifier: str) -> ReapProgress:
        """What was done of it before it made way."""
        return self._sofar.get(identifier, ReapProgress())

    def succeeded(self, now_s: float) -> None:
        """Something went well; after a while there is no grudge."""
        if now_s > self.retry.at_s + timers.current.grudge_s:
            self.retry.succeeded()

    def retry_at_s(self, identifier: str, now_s: float) -> float:
        """When to try an orphan again that a process holds, or that failed; later each time."""
        first_s, last_s = timers.current.retry_pause_s, timers.current.last_pause_s
        retry = self._retries[identifier] = self._retries.pop(identifier, RetryClock(first_s, last_s))
        _bound(self._retries)
        return now_s + retry.failed(now_s)

    def tries(self, identifier: str) -> RetryClock:
        """How often it was tried in vain, and when it may be tried again, whatever its record says."""
        return self._retries.get(identifier) or RetryClock(0.0, 0.0)

    def forget(self, identifier: str) -> None:
        """It is gone."""
        self.came.pop(identifier, None)
        self._n_parked.pop(identifier, None)
        self._sofar.pop(identifier, None)
        self._retries.pop(identifier, None)
        for part in self.parts.values():
            part.forget(identifier)


def _count(counts: dict[str, int], identifier: str) -> int:
    """One more; the oldest are forgotten when there are too many."""
    counts[identifier] = counts.pop(identifier, 0) + 1
    _bound(counts)
    return counts[identifier]


def note_once(remembered: dict[T, None], one: T, most: int = _MOST_REMEMBERED) -> bool:
    """Note something; whether it had not been noted yet. The oldest are forgotten when there are too many."""
    is_new = one not in remembered
    remembered[one] = None
    _bound(remembered, most)
    return is_new


def _bound(remembered: dict[Any, Any], most: int = _MOST_REMEMBERED) -> None:
    while len(remembered) > most:
        del remembered[next(iter(remembered))]


class UnreadUsers:
    """Those users, and why."""

    def __init__(self) -> None:
        self._clocks: dict[int, RetryClock] = {}
        self._refused: dict[int, list[Standing]] = {}

    def __contains__(self, uid: int) -> bool:
        return uid in self._refused

    def resting(self, now_s: float) -> set[int]:
        """Those who are not looked at now."""
        return {uid for uid, clock in self._clocks.items() if clock.at_s > now_s}

    def note(self, unread: Iterable[Standing], resting: set[int], now_s: float) -> None:
        """Take in what a look could not read, of those who did not rest."""
        failed: dict[int, list[Standing]] = {}
        for refusal in unread:
            failed.setdefault(refusal.uid, []).append(refusal)
        for uid in self._clocks.keys() - failed.keys() - resting:
            del self._clocks[uid], self._refused[uid]
        for uid, refused in failed.items():
            clock = self._clocks.setdefault(
                uid, RetryClock(timers.current.unread_pause_s, timers.current.last_unread_pause_s)
            )
            if uid not in resting:
                clock.failed(now_s)
            self._refused[uid] = refused

    def refused(self) -> list[Standing]:
        """What could not be read of them."""
        return [refusal for refused in self._refused.values() for refusal in refused]

    def next_at_s(self) -> float:
        """When one of them is looked at again; infinity if there are none."""
        return min((clock.at_s for clock in self._clocks.values()), default=math.inf)
