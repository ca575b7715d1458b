"""The switch that ends a FUSE connection, whoever waits for it or in it."""

from __future__ import annotations

import os

from fusefs.linux.fd import Fd
from fusefs.linux.mounting import new_mount


def open_abort(connection: int) -> Fd:
    """An fd to `abort` with; afterwards, and when the connection is gone, that does nothing.

    connection  its number: the mount's minor device number
    Raises      OSError: EPERM without CAP_SYS_ADMIN, ENOENT if there is none of that number
    Source      Documentation/filesystems/fuse.rst; mounted for ourselves, as /sys/fs/fuse/connections may be empty
    """
    with new_mount(b"fusectl", b"fusectl", {}, 0) as mount:
        return Fd(os.open(b"%d/abort" % connection, os.O_WRONLY | os.O_CLOEXEC, dir_fd=mount))


def abort(fd: int) -> None:
    """Answer every request, waiting or to come, with an error."""
    os.write(fd, b"1")
