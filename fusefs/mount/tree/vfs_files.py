"""What clients do with files, each by a handle."""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from fusefs.core.inode_attributes import Attributes
from fusefs.core.inode_table import Node
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller
from fusefs.linux.statx import look_at
from fusefs.linux.syscalls import fallocate
from fusefs.linux.thread_credentials import call_as
from fusefs.mount.tables.open_handles import FOR_EXECUTION
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree import setid_bits
from fusefs.mount.tree.act_as import by_mode, by_owner_alone, file_writer
from fusefs.mount.tree.vfs import Vfs

_KERNELS_OWN = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT | os.O_NOCTTY
"""Open flags that the kernel has dealt with; O_DIRECT would ask for aligned buffers, which requests don't have."""
_COPIED_BYTES_MAX = 64 << 20
"""At a time: a client killed meanwhile waits for it."""


class OpenedFile(NamedTuple):
    """A handle of a file.

    backing_id  by which the kernel passes its reads and writes through; 0: they come to us
    keeps       whether the kernel may keep what it has of the content
    """

    fh: int
    backing_id: int
    keeps: bool


def open_(vfs: Vfs, nodeid: int, flags: int, caller: Caller) -> OpenedFile:
    """A handle of a file, which is opened as the caller.

    Raises  OSError ETXTBSY: it would cut a program that runs. The kernel asks us to before it looks at that itself,
            unless the file is opened for writing as well.
    """
    node = vfs.node(nodeid)
    truncates = bool(flags & os.O_TRUNC)
    if truncates and vfs.handles.is_executed(node):
        raise OSError(errno.ETXTBSY, os.strerror(errno.ETXTBSY))
    vfs.make_room(caller.uid)
    with vfs.cache.changes(*(node.source,) if truncates else ()):
        held, seen = vfs.hold_seen(node, by_name=not truncates)
        with held:
            fd = open_patiently(vfs, node, held, seen, flags & ~_KERNELS_OWN | os.O_CLOEXEC, caller)
    backing_id = vfs.opened(node, fd, caller.uid, flags, seen.size, file_writer(seen.uid, seen.mode))
    try:
        keeps = not vfs.is_shared or (not backing_id and vfs.pages.are_right(node, vfs.lock.call(look_at, fd)))
    except BaseException:
        vfs.release(fd)
        raise
    if vfs.retries:
        vfs.retries.remove(caller.pid)
    return OpenedFile(fd, backing_id, keeps)


def open_patiently(vfs: Vfs, node: Node, held: Fd, seen: Attributes, flags: int, caller: Caller) -> Fd:
    """An fd of the file that an O_PATH fd holds, as the caller, when no lease on it is in the way.

    Raises  WouldWait, and OSError EINTR: see TablesLock.patiently; EACCES, EPERM: the filesystem below refuses it;
            ESTALE: it is a FIFO, a socket or a device by now: to open these may wait, or do something
    """
    if stat.S_IFMT(seen.mode) not in (stat.S_IFREG, stat.S_IFDIR):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    acting = vfs.as_caller(caller, (by_mode(seen), by_owner_alone(seen)), (node,))
    if flags & FOR_EXECUTION:
        acting.call(_execute, held)
        return Fd(vfs.lock.patiently(caller.pid, vfs.lock.call, os.open, held.path(), flags | os.O_NONBLOCK))
    return Fd(vfs.lock.patiently(caller.pid, acting.call, os.open, held.path(), flags | os.O_NONBLOCK))


def _execute(held: Fd) -> None:
    """Whether a program may be run, which need not be readable. Raises  OSError EACCES"""
    if not os.access(held.path(), os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def read(vfs: Vfs, fh: int, offset: int, size: int) -> bytes:
    """Some bytes; fewer at the end."""
    node, file = vfs.handles.opened(fh)
    with vfs.cache.reads(node.source):
        return vfs.lock.call(os.pread, file, size, offset)


def write(vfs: Vfs, fh: int, offset: int, data: bytes | memoryview, flags: int | None = None) -> int:
    """How many bytes were written.

    flags  of the file, as they are now: with O_APPEND it is written at the end, wherever that is. None: pyfuse3 does
           not say. Where none works behind the mount the kernel knows the end, and the offset is right either way;
           elsewhere a handle opened to append does
    """
    node, file = vfs.handles.opened(fh)
    if flags is None:
        flags = os.O_APPEND if vfs.is_shared and vfs.handles.is_to_append(fh) else 0
    how, writer = os.RWF_APPEND if flags & os.O_APPEND else 0, vfs.passthrough.writer_of(node, file)
    with vfs.cache.changes(node.source):
        if vfs.handles.comes_whole(fh):
            setid_bits.take_unasked(vfs, node, file)
            how |= _as_durable(flags)
        if how:
            return vfs.lock.call(call_as, writer, os.pwritev, file, (data,), offset, how)
        return vfs.lock.call(call_as, writer, os.pwrite, file, data, offset)


def _as_durable(flags: int) -> int:
    """What a single write asks for (RWF_DSYNC, RWF_SYNC), of a file that the kernel does not sync itself afterwards."""
    if flags & os.O_SYNC == os.O_SYNC:
        return os.RWF_SYNC
    return os.RWF_DSYNC if flags & os.O_DSYNC else 0


def allocate(vfs: Vfs, fh: int, mode: int, offset: int, size: int, caller: Caller) -> None:
    """Blocks for a part of a file, or a hole, or zeros: fallocate(2). It may take long."""
    node, file = vfs.handles.opened(fh)
    writer = vfs.passthrough.writer_of(node, file)
    with vfs.cache.changes(node.source), setid_bits.kept(vfs.lock, file, caller):
        vfs.lock.call(call_as, writer, fallocate, file, mode, offset, size)


def seek(vfs: Vfs, fh: int, offset: int, whence: int) -> int:
    """Where the next data is (SEEK_DATA), or the next hole.

    The kernel asks without writing back what was written to memory: a file of which it may have such pages is data
    from one end to the other, as on a filesystem that can't tell.
    Raises  OSError ENXIO: there is none
    Source  fs/fuse/file.c: fuse_file_llseek
    """
    node, file = vfs.handles.opened(fh)
    if not vfs.passthrough.is_written_late(node) or not vfs.handles.may_be_mapped(node):
        return vfs.lock.call(os.lseek, file, offset, whence)
    size = vfs.lock.call(look_at, file).size
    if not 0 <= offset < size:
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
    return offset if whence == os.SEEK_DATA else size


def copy(vfs: Vfs, fh: int, offset: int, to_fh: int, to_offset: int, size: int, caller: Caller) -> int:
    """How many bytes were copied by the filesystem below, perhaps by sharing blocks; for the rest it is asked again.

    Raises  OSError EXDEV: it can't; then the kernel reads and writes
    """
    node, file = vfs.handles.opened(fh)
    to_node, to_file = vfs.handles.opened(to_fh)
    call = vfs.lock.call
    with vfs.cache.changes(node.source, to_node.source), setid_bits.kept(vfs.lock, to_file, caller):
        accessed_ns = call(look_at, file).atime_ns
        size, writer = min(size, _COPIED_BYTES_MAX), vfs.passthrough.writer_of(to_node, to_file)
        n = call(call_as, writer, os.copy_file_range, file, to_file, size, offset, to_offset)
        if call(look_at, file).atime_ns != accessed_ns:  # of which the kernel knows nothing
            vfs.timeouts.renew(node)
    return n


def flush(vfs: Vfs, fh: int) -> None:
    """A client closes a file: what was written may fail now. Raises  OSError ENOSYS, once: it never does"""
    if not vfs.is_flushed:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _node, file = vfs.handles.opened(fh)
    vfs.lock.call(os.close, os.dup(file))


def fsync(vfs: Vfs, fh: int, *, data_only: bool) -> None:
    """Make a file durable."""
    _node, file = vfs.handles.opened(fh)
    sync(vfs.lock, file, data_only=data_only)


def sync(lock: TablesLock, fd: Fd, *, data_only: bool) -> None:
    """Make a file, or a directory's names, durable, by an fd."""
    lock.call(os.fdatasync if data_only else os.fsync, fd)
