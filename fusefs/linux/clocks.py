"""The present moment by the wall clock, the boot clock and the boot's id."""

from __future__ import annotations

import time

from fusefs.core.orphan_age import Clock, Now
from fusefs.linux.boot_id import boot_id
from fusefs.linux.kernel import Kernel

_MOMENT_NS = 100_000_000


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
