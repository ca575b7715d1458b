"""Directories one in the other, gone through by fds: no path leads to the end of a long chain."""

from __future__ import annotations

import os
from pathlib import Path


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
