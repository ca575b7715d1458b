"""Which machine this is, and which of its boots."""

from __future__ import annotations

import os
import time


def host_id() -> str:
    """The machine id, or the host name where there is none (containers)."""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            return file.read().strip() or os.uname().nodename
    except (OSError, ValueError):
        return os.uname().nodename


def boot_id() -> str:
    """The running kernel's boot id: the same in all its containers, so that locks are seen among them."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def boot_clock_ns() -> int:
    """CLOCK_BOOTTIME: runs through suspend, starts at 0 with each boot, and nobody sets it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
