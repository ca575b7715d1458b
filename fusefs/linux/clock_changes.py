"""When the wall clock is set: a timer that never expires, which the kernel cancels then."""

from __future__ import annotations

import errno
import os
import struct
import time
from typing import Self

from fusefs.linux.fd import Fd
from fusefs.linux.syscalls import timerfd_create, timerfd_settime

_ABSTIME, _CANCEL_ON_SET = 1, 2
_TIMER = struct.Struct("=qqqq")
"""struct itimerspec: seconds and nanoseconds between two rings, and of the first one."""
_NEVER_S = 1 << 40
_TICKS = 8


class ClockWatch:
    """Readable when the wall clock was set since the last `seen`; what makes it run faster or slower is none of that.

    Source  timerfd_create(2), TFD_TIMER_CANCEL_ON_SET
    """

    def __init__(self) -> None:
        self._timer = Fd(timerfd_create(time.CLOCK_REALTIME, os.O_CLOEXEC | os.O_NONBLOCK))
        self._arm()

    def fileno(self) -> int:
        """What to wait for."""
        return int(self._timer)

    def seen(self) -> None:
        """Wait for the next time from now on."""
        try:
            os.read(self._timer, _TICKS)
        except OSError as error:
            if error.errno not in (errno.ECANCELED, errno.EAGAIN):
                raise
        self._arm()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._timer.close()

    def _arm(self) -> None:
        never = _TIMER.pack(0, 0, _NEVER_S, 0)
        timerfd_settime(self._timer, _ABSTIME | _CANCEL_ON_SET, never)
