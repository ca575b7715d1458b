"""Makes the kernel forget nodes in trash stores step by step, so that renames need not wait and space is freed.

The reaper deletes these nodes behind the mount. As long as the kernel knows a directory, the daemon holds it open, so
neither its blocks nor its inode are freed. When the next entry of the same name is moved into a drop directory, the
kernel looks up that name again, and drops everything that it has cached below the first entry. That takes 5 µs per
inode, and the caller and all renames wait for it.

The prune notification waits for no lock that a client holds, and skips nodes in use. So the daemon can send it without
a helper process, and clients can stay in a deleted tree; once they leave, their nodes are forgotten, too. The kernel
also skips a directory in which it has cached a negative entry. If such a directory has been removed, the daemon closes
it and makes the kernel forget its name with everything below it. A kernel without prune notifications skips all nodes.

Names in drop directories are expired, too. An entry that was moved there does not keep its name, but the kernel assigns
the requested one to it. If the moved inode is in use and thus not forgotten, that name is expired instead. This
notification waits for the directory's lock, so a thread that answers no requests sends it (I10). It does so when no
more entries are being moved there. If the daemon were killed during that wait, it would not end, and its clients would
stay blocked.
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
"""Delay between a move and the check of all nodes, since more entries may be moved."""
_RECHECK_MAX_S = 10.0
"""Longest time between two checks of nodes that are in use."""
_REST_PER_WORK = 4
_N_PER_NOTICE = 128
"""Each notification is half a millisecond of work for the kernel, and for the daemon, which gets a FORGET per node."""


class StoredNotices:
    """Collects the nodes in a mount's stores that the kernel was sent, and makes the kernel forget them."""

    def __init__(self, lock: TablesLock, nodes: Tables, timeouts: AttrTimeouts) -> None:
        self._lock, self._nodes, self._timeouts = lock, nodes, timeouts
        self._wake: Callable[[], object] = lambda: None
        """Wakes `forget_until_cancelled`. Any thread may call it."""
        self._has_moved = False
        self._stored_nodes: dict[Node, None] = {}
        self._expiring_names: dict[tuple[NodeId, bytes], Node] = {}
        self._last_named_s = 0.0

    # Callers must hold the tables lock.

    def note_stored(self, node: Node, is_moved: bool) -> None:
        """Record a node in a directory with trash: a client was sent the node, or moved it there with its tree."""
        if is_moved and node.is_directory:
            self._has_moved, self._nodes.is_trash_renewed = True, False
        self._stored_nodes[node] = None
        self._wake()

    def expire(self, directory: Node, name: bytes, node: Node) -> None:
        """Record that the kernel is about to assign this name to a node that was in fact moved elsewhere."""
        self._expiring_names[directory.nodeid, name] = node
        self._last_named_s = time.monotonic()
        self._wake()

    def _take_names(self) -> list[tuple[NodeId, bytes]]:
        """Remove and return the recorded names that the kernel may still have cached, with their directories. Return
        nothing while more names are being added."""
        if time.monotonic() - self._last_named_s < _MOVES_DELAY_S:
            return []
        expiring_names, self._expiring_names = self._expiring_names, {}
        return [place for place, node in expiring_names.items() if self._nodes.get(node.nodeid) is node]

    def _take_nodes(self, remaining: Sequence[Node]) -> list[Node]:
        """Remove and return the nodes that may be in a store, the oldest first. remaining: nodes to be checked again"""
        stored_nodes, self._stored_nodes = self._stored_nodes, {}
        has_moved, self._has_moved = self._has_moved, False
        return list(self._nodes) if has_moved else [*dict.fromkeys([*remaining, *stored_nodes])]

    # Callers must not hold the tables lock.

    async def forget_until_cancelled(self, device: int) -> None:
        """Make the kernel forget nodes in stores, until cancelled.

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
                    "entries of trash stores stay cached until memory is low, or until their names are used again: %s",
                    error.strerror,
                )
                notify_device, remaining = None, nodes
            else:
                self._nodes.is_trash_renewed = not self._has_moved
            await self._expire_names(device)
            is_progressing = not waiting.cancelled_caught or len(remaining) < n_before
            pause_s = _MOVES_DELAY_S if is_progressing else min(2 * pause_s, _RECHECK_MAX_S)

    async def _expire_names(self, device: int) -> None:
        """Make the kernel look up names in drop directories again after the last move. Checkpoint  for each name"""
        with self._lock:
            names = self._take_names()
        for directory, name in names:
            try:
                await trio.to_thread.run_sync(expire_name, device, directory, name, abandon_on_cancel=True)
            except OSError as error:
                _log.info("a name in a drop directory stays cached until its timeout: %s", error.strerror)

    async def _forget_all(self, device: int | None, nodes: list[Node], skipped_before: Container[Node]) -> list[Node]:
        """Make the kernel forget nodes. Returns  the nodes to be checked again

        device          None: the kernel does not know prune notifications
        skipped_before  nodes that the kernel was asked to forget before
        Raises          OSError: the kernel does not know prune notifications
        Checkpoint      between parts
        """
        remaining: list[Node] = []
        # The newest first: a directory is in use as long as the kernel knows anything in it.
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
        """Return whether the kernel knows this node, and the node is in a store or was found deleted."""
        if self._nodes.get(node.nodeid) is not node:
            return False
        return node.final_stat is not None or holds_trash(self._nodes, node.parent or node)

    async def _close_removed(self, directories: list[Node]) -> list[Node]:
        """Close directories that were removed behind the mount, and make the kernel forget their names.

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
                _log.info("a removed directory stays cached until memory is low: %s", error.strerror)
        return still_there

    def _detach_removed(self, directories: list[Node]) -> tuple[list[Node], list[tuple[NodeId, bytes]]]:
        """Detach removed directories. Returns  the directories that still exist; the names and parents of the others"""
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
