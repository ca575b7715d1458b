"""Retries after ESTALE: the inode that a process finds in its second lookup is held open until the process is done.

Between the lookup of a name and the open, the inode may be unlinked. Other filesystems open it anyway, since a lookup
holds the inode. The daemon holds only files that are open, since otherwise the space of deleted files could not
be freed. So it replies ESTALE. The kernel then repeats the lookup and the open once. If it gets ESTALE again, it
returns ESTALE to the program, which does not expect it. The same applies to chmod, readlink and all other calls.

Inodes are also held for processes that have moved an entry into a drop directory, where it does not keep its name. If
mv(1) moves several entries, it stats each one after the move. So one lookup by that process still finds the entry
there.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

import trio

from fusefs.core.metadata_cache import SourceKey
from fusefs.linux.fd import Fd
from fusefs.linux.statx import OPEN_FLAGS
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.tables_lock import TablesLock

_N_MAX = 64
_RETRY_S = 1.0
"""How long an inode is held. The kernel retries at once; a machine where that takes longer has bigger problems."""

_MOVED_S = 2.0
"""How long a moved inode is held. mv(1) stats it at once, but the machine may be busy."""


class _Held(NamedTuple):
    """An inode that is held for a process, and the time when that began.

    node, fd  the inode, and an O_PATH fd of it; None: the process has found none yet. A moved inode may have no node
    place     the directory and name where a moved inode can still be found once; None: it was found
    """

    since_s: float
    node: Node | None = None
    fd: Fd | None = None
    place: tuple[Node, bytes] | None = None


class EstaleRetries:
    """The threads of clients, by id, and the inode held for each. Callers must hold the tables lock."""

    def __init__(self, lock: TablesLock, nodes: Tables) -> None:
        self._lock = lock
        self._nodes = nodes
        self._retries: dict[int, _Held] = {}
        """The oldest come first."""
        self._moved: dict[int, _Held] = {}
        self._token: trio.lowlevel.TrioToken | None = None
        self._has_any = trio.Event()

    def __len__(self) -> int:
        return len(self._retries) + len(self._moved)

    def __contains__(self, pid: int) -> bool:
        """Return whether a process got ESTALE recently."""
        return pid in self._retries

    def add_process(self, pid: int) -> None:
        """Record that a process got ESTALE. Any thread may call this. If there are too many processes, drop the oldest,
        which retried long ago."""
        self._set_held(pid)
        self._notify()
        while len(self._retries) > _N_MAX:
            self.remove_process(next(iter(self._retries)))

    def _notify(self) -> None:
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._set_has_any)

    def note_moved(self, pid: int, place: tuple[Node, bytes], source: SourceKey, fd: Fd) -> None:
        """Record that a process moved an inode to a place that does not keep its name. fd: the inode's; now ours"""
        self._drop_moved(pid)
        node = self._nodes.find(source)
        self._moved[pid] = _Held(time.monotonic(), node, fd, place)
        self._update_kept_fd(node)
        self._notify()
        while len(self._moved) > _N_MAX:
            self._drop_moved(next(iter(self._moved)))

    def take_moved_fd(self, pid: int, place: tuple[Node, bytes]) -> Fd | None:
        """Return, only once, a new O_PATH fd of the inode that a process moved to a place; None if there is none."""
        moved = self._moved.get(pid)
        if moved is None or moved.fd is None or moved.place != place:
            return None
        self._moved[pid] = moved._replace(place=None)
        return Fd(os.dup(moved.fd))

    def _drop_moved(self, pid: int) -> None:
        self._close(self._moved.pop(pid, None))

    def _set_held(self, pid: int, node: Node | None = None, fd: Fd | None = None) -> None:
        before = self._retries.pop(pid, None)
        self._retries[pid] = _Held(time.monotonic(), node, fd)
        self._nodes.set_retrying(pid, True)
        self._update_kept_fd(node)
        self._close(before)

    def _update_kept_fd(self, node: Node | None) -> None:
        """Make the tables reach a node through an fd that is held for a process, if there is one."""
        if node is not None:
            held = (one.fd for one in (*self._retries.values(), *self._moved.values()) if one.node is node)
            self._nodes.set_kept_fd(node, next((fd for fd in held if fd is not None), -1))

    def remove_process(self, pid: int) -> None:
        """Drop a process, and close the fd that is held for it."""
        self._nodes.set_retrying(pid, False)
        self._close(self._retries.pop(pid, None))

    def _close(self, held: _Held | None) -> None:
        if held is not None and held.fd is not None:
            self._update_kept_fd(held.node)
            self._lock.call(held.fd.close)

    async def expire_until_cancelled(self) -> None:
        """Until cancelled, drop processes that retried long ago, because nothing reports when they are done.

        This must not depend on later requests: an open fd prevents a filesystem mounted inside SRC from being
        unmounted.

        Checkpoint  while no inode is held, and between two checks of those that are
        """
        self._token = trio.lowlevel.current_trio_token()
        while True:
            if not self:
                await self._has_any.wait()
            self._has_any = trio.Event()
            await trio.sleep(_RETRY_S)
            with self._lock:
                end_s = time.monotonic() - _RETRY_S
                while self._retries and self._retries[pid := next(iter(self._retries))].since_s <= end_s:
                    self.remove_process(pid)
                end_s = time.monotonic() - _MOVED_S
                while self._moved and self._moved[pid := next(iter(self._moved))].since_s <= end_s:
                    self._drop_moved(pid)

    def _set_has_any(self) -> None:
        self._has_any.set()

    def release_node(self, node: Node) -> None:
        """Release a node that has ended, but keep its process in the table: the kernel looks up a name twice before it
        opens anything, and forgets the first result."""
        for pid, held in list(self._retries.items()):
            if held.node is node:
                self._retries[pid] = _Held(held.since_s)
                self._close(held)

    def close(self) -> None:
        for pid in list(self._retries):
            self.remove_process(pid)
        for pid in list(self._moved):
            self._drop_moved(pid)

    def open_name(self, pid: int, dir_fd: Fd, name: bytes) -> Fd | None:
        """Return a new O_PATH fd of the inode that a name refers to now; None if the process got no ESTALE.

        Raises  OSError ENOENT: no such name. Callers must not look it up again, since that inode would not be held
        """
        if pid not in self._retries:
            return None
        return Fd(self._lock.call(os.open, name, OPEN_FLAGS, dir_fd=dir_fd))

    def hold(self, pid: int, node: Node, fd: Fd) -> None:
        """Hold a node that a process has found. fd: an O_PATH fd of it, now owned by us"""
        self._set_held(pid, node, fd)
