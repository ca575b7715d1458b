"""All that statx(2) tells of an inode, birth time included, in one call; and the file handle that names it for good.

A listing looks at each of its entries: what is done for each is counted in tens of nanoseconds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading

from fusefs.core.metadata_cache import Attributes
from fusefs.linux import syscalls
from fusefs.linux.fd import Fd

_statx = syscalls.statx_call
_name_to_handle = syscalls.name_to_handle_at_held
_close = syscalls.close_held

_unpacked = syscalls.statx_fields(
    "mask", "blksize", "nlink", "uid", "gid", "mode", "ino", "size", "blocks", "atime_s", "atime_ns", "btime_s",
    "btime_ns", "ctime_s", "ctime_ns", "mtime_s", "mtime_ns", "rdev", "dev",
).unpack_from  # fmt: skip
_BTIME = syscalls.STATX_BTIME
_device_number = syscalls.device_number
WANTED = syscalls.STATX_BASIC_STATS | _BTIME
BY_NAME = syscalls.AT_SYMLINK_NOFOLLOW
BY_FD = syscalls.AT_SYMLINK_NOFOLLOW | syscalls.AT_EMPTY_PATH
_HANDLE_HEAD, _MAX_HANDLE_SZ = syscalls.HANDLE_HEAD, syscalls.MAX_HANDLE_SZ
_handle_size = struct.Struct("=I").unpack_from
_NANO = 1_000_000_000
TO_PEEK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class StatxReader:
    """Looks at names one after the other: what the kernel writes to is made once. For one thread alone."""

    def __init__(self, *, asks: bool = True) -> None:
        """asks: another machine, or a daemon, if that takes one; else what the kernel knows is told."""
        sync = 0 if asks else syscalls.AT_STATX_DONT_SYNC
        self._by_name, self._by_fd = BY_NAME | sync, BY_FD | sync
        self._statx = ctypes.create_string_buffer(syscalls.STATX_SIZE)
        self._handle = ctypes.create_string_buffer(_HANDLE_HEAD.size + _MAX_HANDLE_SZ)
        self._mount_id = ctypes.byref(ctypes.c_int())

    def look(self, dir_fd: int, name: bytes = b"") -> Attributes:
        """The attributes of a name in a directory, or of what the fd itself holds; never through a link."""
        if _statx(dir_fd, name, self._by_name if name else self._by_fd, WANTED, self._statx) < 0:
            raise syscalls.failure(name)
        return self.seen()

    def identify(self, dir_fd: int, name: bytes) -> tuple[Attributes, bytes]:
        """The attributes of a name in a directory, and its file handle; empty where there are none.

        After a rename in between the two are of different inodes; `peek_name` has no such window.
        """
        if _statx(dir_fd, name, self._by_name, WANTED, self._statx) < 0:
            raise syscalls.failure(name)
        return self.seen(), self.handle_of(dir_fd, name)

    def ask(self, fd: int) -> Attributes:
        """The attributes of what an fd holds, as the filesystem's server has them."""
        if _statx(fd, b"", BY_FD | syscalls.AT_STATX_FORCE_SYNC, WANTED, self._statx) < 0:
            raise syscalls.failure()
        return self.seen()

    def find(self, dir_fd: int, name: bytes) -> Attributes | None:
        """The attributes of a name; None if nothing has it: an exception would cost as much as the look."""
        if _statx(dir_fd, name, self._by_name, WANTED, self._statx) < 0:
            if ctypes.get_errno() == errno.ENOENT:
                return None
            raise syscalls.failure(name)
        return self.seen()

    def peek(self, fd: int) -> tuple[Attributes, bytes]:
        """Attributes and file handle of what an fd holds."""
        if _statx(fd, b"", self._by_fd, WANTED, self._statx) < 0:
            raise syscalls.failure()
        return self.seen(), self.handle_of(fd, b"", syscalls.AT_EMPTY_PATH)

    def peek_name(self, dir_fd: int, name: bytes) -> tuple[Attributes, bytes]:
        """Attributes and file handle of a name in a directory: both of one inode, whatever is renamed meanwhile."""
        fd = os.open(name, TO_PEEK, dir_fd=dir_fd)
        try:
            return self.peek(fd)
        finally:
            _close(fd)  # opened as a path alone: nothing has to wait

    def seen(self) -> Attributes:
        """What the kernel has told."""
        (
            mask, blksize, nlink, uid, gid, mode, ino, size, blocks, atime_s, atime_ns, btime_s, btime_ns,
            ctime_s, ctime_ns, mtime_s, mtime_ns, rdev, dev,
        ) = _unpacked(self._statx)  # fmt: skip
        # Attributes' own constructor takes twice as long.
        return tuple.__new__(Attributes, (
            _device_number(dev), ino, mode, nlink, uid, gid, rdev and _device_number(rdev), size, blocks, blksize,
            atime_s * _NANO + atime_ns, mtime_s * _NANO + mtime_ns, ctime_s * _NANO + ctime_ns,
            btime_s * _NANO + btime_ns if mask & _BTIME else 0,
        ))  # fmt: skip

    def handle_of(self, dir_fd: int, name: bytes, flags: int = 0) -> bytes:
        """The file handle of what was looked at just now, which the kernel has cached; empty where there are none."""
        handle = self._handle
        _HANDLE_HEAD.pack_into(handle, 0, _MAX_HANDLE_SZ, 0)
        if _name_to_handle(dir_fd, name, handle, self._mount_id, flags) < 0:
            return syscalls.no_handle(name)
        return handle.raw[: _HANDLE_HEAD.size + _handle_size(handle)[0]]


class StatxReaders(threading.local):
    """One for each thread that asks for it."""

    def __init__(self, *, asks: bool = True) -> None:
        """asks: as StatxReader's."""
        self.asks = asks
        self.looker = StatxReader(asks=asks)


_mine = StatxReaders()


def look_at(dir_fd: int, name: bytes = b"") -> Attributes:
    """The attributes of a name in a directory, or of what the fd itself holds; never through a link."""
    return _mine.looker.look(dir_fd, name)


def look_anew(fd: int) -> Attributes:
    """The attributes of what an fd holds as its server has them now, whatever is remembered of them here."""
    return _mine.looker.ask(fd)


def peek_at(fd: int) -> tuple[Attributes, bytes]:
    """Attributes and file handle of what an fd holds."""
    return _mine.looker.peek(fd)


def open_handle(mount_fd: int, handle: bytes, flags: int) -> Fd:
    """An fd for what a handle names, wherever it is now.

    mount_fd  any fd on that mount
    Raises    OSError: ESTALE if it is gone, EPERM without CAP_DAC_READ_SEARCH
    Source    fs/inode.c: iget_locked gives nothing, which is then ENOMEM, while a new file is getting the inode number
    """
    try:
        return Fd(syscalls.open_by_handle_at(mount_fd, handle, flags | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error
        raise
