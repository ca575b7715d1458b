"""Many entries of one directory at a time; each call passes the gate, and what one refuses holds up no other."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import NamedTuple

from fusefs.linux import dirents, libc
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel, Refused

_BENEATH = libc.RESOLVE_BENEATH | libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_XDEV


class Looked(NamedTuple):
    """What a name was a moment ago.

    btime_ns  0 unless it was asked for, and where there is none
    """

    name: str
    stat: os.stat_result
    btime_ns: int


def read_on(kernel: Kernel, fd: int) -> dirents.Block | None:
    """Some entries of a directory from where its fd is; None at the end."""
    kernel.reach("getdents")
    return dirents.read_on(fd)


def look_at_all(
    kernel: Kernel, dir_fd: int, names: Iterable[str], *, with_btime: bool = False
) -> tuple[list[Looked], Refused]:
    """lstat of each name, but never of what is mounted there (EXDEV): see `Kernel.stat`."""
    looked: list[Looked] = []
    refused: Refused = []
    for name in names:
        try:
            kernel.reach("stat")
            with Fd(libc.openat2(dir_fd, os.fsencode(name), os.O_PATH | os.O_NOFOLLOW, _BENEATH)) as fd:
                looked.append(Looked(name, os.fstat(fd), libc.statx(fd).btime_ns if with_btime else 0))
        except OSError as error:
            refused.append((name, error.errno or errno.EIO))
    return looked, refused


def rmdir_all(kernel: Kernel, dir_fd: int, names: Iterable[str]) -> Refused:
    """rmdir of each name."""
    refused: Refused = []
    for name in names:
        try:
            kernel.reach("rmdir")
            os.rmdir(name, dir_fd=dir_fd)
        except OSError as error:
            refused.append((name, error.errno or errno.EIO))
    return refused
