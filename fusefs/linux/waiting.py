"""Whether a thread of ours gets on."""

from __future__ import annotations

import threading
import time


class Progress:
    """What the thread that makes this does: whoever asks is another one."""

    def __init__(self) -> None:
        """Begin with the calling thread."""
        self._path = f"/proc/self/task/{threading.get_native_id()}"
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._worked_s = 0.0

    def note(self) -> None:
        """`is_held_up` is about the time from now on."""
        self._worked_s = time.clock_gettime(self._clock)

    def is_held_up(self, for_s: float) -> bool:
        """Whether it waits in the kernel, or works there; not for Python's lock, nor for its turn on a processor.

        for_s  seconds since `note`, of which it has worked half at least
        """
        try:
            with open(self._path + "/stat", "rb") as file:
                state = file.read().rpartition(b") ")[2][:1]
            if state == b"R":
                return time.clock_gettime(self._clock) - self._worked_s > for_s / 2
            with open(self._path + "/wchan", "rb") as file:
                return b"futex" not in file.read()
        except OSError:
            return True
