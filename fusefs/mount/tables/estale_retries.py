"""Processes that were told ESTALE for a name: what they find by it next is held until they have done what they wanted.

Between a look at a name and the open of what has it, it may be unlinked. On other filesystems it is opened all
the same: a looked-up inode is held. We hold no file that is not open, as its space would not come back, and
say ESTALE. The kernel then looks again and opens again, once; the second time it returns ESTALE, which no program
expects. So it is with a change of its mode, a link's target, and all else.

And processes that have moved something into a drop folder, where it has no name any more: mv(1) of several things looks
at each when it has moved it. So they find it there once more.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

import trio

from fusefs.core.metadata_cache import SourceKey
from fusefs.linux.fd import Fd
from fusefs.linux.statx import TO_PEEK
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.tables_lock import TablesLock

_N_MAX = 64
_LAST_S = 1.0
"""The kernel tries again at once, and is done, or a daemon that is so slow has other troubles."""

_MOVED_S = 2.0
"""mv looks at once, but the machine may be busy."""


class _Held(NamedTuple):
    """What is held for a process, and since when.

    node, fd  what it has found, by an O_PATH fd; None: nothing yet. What it has moved may have no node
    place     where it finds what it has moved once more; None: it has
    """

    since_s: float
    node: Node | None = None
    fd: Fd | None = None
    place: tuple[Node, bytes] | None = None


class EstaleRetries:
    """Threads of clients, by their numbers, and what is held for each. Touched as the tables are."""

    def __init__(self, lock: TablesLock, nodes: Tables) -> None:
        """Begin with none."""
        self._lock = lock
        self._nodes = nodes
        self._retries: dict[int, _Held] = {}
        """Those told so longest ago come first."""
        self._moved: dict[int, _Held] = {}
        self._token: trio.lowlevel.TrioToken | None = None
        self._has_any = trio.Event()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._retries) + len(self._moved)

    def __contains__(self, pid: int) -> bool:
        """Whether a process is one."""
        return pid in self._retries

    def add(self, pid: int) -> None:
        """A process is told ESTALE. The one told so longest ago makes room: it has long tried again. By any thread."""
        self._put(pid)
        self._notify()
        while len(self._retries) > _N_MAX:
            self.remove(next(iter(self._retries)))

    def _notify(self) -> None:
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._see_one)

    def moved(self, pid: int, place: tuple[Node, bytes], source: SourceKey, fd: Fd) -> None:
        """A process has moved something to where it has no name. fd: of it, O_PATH, which is ours from now on"""
        self._leave(pid)
        node = self._nodes.find(source)
        self._moved[pid] = _Held(time.monotonic(), node, fd, place)
        self._keep(node)
        self._notify()
        while len(self._moved) > _N_MAX:
            self._leave(next(iter(self._moved)))

    def moved_to(self, pid: int, place: tuple[Node, bytes]) -> Fd | None:
        """An O_PATH fd of what a process has moved there, the caller's own, if it asks for the first time."""
        moved = self._moved.get(pid)
        if moved is None or moved.fd is None or moved.place != place:
            return None
        self._moved[pid] = moved._replace(place=None)
        return Fd(os.dup(moved.fd))

    def _leave(self, pid: int) -> None:
        self._close(self._moved.pop(pid, None))

    def _put(self, pid: int, node: Node | None = None, fd: Fd | None = None) -> None:
        before = self._retries.pop(pid, None)
        self._retries[pid] = _Held(time.monotonic(), node, fd)
        self._nodes.retry(pid, True)
        self._keep(node)
        self._close(before)

    def _keep(self, node: Node | None) -> None:
        """Have a node reached by what is held of it, if anything is."""
        if node is not None:
            held = (one.fd for one in (*self._retries.values(), *self._moved.values()) if one.node is node)
            self._nodes.keep_fd(node, next((fd for fd in held if fd is not None), -1))

    def remove(self, pid: int) -> None:
        """A process has what it wanted."""
        self._nodes.retry(pid, False)
        self._close(self._retries.pop(pid, None))

    def _close(self, held: _Held | None) -> None:
        if held is not None and held.fd is not None:
            self._keep(held.node)
            self._lock.call(held.fd.close)

    async def expire(self) -> None:
        """Those that have long tried again do so no more: nobody says when they have what they wanted. Until cancelled.

        No request need come for that: what is held keeps a filesystem that is mounted inside from being unmounted.

        Checkpoint  while there is none, and for as long as one lasts
        """
        self._token = trio.lowlevel.current_trio_token()
        while True:
            if not self:
                await self._has_any.wait()
            self._has_any = trio.Event()
            await trio.sleep(_LAST_S)
            with self._lock:
                end_s = time.monotonic() - _LAST_S
                while self._retries and self._retries[pid := next(iter(self._retries))].since_s <= end_s:
                    self.remove(pid)
                end_s = time.monotonic() - _MOVED_S
                while self._moved and self._moved[pid := next(iter(self._moved))].since_s <= end_s:
                    self._leave(pid)

    def _see_one(self) -> None:
        self._has_any.set()

    def drop(self, node: Node) -> None:
        """A node has ended. Its client has not found another yet: the kernel looks twice before it opens anything, and
        lets go of what it finds first."""
        for pid, held in list(self._retries.items()):
            if held.node is node:
                self._retries[pid] = _Held(held.since_s)
                self._close(held)

    def close(self) -> None:
        """Let all go."""
        for pid in list(self._retries):
            self.remove(pid)
        for pid in list(self._moved):
            self._leave(pid)

    def open(self, pid: int, dir_fd: Fd, name: bytes) -> Fd | None:
        """An O_PATH fd of what has a name now, the caller's own; None: no such process.

        Raises  OSError ENOENT: nothing has it. That is the answer: what a second look finds would not be held
        """
        if pid not in self._retries:
            return None
        return Fd(self._lock.call(os.open, name, TO_PEEK, dir_fd=dir_fd))

    def hold(self, pid: int, node: Node, fd: Fd) -> None:
        """Hold a node that a process has found, by an O_PATH fd of it, which is ours from now on."""
        self._put(pid, node, fd)
