"""Which machine this is, and which of its boots."""

from __future__ import annotations

import os
from functools import cache


def host_id() -> str:
    """The machine id, or the host name where there is none (containers)."""
    try:
        with open("/etc/machine-id", "rb") as file:
            return file.read().decode("ascii").strip() or os.uname().nodename
    except (OSError, ValueError):
        return os.uname().nodename


@cache
def boot_id() -> str:
    """The running kernel's boot id: the same in all its containers, so that locks are seen among them."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:  # a file of text would load its own ASCII
        return file.read().decode("ascii").strip()
