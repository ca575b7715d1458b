"""Processes that were told ESTALE for a name: the file that they find by it next is held until they have opened it.

Between a look at a name and the open of what has it, it may be unlinked. On other filesystems it is opened all
the same: a looked-up inode is held. We hold no file that is not open, as its space would not come back, and
say ESTALE. The kernel then looks again and opens again, once; the second time it returns ESTALE, which no program
expects.
"""

from __future__ import annotations

import os

from fusefs.core.inode_table import Node
from fusefs.linux.fd import Fd
from fusefs.linux.statx import TO_PEEK
from fusefs.mount.tables.tables_lock import TablesLock

_N_MAX = 64


class EstaleRetries:
    """Threads of clients, by their numbers, and what is held for each. Touched as the tables are."""

    def __init__(self, lock: TablesLock) -> None:
        """Begin with none."""
        self._lock = lock
        self._held: dict[int, tuple[Node, Fd] | None] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._held)

    def __contains__(self, pid: int) -> bool:
        """Whether a process is one."""
        return pid in self._held

    def add(self, pid: int) -> None:
        """A process is told ESTALE. The one told so longest ago makes room: it has long tried again."""
        self.remove(pid)
        self._held[pid] = None
        while len(self._held) > _N_MAX:
            self.remove(next(iter(self._held)))

    def remove(self, pid: int) -> None:
        """A process has what it wanted."""
        held = self._held.pop(pid, None)
        if held is not None:
            self._lock.call(held[1].close)

    def drop(self, node: Node) -> None:
        """A node has ended. Its client has not found another yet: the kernel looks twice before it opens anything, and
        lets go of what it finds first."""
        for pid, held in list(self._held.items()):
            if held is not None and held[0] is node:
                self._held[pid] = None
                self._lock.call(held[1].close)

    def close(self) -> None:
        """Let all go."""
        for pid in list(self._held):
            self.remove(pid)

    def fd_of(self, node: Node) -> Fd | None:
        """An O_PATH fd of a node that is held for one of them; it stays ours."""
        return next((held[1] for held in self._held.values() if held is not None and held[0] is node), None)

    def open(self, pid: int, dir_fd: Fd, name: bytes) -> Fd | None:
        """An O_PATH fd of what has a name now, the caller's own; None: no such process, or it is not there."""
        if pid not in self._held:
            return None
        self._lock.look_by(name)
        try:
            return Fd(self._lock.call(os.open, name, TO_PEEK, dir_fd=dir_fd))
        except OSError:
            return None  # the usual lookup tells why

    def hold(self, pid: int, node: Node, fd: Fd) -> None:
        """Hold a node that a process has found, by an O_PATH fd of it, which is ours from now on."""
        self._held[pid] = node, fd
