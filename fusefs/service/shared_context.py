"""State that all volumes of a service share: clocks, events, processes and configuration."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import trio

from fusefs.core.config import Config
from fusefs.core.events import Event, EventKind
from fusefs.core.orphan_age import Clock, jumped
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import clocks_ns
from fusefs.linux.user_ids import read_subordinates
from fusefs.service.forker import Forker
from fusefs.service.inotify_watches import InotifyWatches
from fusefs.service.known_volumes import KnownVolumes

_LOG = logging.getLogger(__name__)
_SPAN_S = 10.0
_MOST = 1000
"""Events of one user in such a span: a hundred a second are more than people and their scripts throw away."""
T = TypeVar("T")


class EventLimit:
    """A rate limit on events: one user may rename containers all day, and each rename would be reported.

    Counts events by user, who has those of their subordinate uids; what is beyond is counted, and told as a number.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._holder_of = read_subordinates().holder_of
        self._counts: dict[int, int] = {}

    def lets_pass(self, uid: int, now_s: float) -> bool:
        """Whether one more event of a user is to be told now."""
        if now_s >= self._since_s + _SPAN_S:
            for one, count in self._counts.items():
                if count > _MOST:
                    _LOG.warning("%d more events and faults of uid %d were not told", count - _MOST, one)
            self._since_s, self._counts = now_s, {}
        holder = self._holder_of(uid)
        self._counts[holder] = self._counts.get(holder, 0) + 1
        return self._counts[holder] <= _MOST


class ServiceContext:
    """The service's hands and its memory."""

    def __init__(
        self,
        kernel: Kernel,
        forker: Forker,
        watcher: InotifyWatches,
        config: Config,
        clock: Clock,
        since_ns: int,
        tell: Callable[[Event], None],
        changed: Callable[[], None],
        save: Callable[[Clock], None],
        version: str,
        known: KnownVolumes,
    ) -> None:
        """Bring them together.

        clock  the last look at both clocks
        since_ns  wall time until which the last service looked; what was made later is not told yet
        tell   takes each event
        changed  called when a status is not what it was
        save   keeps the clock for the next service
        version  of the code that runs
        known  what is known of volumes by their ids
        """
        self.version = version
        self.known = known
        self.started_ns = time.time_ns()
        self.since_ns = since_ns
        self.kernel = kernel
        self.forker = forker
        self.watcher = watcher
        self.config = config
        self._clock = clock
        self.changed = changed
        self._tell = tell
        self._save = save
        self._is_told = False
        self._event_limit = EventLimit()

    def clock(self) -> Clock:
        """Both clocks now: a jump of the wall clock is noticed at the next look, and not forgotten."""
        before = self._clock
        self._clock = jumped(before, *clocks_ns())
        if self._clock.eras != before.eras:
            self._save(self._clock)
        return self._clock

    def is_told(self) -> bool:
        """Whether something was told since this was asked last."""
        was, self._is_told = self._is_told, False
        return was

    def lets_tell(self, uid: int) -> bool:
        """Whether one more thing that a user did is to be told; it is counted."""
        return self._event_limit.lets_pass(uid, boot_s())

    def tell(
        self,
        kind: EventKind,
        *,
        volume: bytes | None = None,
        uid: int | None = None,
        identifier: str | None = None,
        origin: bytes | None = None,
        n_entries: int | None = None,
        n_bytes: int | None = None,
        seconds: float | None = None,
        detail: str = "",
    ) -> None:
        """Tell that something happened now: all that was worked for, and of what a user has for nothing so much."""
        if uid is not None and n_entries is None and not self.lets_tell(uid):
            return
        self._is_told = True
        at_ns = time.time_ns()
        self._tell(Event(kind, at_ns, volume, uid, identifier, origin, n_entries, n_bytes, seconds, detail))


def boot_s() -> float:
    """The service's time: seconds since the boot, suspended or not; it can't be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def in_thread(limiter: trio.CapacityLimiter, body: Callable[[], T]) -> T:
    """The result of something that may block for as long as a disk hangs; cancelled, its thread is left to itself.

    Checkpoint  yes
    """
    return await trio.to_thread.run_sync(body, abandon_on_cancel=True, limiter=limiter)


async def in_time(
    limiter: trio.CapacityLimiter, seconds: float, body: Callable[[], T], undo: Callable[[T], object]
) -> T | None:
    """The result of something that may block, within so many seconds; else None, and what comes later is undone.

    So it is if the task is cancelled.
    undo  called in whatever thread sees it come too late
    Checkpoint  yes
    """
    handed = _ThreadResult(undo)
    has_come = False
    try:
        with trio.move_on_after(seconds):
            result = await in_thread(limiter, partial(handed.over, body))
            has_come = True
            return result
    finally:
        if not has_come:  # cancelled, too
            handed.give_up()
    return None


class _ThreadResult(Generic[T]):
    """A result on its way from a thread to a task that may not wait for it any more."""

    def __init__(self, undo: Callable[[T], object]) -> None:
        self._undo = undo
        self._lock = threading.Lock()
        self._results: list[T] = []
        self._is_late = False

    def over(self, body: Callable[[], T]) -> T:
        """In the thread: do it."""
        result = body()
        with self._lock:
            self._results.append(result)
            if self._is_late:
                self._undo(result)
        return result

    def give_up(self) -> None:
        """The task waits for it no more."""
        with self._lock:
            self._is_late = True
            for result in self._results:
                self._undo(result)
