"""Reads an inode's attributes with statx(2), including its birth time, and its file handle, a lasting name for it."""

from __future__ import annotations

import ctypes
import os
import struct
import threading

from fusefs.core.metadata_cache import Attributes
from fusefs.linux import syscalls
from fusefs.linux.fd import Fd

_statx = syscalls.statx_function
_name_to_handle = syscalls.name_to_handle_at_with_gil

_unpacked = syscalls.statx_fields(
    "mask", "blksize", "nlink", "uid", "gid", "mode", "ino", "size", "blocks", "atime_s", "atime_ns", "btime_s",
    "btime_ns", "ctime_s", "ctime_ns", "mtime_s", "mtime_ns", "rdev", "dev",
).unpack_from  # fmt: skip
_BTIME = syscalls.STATX_BTIME
_device_number = syscalls.device_number
_STATX_MASK = syscalls.STATX_BASIC_STATS | _BTIME
_BY_NAME_OR_FD = syscalls.AT_SYMLINK_NOFOLLOW | syscalls.AT_EMPTY_PATH
_HANDLE_HEAD, _MAX_HANDLE_SZ = syscalls.HANDLE_HEAD, syscalls.MAX_HANDLE_SZ
_handle_size = struct.Struct("=I").unpack_from
_NANO = 1_000_000_000
OPEN_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class _StatxReader(threading.local):
    """Calls statx again and again with the same buffers; each thread has its own."""

    def __init__(self) -> None:
        self._statx = ctypes.create_string_buffer(syscalls.STATX_SIZE)
        self._handle = ctypes.create_string_buffer(_HANDLE_HEAD.size + _MAX_HANDLE_SZ)
        self._mount_id = ctypes.byref(ctypes.c_int())

    def stat(self, fd: int, name: bytes, flags: int = 0) -> Attributes:
        statx = self._statx
        if _statx(fd, name, _BY_NAME_OR_FD | flags, _STATX_MASK, statx) < 0:
            raise syscalls.last_error(name)
        (
            mask, blksize, nlink, uid, gid, mode, ino, size, blocks, atime_s, atime_ns, btime_s, btime_ns,
            ctime_s, ctime_ns, mtime_s, mtime_ns, rdev, dev,
        ) = _unpacked(statx)  # fmt: skip
        # The constructor of Attributes takes twice as long.
        return tuple.__new__(Attributes, (
            _device_number(dev), ino, mode, nlink, uid, gid, rdev and _device_number(rdev), size, blocks, blksize,
            atime_s * _NANO + atime_ns, mtime_s * _NANO + mtime_ns, ctime_s * _NANO + ctime_ns,
            btime_s * _NANO + btime_ns if mask & _BTIME else 0,
        ))  # fmt: skip

    def handle_of(self, fd: int) -> bytes:
        handle = self._handle
        _HANDLE_HEAD.pack_into(handle, 0, _MAX_HANDLE_SZ, 0)
        if _name_to_handle(fd, b"", handle, self._mount_id, syscalls.AT_EMPTY_PATH) < 0:
            return syscalls.empty_handle_or_raise(b"")
        return handle.raw[: _HANDLE_HEAD.size + _handle_size(handle)[0]]


_reader = _StatxReader()


def stat_at(dir_fd: int, name: bytes = b"") -> Attributes:
    """Return the attributes of a name in a directory, or of the fd itself; never follow a link."""
    return _reader.stat(dir_fd, name)


def stat_from_server(fd: int) -> Attributes:
    """Return the attributes of an fd as its server has them now, whatever is cached here."""
    return _reader.stat(fd, b"", syscalls.AT_STATX_FORCE_SYNC)


def identify_fd(fd: int) -> tuple[Attributes, bytes]:
    """Return the attributes and the file handle of an fd (b"" if it has none)."""
    return _reader.stat(fd, b""), _reader.handle_of(fd)


def open_handle(mount_fd: int, handle: bytes, flags: int) -> Fd:
    """Open the inode of a file handle, wherever it is now.

    mount_fd  any fd on the same mount
    Raises    OSError: ESTALE if the inode is gone, EPERM without CAP_DAC_READ_SEARCH
    """
    return Fd(syscalls.open_by_handle_at(mount_fd, handle, flags | os.O_CLOEXEC))
