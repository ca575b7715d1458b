"""The switch that ends a FUSE connection, whoever waits for it or in it."""

from __future__ import annotations

import ctypes
import os

from fusefs.linux.fd import Fd
from fusefs.linux.libc import checked

_NR_FSOPEN, _NR_FSCONFIG, _NR_FSMOUNT = 430, 431, 432  # one number on every architecture; Linux 5.2
_CLOEXEC = 1
_CMD_CREATE = 6

_libc = ctypes.CDLL(None, use_errno=True)


def open_abort(connection: int) -> Fd:
    """An fd to `abort` with; afterwards, and when the connection is gone, that does nothing.

    connection  its number: the mount's minor device number
    Raises      OSError: EPERM without CAP_SYS_ADMIN, ENOENT if there is none of that number
    Source      Documentation/filesystems/fuse.rst; mounted for ourselves, as /sys/fs/fuse/connections may be empty
    """
    with Fd(checked(_libc.syscall(_NR_FSOPEN, b"fusectl", _CLOEXEC))) as context:
        checked(_libc.syscall(_NR_FSCONFIG, int(context), _CMD_CREATE, None, None, 0))
        mount = Fd(checked(_libc.syscall(_NR_FSMOUNT, int(context), _CLOEXEC, 0)))
    with mount:
        return Fd(os.open(b"%d/abort" % connection, os.O_WRONLY | os.O_CLOEXEC, dir_fd=mount))


def abort(fd: int) -> None:
    """Answer every request, waiting or to come, with an error."""
    os.write(fd, b"1")
