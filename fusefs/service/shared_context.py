"""State that all volumes of a service share: clocks, events, processes and configuration."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import trio

from fusefs.core.config import Config
from fusefs.core.events import Event, EventKind
from fusefs.core.orphan_age import Clock, advance_clock
from fusefs.core.version import VERSION
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import clocks_ns
from fusefs.service.event_outlets import EventLimit
from fusefs.service.forker import Forker
from fusefs.service.inotify_watches import InotifyWatches
from fusefs.service.remembered_volumes import RememberedVolumes
from fusefs.service.state_files import load_clock, save_clock

T = TypeVar("T")


class ServiceContext:
    """The objects that all volumes of the service share."""

    def __init__(
        self,
        forker: Forker,
        watcher: InotifyWatches,
        config: Config,
        state: bytes,
        report: Callable[[Event], None],
        changed: Callable[[], None],
    ) -> None:
        """Create the objects that are not given.

        state    the directory with the state of the previous service
        report   called for each event
        changed  called when a status has changed
        """
        self.version = VERSION  # of the running code, since the installed package may change
        self.volumes = RememberedVolumes(state)  # by their ids
        self.started_ns = time.time_ns()
        self.kernel = Kernel()
        self.forker = forker
        self.watcher = watcher
        self.config = config
        self.changed = changed
        self._report = report
        self._state = state
        self.since_ns, self._clock = load_clock(state)  # orphans created since then are not reported yet
        self._has_reported = False
        self._event_limit = EventLimit()

    def clock(self) -> Clock:
        """Read both clocks; if the wall clock has jumped since the last call, save the result."""
        before = self._clock
        self._clock = advance_clock(before, *clocks_ns())
        if self._clock.eras != before.eras:
            save_clock(self._state, self._clock)
        return self._clock

    def save_clock_after_report(self) -> None:
        """Save the clock if an event was reported since the last call, so that no event is repeated after a crash."""
        clock = self.clock()  # so that an idle service notices a jump of the wall clock, too
        if self._has_reported:
            save_clock(self._state, clock, is_durable=False)
        self._has_reported = False

    def save_clock(self) -> None:
        save_clock(self._state, self.clock())

    def allows_report(self, uid: int) -> bool:
        """Count one more action of a user, and return whether to report it."""
        return self._event_limit.lets_pass(uid, boot_s())

    def report(
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
        """Report an event that happens now. Events without counts, which users can cause at will, are rate-limited."""
        if uid is not None and n_entries is None and not self.allows_report(uid):
            return
        self._has_reported = True
        at_ns = time.time_ns()
        self._report(Event(kind, at_ns, volume, uid, identifier, origin, n_entries, n_bytes, seconds, detail))


def boot_s() -> float:
    """Return the time of the service's clock, which can't be set: seconds since boot, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def in_thread(limiter: trio.CapacityLimiter, body: Callable[[], T]) -> T:
    """Run a function that may block as long as a disk hangs; if cancelled, abandon its thread.

    Checkpoint  yes
    """
    return await trio.to_thread.run_sync(body, abandon_on_cancel=True, limiter=limiter)


async def in_time(
    limiter: trio.CapacityLimiter, seconds: float, body: Callable[[], T], undo: Callable[[T], object]
) -> T | None:
    """Run a function that may block, within a time limit. If it is late, return None and undo its late result.

    undo  called with a result that is late, or whose task was cancelled, in the thread that produced it or in this one
    Checkpoint  yes
    """
    handed = _ThreadResult(undo)
    has_come = False
    try:
        with trio.move_on_after(seconds):
            result = await in_thread(limiter, partial(handed.compute, body))
            has_come = True
            return result
    finally:
        if not has_come:  # late or cancelled
            handed.give_up()
    return None


class _ThreadResult(Generic[T]):
    """A result in transit from a thread to a task that may have given up."""

    def __init__(self, undo: Callable[[T], object]) -> None:
        self._undo = undo
        self._lock = threading.Lock()
        self._results: list[T] = []
        self._is_late = False

    def compute(self, body: Callable[[], T]) -> T:
        """Run the function; called in the thread."""
        result = body()
        with self._lock:
            self._results.append(result)
            if self._is_late:
                self._undo(result)
        return result

    def give_up(self) -> None:
        """Note that the task no longer waits."""
        with self._lock:
            self._is_late = True
            for result in self._results:
                self._undo(result)
