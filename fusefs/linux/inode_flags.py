"""Inode flags that forbid to delete: immutable and append-only (chattr +i, +a)."""

from __future__ import annotations

import errno
import struct

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_FORBIDDING = 0x10 | 0x20
_FLAGS = struct.Struct("=I")
_NO_FLAGS = (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def take_off(kernel: Kernel, fd: Fd) -> int:
    """Take the forbidding flags off a file or directory that is open for reading; the flags that it had, 0 if none.

    Raises  OSError: EPERM without CAP_LINUX_IMMUTABLE
    """
    buffer = bytearray(8)
    try:
        kernel.ioctl(fd, _FS_IOC_GETFLAGS, buffer)
    except OSError as error:
        if error.errno in _NO_FLAGS:
            return 0
        raise
    flags: int = _FLAGS.unpack_from(buffer)[0]
    if not flags & _FORBIDDING:
        return 0
    put(kernel, fd, flags & ~_FORBIDDING)
    return flags


def put(kernel: Kernel, fd: Fd, flags: int) -> None:
    """Set all flags."""
    buffer = bytearray(8)
    _FLAGS.pack_into(buffer, 0, flags)
    kernel.ioctl(fd, _FS_IOC_SETFLAGS, buffer)
