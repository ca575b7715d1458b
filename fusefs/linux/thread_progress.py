"""Detects from another thread that one of our threads is held up: that it waits, or spends much time in the kernel."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

_LONG_S = 0.003
"""Processor time that counts as long. A virtual processor that its host has suspended counts as working."""


class ThreadProgress:
    """Watches the thread that creates this object; another thread calls the methods."""

    def __init__(self) -> None:
        self._path = f"/proc/self/task/{threading.get_native_id()}"
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._worked_s = 0.0

    def begin_period(self) -> None:
        """Begin the period that `is_held_up` checks."""
        with suppress(OSError):  # the thread has ended
            self._worked_s = time.clock_gettime(self._clock)

    def is_held_up(self) -> bool:
        """Return whether the thread is waiting, except for Python's lock or a processor, or has worked for long."""
        try:
            with open(self._path + "/stat", "rb") as file:
                state = file.read().rpartition(b") ")[2][:1]
            if state == b"R":
                return time.clock_gettime(self._clock) - self._worked_s > _LONG_S
            with open(self._path + "/wchan", "rb") as file:
                where = file.read()
            return where != b"0" and b"futex" not in where  # 0: it has continued by now
        except OSError:
            return True


def allow_all_cores() -> None:
    """Let this thread run on all cores of the process, even if it inherited the limit of the thread that started it."""
    os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))  # the pid is the first thread's ID
