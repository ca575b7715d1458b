"""State that all volumes of a service share: clocks, events, processes and configuration."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Generic, TypeVar

import trio

from fusefs.core.config import Config
from fusefs.core.events import Event, EventKind
from fusefs.core.orphan_age import Clock, jumped
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import clocks_ns
from fusefs.service.event_outlets import EventLimit
from fusefs.service.forker import Forker
from fusefs.service.inotify_watches import InotifyWatches
from fusefs.service.known_volumes import KnownVolumes
from fusefs.service.state_files import load_clock, save_clock

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class ServiceContext:
    """The service's hands and its memory."""

    def __init__(
        self,
        forker: Forker,
        watcher: InotifyWatches,
        config: Config,
        state: bytes,
        tell: Callable[[Event], None],
        changed: Callable[[], None],
    ) -> None:
        """Bring them together.

        state  the directory with what the last service remembered
        tell   takes each event
        changed  called when a status is not what it was
        """
        self.version = version("trashd")  # of the code that runs: the package may be another one tomorrow
        self.known = KnownVolumes(state)  # by their ids
        self.started_ns = time.time_ns()
        self.kernel = Kernel()
        self.forker = forker
        self.watcher = watcher
        self.config = config
        self.changed = changed
        self._tell = tell
        self._state = state
        self.since_ns, self._clock = load_clock(state)  # what was made since is not told yet
        self._is_told = False
        self._event_limit = EventLimit()

    def clock(self) -> Clock:
        """Both clocks now: a jump of the wall clock is noticed at the next look, and not forgotten."""
        before = self._clock
        self._clock = jumped(before, *clocks_ns())
        if self._clock.eras != before.eras:
            save_clock(self._state, self._clock)
        return self._clock

    def save_told(self) -> None:
        """Note the clock if something was told since the last call: killed, the service does not tell it again."""
        clock = self.clock()  # however idle it is, a jump of the wall clock is noticed
        if self._is_told:
            save_clock(self._state, clock, is_durable=False)
        self._is_told = False

    def save_clock(self) -> None:
        """Leave the clock for the next service, whatever ends this one."""
        save_clock(self._state, self.clock())

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
