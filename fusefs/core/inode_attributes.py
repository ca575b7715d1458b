"""The attributes of one inode at one moment, as statx(2) has them."""

from __future__ import annotations

import stat
from typing import NamedTuple

_S_IFMT = 0o170000


class Attributes(NamedTuple):
    """The fields of statx(2) that a filesystem answers with; btime_ns is 0 where no birth time is kept."""

    dev: int
    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    blksize: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    btime_ns: int

    def gives_rights(self) -> bool:
        """Whether it is a program that runs as its owner, or in its group, for every user."""
        is_set = self.mode & stat.S_ISUID or (self.mode & stat.S_ISGID and self.mode & stat.S_IXGRP)
        return bool(is_set) and self.mode & _S_IFMT == stat.S_IFREG

    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return self.mode & _S_IFMT == stat.S_IFDIR
