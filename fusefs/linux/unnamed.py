"""Files that get their first name when they are complete, where these are seen to last."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.libc import NO_TMPFILE

_NO_LINK = NO_TMPFILE | {errno.ENOENT, errno.EPERM, errno.EXDEV, errno.EMLINK}
_CONTENT = b"trashd\n"


def keeps_unnamed(kernel: Kernel, dir_fd: Fd, name: bytes) -> bool:
    """Whether a file made without a name is still there, whole, when it got one and was closed: tried to the end.

    JuiceFS says that it linked one, shows it for as long as it is open, and then has none.
    name    for the trial; what a killed one left there is removed
    Raises  OSError: what says nothing about such files, as ENOSPC
    """
    _drop(kernel, dir_fd, name)
    try:
        with kernel.create_unnamed(dir_fd) as fd:
            kernel.write(fd, _CONTENT)
            kernel.link_unnamed(fd, dir_fd, name)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    try:
        with kernel.open_beneath(dir_fd, name, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            return kernel.fstat(fd).st_nlink == 1 and kernel.read(fd, len(_CONTENT) + 1) == _CONTENT
    except FileNotFoundError:
        return False
    finally:
        _drop(kernel, dir_fd, name)


def _drop(kernel: Kernel, dir_fd: Fd, name: bytes) -> None:
    with suppress(FileNotFoundError):
        kernel.unlink(dir_fd, name)
