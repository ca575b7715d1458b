"""Who has the tables: one thread at a time, and nobody while the backing filesystem keeps him waiting.

On a local filesystem every operation runs on the loop's own thread, which waits itself: no thread is quicker. On a
slow one operations run in threads of their own. The code is the same: whatever asks the backing filesystem goes
through `call`, and what was read from the tables before it may be old after it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import ParamSpec, TypeVar

from fusefs.core.latency import Latency
from fusefs.linux.caller import have_own_umask
from fusefs.linux.fd import Fd

P = ParamSpec("P")
R = TypeVar("R")


class Gate:
    """The tables' lock, and the fds that operations in threads were lent."""

    def __init__(self, *, is_slow: bool = False, is_measured: bool = False) -> None:
        """To be made by the loop's own thread.

        is_slow      whether the backing filesystem is
        is_measured  until its answers tell otherwise
        """
        self.lock = threading.Lock()
        self.n_inside = 0
        self._home = get_ident()
        self._own = threading.local()
        self._latency = Latency(is_slow=is_slow) if is_measured else None
        self._is_slow = is_slow

    @property
    def is_slow(self) -> bool:
        """Whether operations go to threads now."""
        return self._latency.is_slow if self._latency is not None else self._is_slow

    def stay_home(self) -> None:
        """Never use threads: whatever the filesystem is, it keeps everybody waiting."""
        self._latency, self._is_slow = None, False

    def is_home(self) -> bool:
        """Whether this is the loop's own thread, which lets nobody else in while it waits."""
        return get_ident() == self._home

    def call(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a call to the backing filesystem returns; others may have the tables meanwhile."""
        if get_ident() == self._home:
            return act(*args, **kwargs)
        self.lock.release()
        try:
            return act(*args, **kwargs)
        finally:
            self.lock.acquire()

    def look(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same of a call that tells how quickly this filesystem answers: a look at one inode."""
        if self._latency is None:
            return self.call(act, *args, **kwargs)
        began_ns = time.perf_counter_ns()
        try:
            return self.call(act, *args, **kwargs)
        finally:
            self._latency.took(time.perf_counter_ns() - began_ns)

    def took(self, took_ns: int, n: int) -> None:
        """Some looks that were not made by `look`. took_ns: all together"""
        if self._latency is not None and n:
            self._latency.took(took_ns / n, n)

    def run(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation in a thread of its own, from beginning to end."""
        own = self._own
        if not hasattr(own, "lent"):
            have_own_umask()
            own.lent = []
        try:
            with self.lock:
                self.n_inside += 1
                try:
                    return act(*args, **kwargs)
                finally:
                    self.n_inside -= 1
        finally:
            lent, own.lent = own.lent, []
            for fd in lent:
                fd.close()

    def lend(self, fd: Fd) -> Fd:
        """An fd that stays open to the end of this operation, whatever others close meanwhile."""
        if get_ident() == self._home:
            return fd
        copy = Fd(os.dup(fd))
        self._own.lent.append(copy)
        return copy

    def owned(self, fd: Fd) -> Fd:
        """An fd that is closed without the tables' lock: closing a file may write all of it back, over a network."""
        return fd if get_ident() == self._home else _Slow.of(fd, self)


class _Slow(Fd):
    """An fd whose closing may have to wait."""

    _gate: Gate

    @classmethod
    def of(cls, fd: Fd, gate: Gate) -> _Slow:
        """The same fd."""
        slow = cls(fd)
        slow._gate = gate
        return slow

    def close(self) -> None:
        """Close it; others may have the tables meanwhile."""
        self._gate.call(super().close)
