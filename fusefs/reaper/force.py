"""Deleting what its flags protect: only for an administrator who asked for it by name."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from fusefs.core.slices import raw
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.likeness import thaw

_LOOKED_AT = os.O_PATH | os.O_NOFOLLOW


def unlink(kernel: Kernel, dir_fd: Fd, name: str) -> None:
    """Unlink a file, its own flags and its directory's taken off.

    Raises  OSError: EPERM for a file with other names too: they would lose its flags with this one
    """
    thaw(kernel, dir_fd)
    with kernel.open_beneath(dir_fd, raw(name), _LOOKED_AT) as seen:
        st = kernel.fstat(seen)
        # Only these have flags; to open a device or a FIFO would act on it.
        if stat.S_ISREG(st.st_mode) and st.st_nlink == 1:
            with kernel.reopen(seen, os.O_RDONLY | os.O_NONBLOCK) as fd:
                thaw(kernel, fd)
    kernel.unlink(dir_fd, raw(name))


def free(kernel: Kernel, *directories: Fd) -> bool:
    """Take the flags off directories; whether any had some."""
    found = False
    for fd in directories:
        with suppress(OSError):
            found |= thaw(kernel, fd)
    return found
