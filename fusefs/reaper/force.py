"""Deleting what its flags protect: only for an administrator who asked for it by name."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from fusefs.core.slices import raw
from fusefs.linux import inode_flags
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

_LOOKED_AT = os.O_PATH | os.O_NOFOLLOW


def unlink(kernel: Kernel, dir_fd: Fd, name: str) -> None:
    """Unlink a file, its own flags and its directory's taken off; another link of it gets its flags back.

    Raises  OSError
    """
    inode_flags.take_off(kernel, dir_fd)
    with kernel.open_beneath(dir_fd, raw(name), _LOOKED_AT) as seen:
        if not stat.S_ISREG(kernel.fstat(seen).st_mode):
            kernel.unlink(dir_fd, raw(name))  # opening a device or a FIFO would act on it; they have no flags
            return
        with kernel.reopen(seen, os.O_RDONLY) as fd:
            flags = inode_flags.take_off(kernel, fd)
            try:
                kernel.unlink(dir_fd, raw(name))
            finally:
                if flags and kernel.fstat(fd).st_nlink:
                    inode_flags.put(kernel, fd, flags)


def free(kernel: Kernel, *directories: Fd) -> bool:
    """Take the flags off directories; whether any had some."""
    found = False
    for fd in directories:
        with suppress(OSError):
            found |= inode_flags.take_off(kernel, fd) != 0
    return found
