"""Whether a thread of ours is held up: it waits in the kernel, or works there for long; asked by another."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

_LONG_S = 0.003
"""Of processor time. A virtual processor that its host has taken away counts as one that works."""


class ThreadProgress:
    """What the thread that makes this does: it is asked by another one."""

    def __init__(self) -> None:
        """Begin with the calling thread."""
        self._path = f"/proc/self/task/{threading.get_native_id()}"
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._worked_s = 0.0

    def note(self) -> None:
        """`is_held_up` is about the time from now on."""
        with suppress(OSError):  # it has ended
            self._worked_s = time.clock_gettime(self._clock)

    def is_held_up(self) -> bool:
        """Whether it waits in the kernel, or has worked there for long; not for Python's lock, nor for a processor."""
        try:
            with open(self._path + "/stat", "rb") as file:
                state = file.read().rpartition(b") ")[2][:1]
            if state == b"R":
                return time.clock_gettime(self._clock) - self._worked_s > _LONG_S
            with open(self._path + "/wchan", "rb") as file:
                where = file.read()
            return where != b"0" and b"futex" not in where  # 0: it has gone on since
        except OSError:
            return True


def run_on_any_core() -> None:
    """Let this thread run wherever the process may: one that was begun by a thread with one core has that alone."""
    os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))  # the pid is the first thread's number
