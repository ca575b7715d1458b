"""Reads an inode's attributes with statx(2), including its birth time, and its file handle, a lasting name for it.

A listing needs this for each entry, so tens of nanoseconds matter.
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

_statx = syscalls.statx_function
_name_to_handle = syscalls.name_to_handle_at_with_gil
_close = syscalls.close_with_gil

_unpacked = syscalls.statx_fields(
    "mask", "blksize", "nlink", "uid", "gid", "mode", "ino", "size", "blocks", "atime_s", "atime_ns", "btime_s",
    "btime_ns", "ctime_s", "ctime_ns", "mtime_s", "mtime_ns", "rdev", "dev",
).unpack_from  # fmt: skip
_BTIME = syscalls.STATX_BTIME
_device_number = syscalls.device_number
STATX_MASK = syscalls.STATX_BASIC_STATS | _BTIME
BY_NAME = syscalls.AT_SYMLINK_NOFOLLOW
BY_FD = syscalls.AT_SYMLINK_NOFOLLOW | syscalls.AT_EMPTY_PATH
_HANDLE_HEAD, _MAX_HANDLE_SZ = syscalls.HANDLE_HEAD, syscalls.MAX_HANDLE_SZ
_handle_size = struct.Struct("=I").unpack_from
_NANO = 1_000_000_000
OPEN_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class StatxReader:
    """Calls statx for one name after another with the same buffers. For one thread only."""

    def __init__(self, *, asks_server: bool = True) -> None:
        """asks_server: if necessary, ask another machine or daemon; otherwise return what the kernel knows"""
        sync = 0 if asks_server else syscalls.AT_STATX_DONT_SYNC
        self._by_name, self._by_fd = BY_NAME | sync, BY_FD | sync
        self._statx = ctypes.create_string_buffer(syscalls.STATX_SIZE)
        self._handle = ctypes.create_string_buffer(_HANDLE_HEAD.size + _MAX_HANDLE_SZ)
        self._mount_id = ctypes.byref(ctypes.c_int())

    def stat(self, dir_fd: int, name: bytes = b"") -> Attributes:
        """Return the attributes of a name in a directory, or of the fd itself; never follow a link."""
        if _statx(dir_fd, name, self._by_name if name else self._by_fd, STATX_MASK, self._statx) < 0:
            raise syscalls.last_error(name)
        return self.parse_buffer()

    def identify(self, dir_fd: int, name: bytes) -> tuple[Attributes, bytes]:
        """Return the attributes of a name in a directory, and its file handle (b"" if there is none).

        This takes two calls. If the name is replaced in between, the results describe different inodes;
        `identify_opened` avoids that.
        """
        if _statx(dir_fd, name, self._by_name, STATX_MASK, self._statx) < 0:
            raise syscalls.last_error(name)
        return self.parse_buffer(), self.handle_of(dir_fd, name)

    def stat_from_server(self, fd: int) -> Attributes:
        if _statx(fd, b"", BY_FD | syscalls.AT_STATX_FORCE_SYNC, STATX_MASK, self._statx) < 0:
            raise syscalls.last_error()
        return self.parse_buffer()

    def stat_or_none(self, dir_fd: int, name: bytes) -> Attributes | None:
        """Return the attributes of a name; None if it does not exist, since an exception takes as long as the call."""
        if _statx(dir_fd, name, self._by_name, STATX_MASK, self._statx) < 0:
            if ctypes.get_errno() == errno.ENOENT:
                return None
            raise syscalls.last_error(name)
        return self.parse_buffer()

    def identify_fd(self, fd: int) -> tuple[Attributes, bytes]:
        if _statx(fd, b"", self._by_fd, STATX_MASK, self._statx) < 0:
            raise syscalls.last_error()
        return self.parse_buffer(), self.handle_of(fd, b"", syscalls.AT_EMPTY_PATH)

    def identify_opened(self, dir_fd: int, name: bytes) -> tuple[Attributes, bytes]:
        """Return the attributes and the file handle of a name, both of the same inode, even if the name is replaced."""
        fd = os.open(name, OPEN_FLAGS, dir_fd=dir_fd)
        try:
            return self.identify_fd(fd)
        finally:
            _close(fd)  # opened with O_PATH, so closing never waits

    def parse_buffer(self) -> Attributes:
        (
            mask, blksize, nlink, uid, gid, mode, ino, size, blocks, atime_s, atime_ns, btime_s, btime_ns,
            ctime_s, ctime_ns, mtime_s, mtime_ns, rdev, dev,
        ) = _unpacked(self._statx)  # fmt: skip
        # The constructor of Attributes takes twice as long.
        return tuple.__new__(Attributes, (
            _device_number(dev), ino, mode, nlink, uid, gid, rdev and _device_number(rdev), size, blocks, blksize,
            atime_s * _NANO + atime_ns, mtime_s * _NANO + mtime_ns, ctime_s * _NANO + ctime_ns,
            btime_s * _NANO + btime_ns if mask & _BTIME else 0,
        ))  # fmt: skip

    def handle_of(self, dir_fd: int, name: bytes, flags: int = 0) -> bytes:
        """Return an inode's file handle; b"" if it has none. Call this just after statx, while that is cached."""
        handle = self._handle
        _HANDLE_HEAD.pack_into(handle, 0, _MAX_HANDLE_SZ, 0)
        if _name_to_handle(dir_fd, name, handle, self._mount_id, flags) < 0:
            return syscalls.empty_handle_or_raise(name)
        return handle.raw[: _HANDLE_HEAD.size + _handle_size(handle)[0]]


class StatxReaders(threading.local):
    """A separate StatxReader for each thread."""

    def __init__(self, *, asks_server: bool = True) -> None:
        self.asks_server = asks_server
        self.reader = StatxReader(asks_server=asks_server)


_readers = StatxReaders()


def stat_at(dir_fd: int, name: bytes = b"") -> Attributes:
    """Return the attributes of a name in a directory, or of the fd itself; never follow a link."""
    return _readers.reader.stat(dir_fd, name)


def stat_from_server(fd: int) -> Attributes:
    """Return the attributes of an fd as its server has them now, whatever is cached here."""
    return _readers.reader.stat_from_server(fd)


def identify_fd(fd: int) -> tuple[Attributes, bytes]:
    """Return the attributes and the file handle of an fd."""
    return _readers.reader.identify_fd(fd)


def open_handle(mount_fd: int, handle: bytes, flags: int) -> Fd:
    """Open the inode of a file handle, wherever it is now.

    mount_fd  any fd on the same mount
    Raises    OSError: ESTALE if the inode is gone, EPERM without CAP_DAC_READ_SEARCH
    """
    return Fd(syscalls.open_by_handle_at(mount_fd, handle, flags | os.O_CLOEXEC))
