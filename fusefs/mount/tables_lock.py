"""The lock around the tables: held by one thread at a time, and by none while a call to the backing filesystem waits.

On a local filesystem every operation runs on the loop's own thread, which waits itself: no thread is quicker. On a
slow one operations run in threads of their own. The code is the same: whatever asks the backing filesystem goes
through `call`, and what was read from the tables before it may be old after it.

So the tables can be taken from the loop's own thread as well, when it has been in one call for too long: it notes each
call that it is in, and the first to remove the note, that thread or one that takes them, has them
(mount/standby_readers.py).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from time import perf_counter_ns
from typing import ParamSpec, TypeVar, TypeVarTuple

from fusefs.core.latency import QUICK_NS, Latency
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import have_own_umask, is_killed
from fusefs.mount.submounts import Submounts

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
"""Between two tries of what another process keeps: most leases are given up at once, some after 45 seconds."""


class WouldWait(Exception):
    """What is asked for has to wait for another process, and nothing was changed yet: it is to be done in a thread."""


class TablesLock:
    """The tables' lock, and the fds that operations in threads were lent."""

    def __init__(self, *, is_slow: bool = False, is_measured: bool = False) -> None:
        """Begin with no thread inside.

        is_slow      whether the backing filesystem is
        is_measured  until its answers tell otherwise
        """
        self.mutex = threading.Lock()
        self.n_inside = 0
        self.is_home = True
        """Whether the tables are the loop's own thread's, which lets no other thread in while it waits."""
        self.is_away = False
        """Whether the tables were taken from that thread, and it has not come back yet."""
        self.was_away = False
        """Whether other threads had them at any time since `begin`: what it has seen is perhaps not so any more."""
        self.is_watched = False
        """Whether another thread might take them."""
        self.is_used, self.rests = False, False
        """Whether that thread has made a call since this was last read; whether its next one is to set `wakes`."""
        self.wakes = threading.Event()
        self._calls: list[object] = []
        self._borrowed: list[Fd] = []
        self._left_open: list[Fd] = []
        self._n_begun = self._n_begun_before = 0
        self._own = threading.local()
        self._latency = Latency(is_slow=is_slow) if is_measured else None
        self.is_slow = is_slow
        """Whether operations go to threads now."""
        self.submounts = Submounts()
        self.stays_home = False
        """Whether that is for good: no client can be told names alone."""

    def stay_home(self) -> None:
        """Never use threads: whatever the filesystem is, all requests wait for it."""
        self._latency, self.is_slow, self.stays_home = None, False, True

    def watch(self) -> None:
        """From now on the tables may be taken from the loop's own thread."""
        self.is_watched = True

    def begin(self) -> None:
        """An operation begins on the loop's own thread, which has the tables."""
        self.was_away = False
        self._borrowed.clear()
        while self._left_open:
            self.call(os.close, self._left_open.pop())

    def under_way(self) -> object | None:
        """What that thread is in: the same object for as long as it is in one and the same call; None: in none."""
        try:
            return self._calls[-1]
        except IndexError:
            return None

    def take_away(self, call: object) -> bool:
        """Let others have the tables, if that thread is still in that call; by any other thread."""
        if self.under_way() is not call:
            return False
        try:
            self._calls.pop()
        except IndexError:
            return False
        self._n_begun_before = self._n_begun
        self.is_away = True
        self.mutex.release()  # it was that thread's; its next owner knows nothing of this
        return True

    def _come_back(self) -> None:
        self.mutex.acquire()
        self.is_away = False
        self.was_away |= self._n_begun != self._n_begun_before

    def call(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a call to the backing filesystem returns; others may have the tables meanwhile. `act` makes no other."""
        if self.is_home:
            if not self.is_watched:
                return act(*args, **kwargs)
            calls = self._calls
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
                    self._come_back()
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
        if not self.is_home and self._is_patient():  # how long another process takes tells nothing of this filesystem
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
        self._own.is_patient = True
        try:
            return self.run(act, *args, **kwargs)
        finally:
            self._own.is_patient = False

    def run(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation in a thread of its own, from beginning to end."""
        own = self._own
        if not hasattr(own, "lent"):
            have_own_umask()
            own.lent = []
        try:
            with self.mutex:
                self.n_inside += 1
                self._n_begun += 1
                self.is_home = False
                try:
                    return act(*args, **kwargs)
                finally:
                    self.is_home = True
                    self.n_inside -= 1
        finally:
            lent, own.lent = own.lent, []
            for fd in lent:
                fd.close()

    def lend(self, fd: Fd) -> Fd:
        """An fd that stays open to the end of this operation, whatever others close meanwhile."""
        if self.is_home:
            if self.is_watched:
                self._borrowed.append(fd)
            return fd
        copy = Fd(os.dup(fd))
        self._own.lent.append(copy)
        return copy

    def close(self, fd: Fd) -> None:
        """Close an fd that the tables had, and was lent; others may have them meanwhile."""
        if self.is_away and fd in self._borrowed:
            self._left_open.append(fd)
        else:
            self.call(os.close, fd)

    def owned(self, fd: Fd) -> Fd:
        """An fd that is closed without the tables' lock: closing a file may write all of it back, over a network."""
        return fd if self.is_home and not self.is_watched else _Slow.of(fd, self)


class _Slow(Fd):
    """An fd whose closing may have to wait."""

    _lock: TablesLock

    @classmethod
    def of(cls, fd: Fd, lock: TablesLock) -> _Slow:
        """An fd, which is taken over, as one whose closing goes through the lock."""
        slow = cls(fd)
        slow._lock = lock
        return slow

    def close(self) -> None:
        """Close it; others may have the tables meanwhile."""
        self._lock.call(super().close)
