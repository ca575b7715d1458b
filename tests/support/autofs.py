"""An automount whose daemon is a process of ours: it hears whether it was wanted mounted, and mounts nothing."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.real_filesystems import unmount

_PROTOCOL = 5
_CATATONIC = 0x9362
"""AUTOFS_IOC_CATATONIC: processes that wait are let go."""


@contextmanager
def resting(point: Path, kind: str = "direct") -> Iterator[Callable[[], bool]]:
    """An automount point that rests; tells whether it was woken. kind: direct, or indirect: each name in it is one

    Who wakes it waits to the end of the block. Source  the kernel's Documentation/filesystems/autofs.rst
    """
    libc = ctypes.CDLL(None, use_errno=True)
    wanted, theirs = os.pipe()
    ready, end = os.pipe(), os.pipe()
    daemon = os.fork()  # what its process group asks is never asked of it
    if daemon == 0:
        _end_it(point, ready, end)
    os.close(end[0])
    os.read(ready[0], 1)
    options = f"fd={theirs},pgrp={daemon},minproto={_PROTOCOL},maxproto={_PROTOCOL},{kind}".encode()
    try:
        if libc.mount(b"tests", os.fsencode(point), b"autofs", ctypes.c_ulong(0), options):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        yield lambda: bool(select.select([wanted], [], [], 0)[0])
    finally:
        os.write(end[1], b".")
        os.close(end[1])
        os.waitpid(daemon, 0)
        unmount(point)
        for fd in (wanted, theirs, *ready):
            os.close(fd)


def _end_it(point: Path, ready: tuple[int, int], end: tuple[int, int]) -> None:
    """The daemon's life: when it is not needed any more, nothing waits for it."""
    try:
        os.setpgid(0, 0)
        os.close(end[1])
        os.write(ready[1], b".")
        os.read(end[0], 1)
        fcntl.ioctl(os.open(point, os.O_RDONLY | os.O_DIRECTORY), _CATATONIC)
    finally:
        os._exit(0)
