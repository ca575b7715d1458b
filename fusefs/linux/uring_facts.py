"""FUSE over io_uring: what the machine allows, and the machine's switch for it.

Source  Documentation/filesystems/fuse/fuse-io-uring.rst; Documentation/admin-guide/sysctl/kernel.rst, io_uring_disabled
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress

from fusefs.core.uring_choice import SWITCH, UringFacts
from fusefs.linux import syscalls

_DISABLED = "/proc/sys/kernel/io_uring_disabled"
_ONLINE, _POSSIBLE = "/sys/devices/system/cpu/online", "/sys/devices/system/cpu/possible"
_PARAMETERS_BYTES = 120
"""The size of struct io_uring_params."""

_log = logging.getLogger(__name__)


def read_facts() -> UringFacts:
    """Find out what the machine allows this process and thread to do now."""
    return UringFacts(
        release=os.uname().release,
        is_enabled=_is_enabled(),
        refusal=_refusal(),
        disabled=int(_read_text(_DISABLED) or "0"),
        barred=frozenset(parse_cores(_read_text(_ONLINE)) - os.sched_getaffinity(0)),
    )


def split_cores() -> tuple[list[int], list[int]]:
    """Return the online cores on which this thread may run, and all other cores that could ever exist."""
    own = parse_cores(_read_text(_ONLINE)) & os.sched_getaffinity(0)
    return sorted(own), sorted(parse_cores(_read_text(_POSSIBLE)) - own)


def enable_uring() -> None:
    """Turn on the machine's switch for future mounts, and log that; do nothing if it is on or does not exist.

    Raises  OSError: this needs root and a writable /sys
    """
    if _is_enabled() is not False:
        return
    with open(SWITCH, "r+", encoding="ascii") as file:
        file.write("Y")
    _log.warning("enabled FUSE over io_uring for all FUSE mounts on this machine: %s is Y until the next boot", SWITCH)


def parse_cores(text: str) -> set[int]:
    """Parse a list of cores from /sys, such as `0-2,5`."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _is_enabled() -> bool | None:
    with suppress(OSError):  # if FUSE is a module, opening its device loads it
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    return {"Y": True, "N": False}.get(_read_text(SWITCH))


def _refusal() -> int:
    try:
        os.close(syscalls.io_uring_setup(1, ctypes.create_string_buffer(_PARAMETERS_BYTES)))
    except OSError as error:
        return error.errno or 0
    return 0


def _read_text(path: str) -> str:
    """Return the text of a small kernel file; "" if it can't be read."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
