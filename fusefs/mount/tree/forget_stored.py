"""Has the kernel forget nodes in trash stores bit by bit, before renames have to wait or space stays occupied.

The reaper deletes them behind the mount. As long as the kernel knows a directory, the daemon holds it open, so neither
its blocks nor its inode become free. When the next entry of the same name is to be moved into a drop folder, that name
is looked up again. The kernel then drops everything that it has cached below the first entry. That takes 5 µs per
inode, and the caller and all renames wait for it.

The notice waits for no lock that a client holds, and skips what is in use. So the daemon itself can send the notice,
without a helper process, and clients can stay in there; once they leave, their nodes are forgotten, too. The kernel
also skips a directory in which it has cached a missing name. If such a directory was removed meanwhile, the daemon
closes it and has the kernel forget its name with all below it. A kernel that does not know the first notice skips
everything.

Names in drop folders are expired, too. An entry that was moved there has no name any more, but the kernel assigns the
requested one. If the moved inode is in use, and so not forgotten, that name is expired instead. A thread that answers
no requests sends that notice, since it waits for the folder's lock (I10). It does so when no more entries are being
moved there: if the daemon is killed while it waits, it does not end, and its clients stay blocked.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial

import trio

from fusefs.core.metadata_cache import NodeId
from fusefs.linux.fuse_device import expire_name, forget_name, forget_unused
from fusefs.linux.statx import stat_at
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.kernel_timeouts import AttrTimeouts
from fusefs.mount.tree.trashd_dir import holds_trash

_log = logging.getLogger(__name__)

_MOVES_DELAY_S = 0.2
"""Delay from a move to the check of all nodes: more entries may be moved."""
_RECHECK_MAX_S = 10.0
"""Longest time between two checks of nodes that are in use."""
_REST_PER_WORK = 4
_N_PER_NOTICE = 128
"""About half a millisecond of work, for the kernel and for the daemon, which receives a FORGET for each node."""


class StoredNotices:
    """Nodes of one mount that lie in stores, were sent to the kernel since the last check, and are to be forgotten."""

    def __init__(self, lock: TablesLock, nodes: Tables, timeouts: AttrTimeouts) -> None:
        self._lock, self._nodes, self._timeouts = lock, nodes, timeouts
        self._wake: Callable[[], object] = lambda: None
        """Wakes `run`; may be called by any thread."""
        self._has_moved = False
        self._stored_nodes: dict[Node, None] = {}
        self._expiring_names: dict[tuple[NodeId, bytes], Node] = {}
        self._last_named_s = 0.0

    # Callers hold the tables lock.

    def note_stored(self, node: Node, is_moved: bool) -> None:
        """Note that a client was sent a node in a directory that holds trash, or moved it there with all below it."""
        if is_moved and node.is_directory:
            self._has_moved, self._nodes.is_trash_renewed = True, False
        self._stored_nodes[node] = None
        self._wake()

    def expire(self, directory: Node, name: bytes, node: Node) -> None:
        """Note that the kernel is about to assign this name to a node that has been moved to another place."""
        self._expiring_names[directory.nodeid, name] = node
        self._last_named_s = time.monotonic()
        self._wake()

    def _take_names(self) -> list[tuple[NodeId, bytes]]:
        """Take the noted names, with their directories, that the kernel may still have cached; none while more are
        added."""
        if time.monotonic() - self._last_named_s < _MOVES_DELAY_S:
            return []
        expiring_names, self._expiring_names = self._expiring_names, {}
        return [place for place, node in expiring_names.items() if self._nodes.get(node.nodeid) is node]

    def _take_nodes(self, remaining: Sequence[Node]) -> list[Node]:
        """Take the nodes that may lie in a store, the oldest first. remaining: remaining from the last time"""
        stored_nodes, self._stored_nodes = self._stored_nodes, {}
        has_moved, self._has_moved = self._has_moved, False
        return list(self._nodes) if has_moved else [*dict.fromkeys([*remaining, *stored_nodes])]

    # Callers do not hold it.

    async def forget_until_cancelled(self, device: int) -> None:
        """Have the kernel forget nodes that lie in stores, until cancelled.

        device      the connection's fd
        Checkpoint  between parts of the table, and until something is moved into a store or seen there
        """
        wake_sender, wake_receiver = trio.open_memory_channel[None](1)

        def wake() -> None:
            with suppress(trio.WouldBlock):
                wake_sender.send_nowait(None)

        token = trio.lowlevel.current_trio_token()
        self._wake = partial(token.run_sync_soon, wake, idempotent=True)
        remaining: list[Node] = []
        pause_s = _MOVES_DELAY_S
        notify_device: int | None = device
        while True:
            with trio.move_on_after(pause_s if remaining else math.inf) as waiting:
                await wake_receiver.receive()
                await trio.sleep(_MOVES_DELAY_S)
            with self._lock:
                nodes = self._take_nodes(remaining)
            n_before = len(remaining)
            try:
                remaining = await self._forget_all(notify_device, nodes, frozenset(remaining))
            except OSError as error:
                _log.info(
                    "entries of stores stay cached until memory is short, or until their names are used again: %s",
                    error.strerror,
                )
                notify_device, remaining = None, nodes
            else:
                self._nodes.is_trash_renewed = not self._has_moved
            await self._expire_names(device)
            is_progressing = not waiting.cancelled_caught or len(remaining) < n_before
            pause_s = _MOVES_DELAY_S if is_progressing else min(2 * pause_s, _RECHECK_MAX_S)

    async def _expire_names(self, device: int) -> None:
        """Have the kernel look up names in drop folders again, once no more are added. Checkpoint  for each name"""
        with self._lock:
            names = self._take_names()
        for directory, name in names:
            try:
                await trio.to_thread.run_sync(expire_name, device, directory, name, abandon_on_cancel=True)
            except OSError as error:
                _log.info("a name in a drop directory stays cached until its timeout: %s", error.strerror)

    async def _forget_all(self, device: int | None, nodes: list[Node], skipped_before: Container[Node]) -> list[Node]:
        """Have the kernel forget some nodes. Returns the nodes to be checked again.

        device       None: the kernel does not know the notice
        skipped_before  nodes that it was asked to forget before
        Raises       OSError: the kernel does not know the notice
        Checkpoint   between parts
        """
        remaining: list[Node] = []
        # The newest first: a directory is in use as long as anything in it is known.
        for end in range(len(nodes), 0, -_N_PER_NOTICE):
            start_s = time.monotonic()
            part = nodes[max(0, end - _N_PER_NOTICE) : end]
            with self._lock:
                stored = [node for node in reversed(part) if self._is_stored(node)]
                self._timeouts.invalidate_sent(stored)
                nodeids = [node.nodeid for node in stored]
            if stored and device is not None:
                forget_unused(device, nodeids)
            again = [node for node in stored if node.is_directory and (device is None or node in skipped_before)]
            still_there = await self._close_removed(again) if again else []
            remaining += still_there if device is None else stored
            await trio.sleep((time.monotonic() - start_s) * _REST_PER_WORK)
        return remaining[::-1]

    def _is_stored(self, node: Node) -> bool:
        """Return whether the kernel knows a node that lies in a store, or that a reaper has been seen to delete."""
        if self._nodes.get(node.nodeid) is not node:
            return False
        return node.final_stat is not None or holds_trash(self._nodes, node.parent or node)

    async def _close_removed(self, directories: list[Node]) -> list[Node]:
        """Close directories that were removed behind the mount, and have the kernel forget their names.

        Returns     the directories that still exist
        Checkpoint  for each name
        """
        still_there, names = await trio.to_thread.run_sync(
            self._lock.run_operation, self._detach_removed, directories, abandon_on_cancel=True
        )
        for directory, name in names:
            try:
                await trio.to_thread.run_sync(forget_name, self._nodes.device, directory, name, abandon_on_cancel=True)
            except OSError as error:
                _log.info("a removed directory stays cached until memory is short: %s", error.strerror)
        return still_there

    def _detach_removed(self, directories: list[Node]) -> tuple[list[Node], list[tuple[NodeId, bytes]]]:
        """Return the directories that still exist; and the names of the others, with their parent directories."""
        still_there, names = [], []
        for node in directories:
            fd = self._nodes.directory_fd(node)
            if fd is None:
                continue
            try:
                directory_stat = self._lock.call(stat_at, fd)
            except OSError:
                self._nodes.drop_directory_fd(node)  # the next request for it reports why
                continue
            if directory_stat.nlink:
                still_there.append(node)
                continue
            if node.parent is not None:
                names.append((node.parent.nodeid, node.name))
            if not node.n_open:
                self._nodes.detach(node, directory_stat)  # clients get these attributes from now on
            self._nodes.drop_directory_fd(node)
        return still_there, names
