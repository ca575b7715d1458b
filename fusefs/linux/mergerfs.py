"""What mergerfs tells of its branches, which no look at the mount shows: between which of them a rename works.

Source  mergerfs 2.33, src/fuse_rename.cpp and the chapter on extended attributes of its README
"""

from __future__ import annotations

import errno
import os

from fusefs.linux.fd import Fd
from fusefs.linux.xattrs import get_of

_CONTROL = b".mergerfs"
_KEEPS_PATHS = (b"ep", b"msp")


def branches_with(fd: Fd) -> frozenset[bytes]:
    """The branches that have what an fd holds; none where that is not told."""
    paths, below = _told(fd, b"allpaths"), _told(fd, b"relpath")
    return frozenset(path.removesuffix(below) for path in paths.split(b"\0") if path)


def check_rename(root: Fd, source: Fd, directory: Fd) -> None:
    """Ask whether the policies have a rename of one directory into another one, which is on other branches, perhaps.

    root    of the mount, for what holds for all of it; without it nothing is known
    Raises  OSError: EXDEV, EROFS
    """
    here, there = branches_with(source), branches_with(directory)
    try:
        control = Fd(os.open(_CONTROL, os.O_PATH, dir_fd=root))
    except OSError:
        return
    with control:
        modes = dict(branch.rpartition(b"=")[::2] for branch in _told(control, b"branches").split(b":"))
        creates, ignores = _told(control, b"func.create"), _told(control, b"ignorepponrename")
    if here and all(modes.get(branch, b"").startswith(b"RO") for branch in here):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if creates.startswith(_KEEPS_PATHS) and ignores != b"true" and not here <= there:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def _told(fd: Fd, name: bytes) -> bytes:
    value = get_of(fd, b"user.mergerfs." + name)
    return b"" if isinstance(value, int) else value
