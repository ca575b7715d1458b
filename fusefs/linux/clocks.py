"""The present moment by the wall clock, the boot clock and the boot's id; and when the wall clock is set."""

from __future__ import annotations

import errno
import os
import struct
import time
from typing import Self

from fusefs.core.orphan_age import Clock, Now
from fusefs.linux.boot_id import boot_id
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import timerfd_create, timerfd_settime

_MOMENT_NS = 100_000_000
_ABSTIME, _CANCEL_ON_SET = 1, 2
_TIMER = struct.Struct("=qqqq")
"""struct itimerspec: seconds and nanoseconds between two rings, and of the first one."""
_NEVER_S = 1 << 40
_TICKS = 8


def moment(kernel: Kernel, clocks: tuple[Clock, ...] = ()) -> Now:
    """Now. clocks: what is remembered of the wall clock"""
    return Now(kernel.now_ns(), kernel.boot_ns(), boot_id(), clocks)


def clocks_ns() -> tuple[int, int]:
    """CLOCK_REALTIME and CLOCK_BOOTTIME, of one moment: a stall between the two would look like a jump of the first."""
    while True:
        began_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        wall_ns, boot_ns = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if boot_ns - began_ns < _MOMENT_NS:
            return wall_ns, boot_ns


class ClockWatch:
    """Readable when the wall clock was set since the last `seen`; what makes it run faster or slower is none of that.

    It is a timer that never expires, which the kernel cancels when the clock is set.

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
