"""Nodes in a trash store: the kernel is made to forget them bit by bit, before a rename waits, or space is missed.

And names in drop folders: what was moved there has no name any more, but the kernel gives it that which was asked for.
That name expires, if what was moved is in use and so not forgotten: by a thread that answers nothing, as that waits for
the folder's lock (I10), and when nothing more is being moved there: a daemon that is killed while it waits is not gone,
nor are its clients free.

A reaper takes it from there behind the mount. For as long as the kernel knows a directory, we have it open, so that
neither its blocks nor its inode would come back; and when a name in a drop folder is looked up again, since the next
one of that name is to be moved there, the kernel lets go of all that it knows in the first one: 5 µs each, for which
the caller waits, and all renames.

No client holds what is waited for here, and what is in use is passed over. So the daemon itself may say it, without a
process between, and clients stay in there; once they let go, that is forgotten as well. The kernel also passes over a
directory in which it remembers that some name was missing. The daemon closes a directory that was passed over and was
removed meanwhile, and has the kernel forget its name and all below it. A kernel that does not know the first message
passes over everything.
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
from fusefs.linux.statx import look_at
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.kernel_timeouts import AttrTimeouts
from fusefs.mount.tree.trashd_dir import holds_trash

_log = logging.getLogger(__name__)

_SETTLE_S = 0.2
"""From a move to the look at what is known: more may be moved."""
_LONGEST_S = 10.0
"""Between two looks at what is in use."""
_REST_PER_WORK = 4
_N_AT_A_TIME = 128
"""Half a millisecond's work, for the kernel and for us, as it tells us what it has forgotten."""


class StoredNotices:
    """Those of one mount: what the kernel was sent that lies in stores, since the last time, and is to forget."""

    def __init__(self, lock: TablesLock, nodes: Tables, timeouts: AttrTimeouts) -> None:
        self._lock, self._nodes, self._timeouts = lock, nodes, timeouts
        self._notify: Callable[[], object] = lambda: None
        """Has `run` see that there is something, on whatever thread."""
        self._has_moved = False
        self._seen: dict[Node, None] = {}
        self._named: dict[tuple[NodeId, bytes], Node] = {}
        self._named_s = 0.0

    # With the tables' lock.

    def note(self, node: Node, is_moved: bool) -> None:
        """A client was sent a node in a directory that holds trash, or has moved it there, with all in it."""
        if is_moved and node.is_directory:
            self._has_moved, self._nodes.is_trash_renewed = True, False
        self._seen[node] = None
        self._notify()

    def expire(self, directory: Node, name: bytes, node: Node) -> None:
        """The kernel is about to give this name to a node that is somewhere else."""
        self._named[directory.nodeid, name] = node
        self._named_s = time.monotonic()
        self._notify()

    def _take_names(self) -> list[tuple[NodeId, bytes]]:
        """Such names, with their directories, that the kernel may still believe; none while more of them come."""
        if time.monotonic() - self._named_s < _SETTLE_S:
            return []
        named, self._named = self._named, {}
        return [place for place, node in named.items() if self._nodes.get(node.nodeid) is node]

    def _take(self, left: Sequence[Node]) -> list[Node]:
        """What may lie in a store, the oldest first. left: of the last time"""
        seen, self._seen = self._seen, {}
        has_moved, self._has_moved = self._has_moved, False
        return list(self._nodes) if has_moved else [*dict.fromkeys([*left, *seen])]

    # Without it.

    async def run(self, device: int) -> None:
        """Have the kernel forget what lies in stores, until cancelled.

        device      the connection's fd
        Checkpoint  between parts of the table, and until something is moved or seen there
        """
        sends, news = trio.open_memory_channel[None](1)

        def tell() -> None:
            with suppress(trio.WouldBlock):
                sends.send_nowait(None)

        token = trio.lowlevel.current_trio_token()
        self._notify = partial(token.run_sync_soon, tell, idempotent=True)
        left: list[Node] = []
        pause_s = _SETTLE_S
        told_by: int | None = device
        while True:
            with trio.move_on_after(pause_s if left else math.inf) as waiting:
                await news.receive()
                await trio.sleep(_SETTLE_S)
            with self._lock:
                nodes = self._take(left)
            n_before = len(left)
            try:
                left = await self._forget_all(told_by, nodes, frozenset(left))
            except OSError as error:
                _log.info(
                    "entries of stores stay cached until memory is short, or until their names are used again: %s",
                    error.strerror,
                )
                told_by, left = None, nodes
            else:
                self._nodes.is_trash_renewed = not self._has_moved
            await self._expire_names(device)
            goes_on = not waiting.cancelled_caught or len(left) < n_before
            pause_s = _SETTLE_S if goes_on else min(2 * pause_s, _LONGEST_S)

    async def _expire_names(self, device: int) -> None:
        """Have the kernel ask anew what names in drop folders mean, unless that can wait. Checkpoint  for each"""
        with self._lock:
            names = self._take_names()
        for directory, name in names:
            try:
                await trio.to_thread.run_sync(expire_name, device, directory, name, abandon_on_cancel=True)
            except OSError as error:
                _log.info("a name in a drop directory stays cached until its timeout: %s", error.strerror)

    async def _forget_all(self, device: int | None, nodes: list[Node], passed_over: Container[Node]) -> list[Node]:
        """Those of some nodes that are to be looked at again.

        device       None: the kernel doesn't know the message
        passed_over  what it was asked to forget before
        Raises       OSError: it does not know the message
        Checkpoint   between parts
        """
        left: list[Node] = []
        # From the newest: what is in a directory goes before it, or that is in use.
        for end in range(len(nodes), 0, -_N_AT_A_TIME):
            start_s = time.monotonic()
            part = nodes[max(0, end - _N_AT_A_TIME) : end]
            with self._lock:
                stored = [node for node in reversed(part) if self._is_stored(node)]
                self._timeouts.renew_those(stored)
                nodeids = [node.nodeid for node in stored]
            if stored and device is not None:
                forget_unused(device, nodeids)
            again = [node for node in stored if node.is_directory and (device is None or node in passed_over)]
            still_there = await self._close_removed(again) if again else []
            left += still_there if device is None else stored
            await trio.sleep((time.monotonic() - start_s) * _REST_PER_WORK)
        return left[::-1]

    def _is_stored(self, node: Node) -> bool:
        """Whether the kernel knows a node that lies in a store, or did until a reaper was seen to take it away."""
        if self._nodes.get(node.nodeid) is not node:
            return False
        return node.last is not None or holds_trash(self._nodes, node.parent or node)

    async def _close_removed(self, directories: list[Node]) -> list[Node]:
        """Close those that were removed behind the mount, and have the kernel forget their names; the others.

        Checkpoint  for each name
        """
        still_there, names = await trio.to_thread.run_sync(
            self._lock.run, self._detach_removed, directories, abandon_on_cancel=True
        )
        for directory, name in names:
            try:
                await trio.to_thread.run_sync(forget_name, self._nodes.device, directory, name, abandon_on_cancel=True)
            except OSError as error:
                _log.info("a removed directory stays cached until memory is short: %s", error.strerror)
        return still_there

    def _detach_removed(self, directories: list[Node]) -> tuple[list[Node], list[tuple[NodeId, bytes]]]:
        """The directories that are still there; the names of the others, with the directories that they were in."""
        still_there, names = [], []
        for node in directories:
            fd = self._nodes.directory_fd(node)
            if fd is None:
                continue
            try:
                seen = self._lock.call(look_at, fd)
            except OSError:
                self._nodes.drop_directory_fd(node)  # the next request for it reports why
                continue
            if seen.nlink:
                still_there.append(node)
                continue
            if node.parent is not None:
                names.append((node.parent.nodeid, node.name))
            if not node.n_open:
                self._nodes.detach(node, seen)  # that is all that clients get of it from now on
            self._nodes.drop_directory_fd(node)
        return still_there, names
