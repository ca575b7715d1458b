"""The lock around the tables: held by one thread at a time, and by none while a call to the backing filesystem waits.

The code of an operation has the tables between its calls: whatever asks the backing filesystem goes through `call`, and
what was read from the tables before it may be old after it. Requests of the native core have the same lock
(mount/native/lock.c).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, Self, TypeVar, TypeVarTuple

from fusefs.core.latency import Latency
from fusefs.linux.fuse_caller import have_own_umask, is_killed
from fusefs.mount.native._core import TablesMutex, close_unused
from fusefs.mount.tables.submounts import Submounts

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
"""Between two tries of what another process keeps: most leases are given up at once, some after 45 seconds."""


class WouldWait(Exception):
    """A request waits for another process, and has changed nothing yet: it is to be queued among those that do."""


class TablesLock:
    """`with` it: the calling thread has the tables, but for its calls."""

    def __init__(self, *, is_slow: bool = False, is_measured: bool = False) -> None:
        """Begin with no thread inside.

        is_slow      whether the backing filesystem is
        is_measured  until its answers tell otherwise
        """
        self.mutex = TablesMutex()
        self.n_inside = 0
        """Operations in threads of their own."""
        self._own = threading.local()
        self.latency = Latency(is_slow=is_slow) if is_measured else None
        self.mutex.is_slow = is_slow
        self.submounts = Submounts()

    @property
    def is_slow(self) -> bool:
        """Whether operations go to threads now."""
        return self.mutex.is_slow

    @is_slow.setter
    def is_slow(self, is_slow: bool) -> None:
        self.mutex.is_slow = is_slow

    def __enter__(self) -> Self:
        self.mutex.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self.mutex.release()
        close_unused()

    def held(self) -> AbstractContextManager[object]:
        """Have the tables, unless the calling thread has them already."""
        return nullcontext() if self.mutex.is_held else self

    def call(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a call to the backing filesystem returns; others have the tables meanwhile."""
        if not self.mutex.is_held:
            return act(*args, **kwargs)
        self.mutex.release()
        try:
            return act(*args, **kwargs)
        finally:
            self.mutex.acquire()

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
                if not getattr(self._own, "is_patient", False):
                    raise WouldWait from None
            self.call(time.sleep, pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            if self.call(is_killed, pid):
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    def took(self, took_ns: int, n: int) -> bool:
        """How long the native core has waited for so many statx together, as it reports; by any thread.

        Returns  whether quick ones are to be reported, too
        """
        if self.latency is None:
            return False
        self.latency.took(took_ns / n, n)
        self.mutex.is_slow = self.latency.is_slow
        return self.latency.is_in_doubt

    def run_patiently(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, of an operation that may wait for another process."""
        self._own.is_patient = True
        try:
            return self.run(act, *args, **kwargs)
        finally:
            self._own.is_patient = False

    def run(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation in a thread of its own, from beginning to end."""
        if not hasattr(self._own, "has_umask"):
            have_own_umask()
            self._own.has_umask = True
        with self:
            self.n_inside += 1
            try:
                return act(*args, **kwargs)
            finally:
                self.n_inside -= 1
