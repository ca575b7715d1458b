"""What clients do with files, each by a handle."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from fusefs.core.inodes import Node
from fusefs.linux.attributes import look_at
from fusefs.linux.caller import written_by
from fusefs.linux.fd import Fd
from fusefs.mount.vfs import Vfs

_KERNELS_OWN = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT | os.O_NOCTTY
"""Open flags that the kernel has dealt with; O_DIRECT would ask for aligned buffers, which requests don't have."""


class Opened(NamedTuple):
    """A handle of a file.

    backing_id  by which the kernel passes its reads and writes through; 0: they come to us
    keeps       whether the kernel may keep what it has of the content
    """

    fh: int
    backing_id: int
    keeps: bool


def open_(vfs: Vfs, nodeid: int, flags: int, pid: int) -> Opened:
    """A handle of a file, for a thread of a client's.

    Raises  OSError ETXTBSY: it would cut a program that runs. The kernel asks us to before it looks at that itself,
            unless the file is opened for writing as well.
    """
    node = vfs.node(nodeid)
    if flags & os.O_TRUNC and vfs.handles.is_executed(node):
        raise OSError(errno.ETXTBSY, os.strerror(errno.ETXTBSY))
    vfs.make_room()
    wanted = (flags & ~_KERNELS_OWN) | os.O_CLOEXEC
    found = None if flags & os.O_TRUNC else vfs.directories.open_by_name(node, wanted, is_alone=not vfs.is_shared)
    fd, size, writer = found or (_opened_by_node(vfs, node, wanted), None, None)
    backing_id = vfs.opened(node, fd, flags, size, writer)
    try:
        keeps = not vfs.is_shared or (not backing_id and vfs.pages.are_right(node, vfs.gate.call(look_at, fd)))
    except BaseException:
        vfs.release(fd)
        raise
    if vfs.directories.losers:
        vfs.directories.losers.remove(pid)
    return Opened(fd, backing_id, keeps)


def _opened_by_node(vfs: Vfs, node: Node, flags: int) -> Fd:
    """An fd of a file wherever it is."""
    changed = (node.source,) if flags & os.O_TRUNC else ()
    with vfs.memory.changes(*changed), vfs.hold(node) as held:
        return Fd(vfs.gate.call(os.open, b"/proc/self/fd/%d" % held, flags))


def read(vfs: Vfs, fh: int, offset: int, size: int) -> bytes:
    """Some bytes; fewer at the end."""
    with vfs.memory.changes(vfs.handles.node(fh).source):
        return vfs.gate.call(os.pread, vfs.handles.file(fh), size, offset)


def write(vfs: Vfs, fh: int, offset: int, data: bytes | memoryview) -> int:
    """How many bytes were written."""
    node, file = vfs.handles.node(fh), vfs.handles.file(fh)
    with vfs.memory.changes(node.source), written_by(vfs.passthrough.writer_of(node, file)):
        return vfs.gate.call(os.pwrite, file, data, offset)


def flush(vfs: Vfs, fh: int) -> None:
    """Somebody closes a file: what was written may fail now. Raises  OSError ENOSYS, once: it never does"""
    if not vfs.is_flushed:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    vfs.gate.call(os.close, os.dup(vfs.handles.file(fh)))


def fsync(vfs: Vfs, fh: int, *, data_only: bool) -> None:
    """Make a file or a directory's names durable."""
    vfs.gate.call(os.fdatasync if data_only else os.fsync, vfs.handles.file(fh))
