"""Directories one in the other, gone through by fds, and how long the paths are that are opened on the way."""

import os
from pathlib import Path

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel


def make_chain(top: Path, n: int) -> None:
    """So many directories, each in the one before, as `mkdir d; cd d` does it."""
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(n - 1):
        os.mkdir("d", dir_fd=fd)
        fd = _below(fd)
    os.close(fd)


def _below(fd: int) -> int:
    """The next level, in place of this one."""
    deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
    os.close(fd)
    return deeper


def walk_chain(top: Path) -> int:
    """How many levels a process finds that lists and looks at all, as find does."""
    fd, n = os.open(top, os.O_RDONLY), 1
    while os.listdir(fd):
        os.stat("d", dir_fd=fd)
        fd, n = _below(fd), n + 1
    os.close(fd)
    return n


class CountedPathBytes(Kernel):
    """`n_bytes` is their sum."""

    n_bytes = 0

    def open_beneath(self, dir_fd: int, path: bytes, flags: int = os.O_PATH | os.O_NOFOLLOW) -> Fd:
        """See Kernel; a path that goes in chunks is counted twice."""
        self.n_bytes += len(path)
        return super().open_beneath(dir_fd, path, flags)
