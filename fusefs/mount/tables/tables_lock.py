"""The lock around the tables: held by one thread at a time, and by none while a call to the backing filesystem waits.

On a local filesystem a thread takes its turn (`with lock`), and has the tables to its end, calls included: letting them
go for each call takes longer than most calls. On a slow one operations `run`, and let them go for each. The code is the
same: whatever asks the backing filesystem goes through `call`, and what was read from the tables before it may be old
after it.

For the tables can be taken from a thread in its turn as well, when it has been in one call for too long: it notes each
call that it is in, and the first to remove the note, that thread or one that takes them, has them
(mount/requests/device_readers.py). Several may be away so at a time.

Threads of the native core have no turns: they share the tables with one another, each between two of its calls, while
no turn goes on (mount/native/turns.c). They note their calls too, and one that is in a call for too long shares them no
more, so that a turn can begin.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import ParamSpec, Protocol, Self, TypeVar, TypeVarTuple

from fusefs.core.latency import QUICK_NS, Latency
from fusefs.linux.fuse_caller import have_own_umask, is_killed
from fusefs.linux.thread_progress import ThreadProgress
from fusefs.mount.native._core import TurnsLock, close_unused
from fusefs.mount.tables.submounts import Submounts

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
"""Between two tries of what another process keeps: most leases are given up at once, some after 45 seconds."""


class WouldWait(Exception):
    """What is asked for has to wait for another process, and nothing was changed yet: it is to be done in a thread."""


class Mutex(Protocol):
    """Lets one turn go on at a time. By any thread."""

    def acquire(self) -> object:
        """Begin one, as soon as there is none."""

    def release(self) -> None:
        """It has ended."""


class SharedMutex(Mutex, Protocol):
    """Such a one that threads of the native core share between turns."""

    def unshare(self) -> None:
        """One of them does not any more, which is in a call."""


class Turn:
    """A thread's turns with the tables, one after the other."""

    __slots__ = (
        "calls", "hands_out", "n_begun_before", "progress", "seen_call", "shared_by", "was_away",
        "was_taken",
    )  # fmt: skip

    def __init__(self) -> None:
        """Begin, on that thread."""
        self.calls: list[object] = []
        """The call that it is in, while it has the tables; empty: they were taken away, or it is in none."""
        self.was_away = False
        """Whether other threads had them since this turn began: what it has seen is perhaps not so any more."""
        self.n_begun_before = 0
        self.shared_by: SharedMutex | None = None
        """Set where it is no turn, but a request of the native core: what that shares the tables by."""
        self.seen_call: object | None = None
        """The call that it was in when a thread looked that takes the tables from those that are in one for long."""
        self.hands_out = False
        """Whether what may take long is done by other threads: it must not be held up as they are."""
        self.progress = ThreadProgress()
        self.was_taken: Callable[[], None] = _nothing
        """Told, by another thread, each time that the tables were taken away from it."""

    def under_way(self) -> object | None:
        """What it is in: the same object for as long as it is in one and the same call; None: in none."""
        try:
            return self.calls[-1]
        except IndexError:
            return None


def _nothing() -> None:
    """Nothing has to be done."""


class TablesLock:
    """The tables' lock. `with` it: a turn of the calling thread's."""

    def __init__(self, *, is_slow: bool = False, is_measured: bool = False) -> None:
        """Begin with no thread inside.

        is_slow      whether the backing filesystem is
        is_measured  until its answers tell otherwise
        """
        self.mutex = TurnsLock()
        self.n_inside = 0
        self.is_home = True
        """Whether the tables are a thread's in its turn, which lets no other thread in while it waits."""
        self.turn = Turn()
        """The turn of the thread that has them; between two turns, of the last."""
        self.sharers: list[Turn] = []
        """Of the native core's threads."""
        self._away: list[Turn] = []
        """Turns that they were taken from, and that have not come back yet."""
        self.is_watched = False
        """Whether another thread might take them."""
        self.is_used, self.rests = False, False
        """Whether that thread has made a call since this was last read; whether its next one is to set `wakes`."""
        self.wakes = threading.Event()
        self._n_begun = 0
        self._own = threading.local()
        self._latency = Latency(is_slow=is_slow) if is_measured else None
        self.is_slow = is_slow
        """Whether operations go to threads now."""
        self.submounts = Submounts()

    def watch(self) -> None:
        """From now on the tables may be taken from a thread in its turn."""
        self.is_watched = True

    def __enter__(self) -> Self:
        """A turn begins."""
        try:
            turn: Turn = self._own.turn
        except AttributeError:
            turn = self.own_turn()
        self.mutex.acquire()
        self.turn = turn
        self._n_begun += 1
        turn.was_away = False
        return self

    def __exit__(self, *_error: object) -> None:
        self.mutex.release()
        close_unused()

    def own_turn(self) -> Turn:
        """The calling thread's."""
        turn: Turn = self._own.__dict__.setdefault("turn", Turn())
        return turn

    @property
    def is_away(self) -> bool:
        """Whether the tables were taken from a thread that has not come back yet."""
        return bool(self._away)

    @property
    def n_away(self) -> int:
        """How many threads they were taken from that have not come back yet."""
        return len(self._away)

    def is_away_from(self, turn: Turn) -> bool:
        """Whether they were taken from that thread, which has not come back yet."""
        return turn in self._away

    @property
    def was_away(self) -> bool:
        """Whether other threads had the tables since this turn began."""
        return self.turn.was_away

    def turns(self) -> set[Turn]:
        """Those that may be in a call, and keep others from theirs."""
        return {self.turn, *self.sharers}

    def leave(self, turn: Turn) -> None:
        """A thread has no more turns, and shares no more."""
        with suppress(ValueError):
            self.sharers.remove(turn)

    def take_away(self, turn: Turn, call: object) -> bool:
        """Let others have the tables, if a turn is still in that call; by any other thread."""
        if turn.under_way() is not call:
            return False
        turn.n_begun_before = self._n_begun
        self._away.append(turn)  # before the note goes: then it may be back, and is to find itself there
        try:
            turn.calls.pop()
        except IndexError:
            self._away.remove(turn)
            return False
        if turn.shared_by is not None:
            turn.shared_by.unshare()
        else:
            self.mutex.release()  # it was that thread's; its next owner knows nothing of this
        turn.was_taken()
        return True

    def _come_back(self, turn: Turn) -> None:
        self.mutex.acquire()
        self.returned(turn)

    def returned(self, turn: Turn) -> None:
        """A turn has the tables again that they were taken from."""
        self._away.remove(turn)
        self.turn = turn
        turn.was_away |= self._n_begun != turn.n_begun_before

    def call(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a call to the backing filesystem returns; others may have the tables meanwhile. `act` makes no other."""
        if self.is_home:
            turn = self.turn
            if not self.is_watched or turn.shared_by is not None:  # the core's calls of its own are those that wait
                return act(*args, **kwargs)
            calls = turn.calls
            calls.append(args)
            self.is_used = True
            if self.rests:
                self.rests = False
                self.wakes.set()
            try:
                return act(*args, **kwargs)
            finally:
                try:
                    calls.pop()
                except IndexError:
                    self._come_back(turn)
        self.is_home = True
        self.mutex.release()
        try:
            return act(*args, **kwargs)
        finally:
            self.mutex.acquire()
            self.is_home = False

    def enter(self, device: int) -> None:
        """Something on a device is asked for. Raises  WouldWait: it may never answer, and others need this thread"""
        if device in self.submounts.devices and not (self.is_slow or self._is_patient()):
            raise WouldWait

    def look_by(self, name: bytes) -> None:
        """Something is asked for by a name, which may be a mount point. Raises  WouldWait"""
        if name in self.submounts.names and not (self.is_slow or self._is_patient()):
            raise WouldWait

    def _is_patient(self) -> bool:
        return getattr(self._own, "is_patient", False)

    def patiently(self, pid: int, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a function returns that says EAGAIN instead of waiting, as an open with O_NONBLOCK does for a lease.

        act     asks the backing filesystem by `call`
        pid     of the thread that asks for it: once killed, it need not wait any more
        Raises  WouldWait: unless this thread is one that may wait; OSError EINTR: the client was killed
        """
        pause_s = _SHORTEST_PAUSE_S
        while True:
            try:
                return act(*args, **kwargs)
            except BlockingIOError:
                if not self._is_patient():
                    raise WouldWait from None
            self.call(time.sleep, pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            if self.call(is_killed, pid):
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    def look(self, act: Callable[[*Ts], R], *args: *Ts) -> R:
        """What a call returns that is timed, as it tells how quickly this filesystem answers: a look at one inode."""
        if self._latency is None:
            return self.call(act, *args)
        if not self.is_home and (self._is_patient() or getattr(self._own, "is_untimed", False)):
            return self.call(act, *args)
        began_ns = perf_counter_ns()
        try:
            return self.call(act, *args)
        finally:
            took_ns = perf_counter_ns() - began_ns
            if took_ns > QUICK_NS or self._latency.is_in_doubt:
                self.took(took_ns, 1)

    def took(self, took_ns: int, n: int) -> None:
        """Some looks that were not made by `look`. took_ns: all together"""
        if self._latency is not None and n:
            self._latency.took(took_ns / n, n)
            self.is_slow = self._latency.is_slow

    def run_patiently(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation in a thread of its own that may wait for another process."""
        self._own.is_patient = True  # how long another process takes tells nothing of this filesystem
        try:
            return self.run(act, *args, **kwargs)
        finally:
            self._own.is_patient = False

    def run_untimed(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, where how long it takes tells more of the threads that are busy than of the filesystem."""
        self._own.is_untimed = True
        try:
            return self.run(act, *args, **kwargs)
        finally:
            self._own.is_untimed = False

    def run(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation in a thread of its own, from beginning to end."""
        own = self._own
        if not hasattr(own, "has_umask"):
            have_own_umask()
            own.has_umask = True
        self.mutex.acquire()
        self.n_inside += 1
        self._n_begun += 1
        self.is_home = False
        try:
            return act(*args, **kwargs)
        finally:
            self.is_home = True
            self.n_inside -= 1
            self.mutex.release()
            close_unused()
