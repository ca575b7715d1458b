"""All that statx(2) tells of an inode, birth time included, in one call; and the file handle that names it for good."""

from __future__ import annotations

import ctypes
import os
import struct

from fusefs.core.attributes import Attributes
from fusefs.linux import libc
from fusefs.linux.fd import Fd

_libc = ctypes.CDLL(None, use_errno=True)
_STATX = struct.Struct("=IIQIIIHxxQQQQqIxxxxqIxxxxqIxxxxqIxxxxIIII")
_STATX_SIZE = 256
_WANTED = 0x7FF | 0x800  # the basic stats, and the birth time
_FLAGS = libc.AT_SYMLINK_NOFOLLOW
_NANO = 1_000_000_000
_TIMES = struct.Struct("=qqqq")
_UTIME_OMIT = (1 << 30) - 2


def look_at(dir_fd: int, name: bytes = b"") -> Attributes:
    """The attributes of a name in a directory, or of what the fd itself holds; never through a link."""
    buffer = ctypes.create_string_buffer(_STATX_SIZE)
    flags = _FLAGS if name else _FLAGS | libc.AT_EMPTY_PATH
    libc.checked(_libc.statx(dir_fd, name, flags, _WANTED, buffer), name)
    (
        _mask, blksize, _attributes, nlink, uid, gid, mode, ino, size, blocks, _attributes_mask,
        atime_s, atime_ns, btime_s, btime_ns, ctime_s, ctime_ns, mtime_s, mtime_ns,
        rdev_major, rdev_minor, dev_major, dev_minor,
    ) = _STATX.unpack_from(buffer)  # fmt: skip
    return Attributes(
        os.makedev(dev_major, dev_minor), ino, mode, nlink, uid, gid, os.makedev(rdev_major, rdev_minor), size, blocks,
        blksize, atime_s * _NANO + atime_ns, mtime_s * _NANO + mtime_ns, ctime_s * _NANO + ctime_ns,
        btime_s * _NANO + btime_ns,
    )  # fmt: skip


def set_times(fd: int, atime_ns: int | None, mtime_ns: int | None) -> None:
    """Set the times of what an fd of any kind holds; None leaves one as it is."""
    times = _TIMES.pack(*_timespec(atime_ns), *_timespec(mtime_ns))
    libc.checked(_libc.utimensat(libc.AT_FDCWD, b"/proc/self/fd/%d" % fd, times, 0))


def _timespec(ns: int | None) -> tuple[int, int]:
    return (0, _UTIME_OMIT) if ns is None else divmod(ns, _NANO)


def open_handle(mount_fd: int, handle: bytes, flags: int) -> Fd:
    """An fd for what a handle names, wherever it is now.

    mount_fd  any fd on that mount
    Raises    OSError: ESTALE if it is gone, EPERM without CAP_DAC_READ_SEARCH
    """
    return Fd(libc.checked(_libc.open_by_handle_at(mount_fd, handle, flags | os.O_CLOEXEC)))
