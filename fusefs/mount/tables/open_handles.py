"""What clients have open: a handle is the number of the daemon's own fd, or of none if that may not be needed."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from fusefs.linux.fd import Fd
from fusefs.mount.native._core import Node, Tables

FOR_EXECUTION = 0x20
"""Of the flags of OPEN: the file is a program, and its handle stays for as long as it runs.

Source  include/linux/fs.h, __FMODE_EXEC
"""
_SPARE_FDS, _SPARE_FDS_MAX = 64, 2048
"""For the daemon's own needs, and those that operations hold for a moment: many, where many wait."""
LEAST_DIRECTORIES = 16


def n_handles(max_fds: int) -> int:
    """How many handles clients of a process that may have so many fds share."""
    return n_for_clients(max_fds) - LEAST_DIRECTORIES


def n_spare(max_fds: int) -> int:
    """How many fds of a process that may have so many are the daemon's own."""
    return max(_SPARE_FDS, min(max_fds // 4, _SPARE_FDS_MAX))


def n_for_clients(max_fds: int) -> int:
    """How many it can have open for clients."""
    return max(max_fds - n_spare(max_fds), 2 * LEAST_DIRECTORIES)


class OpenHandles:
    """Open files, by handle."""

    def __init__(self, nodes: Tables) -> None:
        self._nodes = nodes

    def __len__(self) -> int:
        """How many are open."""
        return self._nodes.n_handles

    def opened(self, fh: int) -> tuple[Node, Fd]:
        """Whose handle it is, and its fd."""
        return self._nodes.handle(fh)


def write_anywhere(fd: Fd) -> None:
    """An fd that was opened to append: not all that is written by its handle is. A file that may only grow keeps it."""
    with suppress(PermissionError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_APPEND)
