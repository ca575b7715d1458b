"""Watches directories for changes of names, with inotify(7)."""

from __future__ import annotations

import os
import struct
from enum import IntFlag
from typing import NamedTuple

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd

_KNOWN_BITS = 0xFFC4
_EVENT = struct.Struct("=iIII")
"""struct inotify_event: watch, mask, cookie, and the length of the name that follows (padded with NULs)."""
_BUFFER_SIZE = 1 << 16
_ONLYDIR = 0x0100_0000


class InotifyMask(IntFlag):
    """The kinds of events; an event may be of several kinds."""

    ATTRIB = 0x4
    MOVED_FROM = 0x40
    MOVED_TO = 0x80
    CREATE = 0x100
    DELETE = 0x200
    DELETE_SELF = 0x400
    MOVE_SELF = 0x800
    UNMOUNT = 0x2000
    OVERFLOW = 0x4000
    IGNORED = 0x8000
    """The watch has ended: its directory or filesystem is gone, or it was removed."""


class InotifyEvent(NamedTuple):
    """One event.

    watch  the watch's number; -1 for OVERFLOW: events of any watch may be lost
    name   a name in the watched directory; empty for events that concern the directory itself
    """

    watch: int
    kinds: InotifyMask
    name: bytes


def open_inotify() -> Fd:
    """Open an inotify instance; reading from it never blocks."""
    return Fd(syscalls.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))


def add_watch(inotify: Fd, dir_fd: int, kinds: InotifyMask) -> int:
    """Watch a directory (O_PATH is enough). Returns  the watch's number; the same for each call with this directory

    A watch does not keep a filesystem busy: unmounting it ends the watch, with UNMOUNT and IGNORED.
    Raises  OSError: ENOSPC: the limit fs.inotify.max_user_watches is reached
    """
    # The path through /proc leads to the directory that was opened, whatever its name leads to now.
    mask = int(kinds | InotifyMask.DELETE_SELF | InotifyMask.MOVE_SELF) | _ONLYDIR
    return syscalls.inotify_add_watch(inotify, b"/proc/self/fd/%d" % dir_fd, mask)


def remove_watch(inotify: Fd, number: int) -> None:
    """Remove a watch. Raises  OSError: EINVAL: the watch has already ended"""
    syscalls.inotify_rm_watch(inotify, number)


def read_events(inotify: Fd) -> list[InotifyEvent]:
    """Return the pending events; [] if there are none."""
    try:
        buffer = os.read(inotify, _BUFFER_SIZE)
    except BlockingIOError:
        return []
    events = []
    at = 0
    while at < len(buffer):
        number, mask, _cookie, length = _EVENT.unpack_from(buffer, at)
        at += _EVENT.size
        name = buffer[at : at + length].rstrip(b"\0")
        at += length
        events.append(InotifyEvent(number, InotifyMask(mask & _KNOWN_BITS), name))
    return events
