"""What clients do with files, each by a handle."""

from __future__ import annotations

import errno
import os
from dataclasses import KW_ONLY, dataclass

from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller
from fusefs.linux.statx import look_at
from fusefs.linux.syscalls import fallocate
from fusefs.linux.thread_credentials import call_as
from fusefs.mount.native._core import Tables
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.open_handles import OpenHandles
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree import setid_bits
from fusefs.mount.tree.act_as import file_writer
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.opening import OpenedFile, Opening
from fusefs.mount.tree.passthrough import Passthrough
from fusefs.mount.tree.validity import AttrTimeouts

_KERNELS_OWN = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT | os.O_NOCTTY | os.O_PATH | os.O_TMPFILE
"""Open flags that the kernel has dealt with; O_DIRECT would ask for aligned buffers, which requests don't have."""
_COPIED_BYTES_MAX = 64 << 20
"""At a time: a client killed meanwhile waits for it."""


@dataclass(eq=False, repr=False)
class FileOperations:
    """Those of one mount. To be used with the tables' lock; all methods raise OSError only.

    is_shared   files may change behind the mount at any time
    is_flushed  the backing filesystem may tell of a failed write as late as at a close
    """

    _lock: TablesLock
    _nodes: Tables
    _cache: DaemonCache
    _handles: OpenHandles
    _retries: EstaleRetries
    _passthrough: Passthrough
    _timeouts: AttrTimeouts
    _access: NodeAccess
    _opening: Opening
    _: KW_ONLY
    is_shared: bool
    is_flushed: bool

    def open(self, nodeid: int, flags: int, caller: Caller) -> OpenedFile:
        """A handle of a file, which is opened as the caller.

        Raises  OSError ETXTBSY: it would cut a program that runs. The kernel asks us to before it looks at that itself,
                unless the file is opened for writing as well.
        """
        node = self._access.node(nodeid)
        truncates = bool(flags & os.O_TRUNC)
        if truncates and node.is_executed:
            raise OSError(errno.ETXTBSY, os.strerror(errno.ETXTBSY))
        self._opening.make_room(caller.uid)
        with self._cache.changes(*(node.source,) if truncates else ()):
            held, seen = self._access.hold_seen(node, by_name=not truncates)
            with held:
                fd = self._opening.open_as(caller, node, held, seen, flags & ~_KERNELS_OWN | os.O_CLOEXEC)
        backing_id = self._opening.opened(node, fd, caller.uid, flags, file_writer(seen.uid, seen.mode))
        try:
            keeps = not self.is_shared or (
                not backing_id and self._nodes.pages_are_right(node, self._lock.call(look_at, fd))
            )
        except BaseException:
            self._opening.release(fd)
            raise
        if self._retries:
            self._retries.remove(caller.pid)
        return OpenedFile(fd, backing_id, keeps)

    def read(self, fh: int, offset: int, size: int) -> bytes:
        """Some bytes; fewer at the end."""
        node, file = self._handles.opened(fh)
        with self._cache.reads(node.source):
            return self._lock.call(os.pread, file, size, offset)

    def write(self, fh: int, offset: int, data: bytes | memoryview, flags: int | None = None) -> int:
        """How many bytes were written.

        flags  of the file, as they are now: with O_APPEND it is written at the end, wherever that is. None: pyfuse3
               does not say. Where none works behind the mount the kernel knows the end, and the offset is right either
               way; elsewhere a handle opened to append does
        """
        node, file = self._handles.opened(fh)
        if flags is None:
            flags = os.O_APPEND if self.is_shared and self._nodes.appends(fh) else 0
        writer = self._passthrough.writer_of(node, file)
        with self._cache.changes(node.source):
            if flags & os.O_APPEND:
                return self._lock.call(call_as, writer, os.pwritev, file, (data,), offset, os.RWF_APPEND)
            return self._lock.call(call_as, writer, os.pwrite, file, data, offset)

    def allocate(self, fh: int, mode: int, offset: int, size: int, caller: Caller) -> None:
        """Blocks for a part of a file, or a hole, or zeros: fallocate(2). It may take long."""
        node, file = self._handles.opened(fh)
        writer = self._passthrough.writer_of(node, file)
        with self._cache.changes(node.source), setid_bits.kept(self._lock, file, caller):
            self._lock.call(call_as, writer, fallocate, file, mode, offset, size)

    def seek(self, fh: int, offset: int, whence: int) -> int:
        """Where the next data is (SEEK_DATA), or the next hole.

        The kernel asks without writing back what was written to memory: a file of which it may have such pages is data
        from one end to the other, as on a filesystem that can't tell.
        Raises  OSError ENXIO: there is none
        Source  fs/fuse/file.c: fuse_file_llseek
        """
        node, file = self._handles.opened(fh)
        if node.backing_id or not node.may_be_mapped:
            return self._lock.call(os.lseek, file, offset, whence)
        size = self._lock.call(look_at, file).size
        if not 0 <= offset < size:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return offset if whence == os.SEEK_DATA else size

    def copy(self, fh: int, offset: int, to_fh: int, to_offset: int, size: int, caller: Caller) -> int:
        """How many bytes the filesystem below has copied, perhaps by sharing blocks; for the rest it is asked again.

        Raises  OSError EXDEV: it can't; then the kernel reads and writes
        """
        node, file = self._handles.opened(fh)
        to_node, to_file = self._handles.opened(to_fh)
        call = self._lock.call
        with self._cache.changes(node.source, to_node.source), setid_bits.kept(self._lock, to_file, caller):
            accessed_ns = call(look_at, file).atime_ns
            size, writer = min(size, _COPIED_BYTES_MAX), self._passthrough.writer_of(to_node, to_file)
            n = call(call_as, writer, os.copy_file_range, file, to_file, size, offset, to_offset)
            if call(look_at, file).atime_ns != accessed_ns:  # of which the kernel knows nothing
                self._timeouts.renew(node)
        return n

    def flush(self, fh: int) -> None:
        """A client closes a file: what was written may fail now. Raises  OSError ENOSYS, once: it never does"""
        if not self.is_flushed:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        _node, file = self._handles.opened(fh)
        self._lock.call(os.close, os.dup(file))

    def fsync(self, fh: int, *, data_only: bool) -> None:
        """Make a file durable."""
        _node, file = self._handles.opened(fh)
        sync(self._lock, file, data_only=data_only)


def sync(lock: TablesLock, fd: Fd, *, data_only: bool) -> None:
    """Make a file, or a directory's names, durable, by an fd."""
    lock.call(os.fdatasync if data_only else os.fsync, fd)
