"""The kernel's references to nodes: a node of which it has none, and of which nothing is open, has ended."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fusefs.core.fuse_protocol import FORGET_ONE, Request
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.validity import EntryParam


class KnowsNodes(Protocol):
    """A table that has something of nodes."""

    def drop(self, node: Node, /) -> None:
        """A node has ended."""


class NodeReferences:
    """Those to the nodes of one mount. To be used with the tables' lock."""

    def __init__(self, lock: TablesLock, nodes: Tables, cache: DaemonCache, tables: Sequence[KnowsNodes]) -> None:
        """tables: told in this order when a node has ended"""
        self._lock = lock
        self._nodes = nodes
        self._cache = cache
        self._tables = tables
        self._forget_many: Callable[[Request], None] | None = None

    def forget_by(self, forget_many: Callable[[Request], None]) -> None:
        """From now on many are forgotten by the native core."""
        self._forget_many = forget_many

    def counted(self, known: EntryParam) -> None:
        """The kernel was told: it has one more reference. Raises  OSError ESTALE"""
        if (node := self._nodes.get(known.nodeid)) is None:
            raise _stale()
        node.nlookup += 1
        node.is_told = True
        if self._lock.is_slow:
            node.told_until_s = time.monotonic() + known.timeout_s

    def not_taken(self, node: Node) -> None:
        """The kernel was not told of a node after all."""
        self._forget(node, 0)

    def forget(self, nodeid: int, n: int) -> None:
        """The kernel lets go of n references."""
        if (node := self._nodes.get(nodeid)) is not None:
            self._forget(node, n)

    def forget_many(self, forgotten: Request) -> None:
        """The kernel lets go of references to many. forgotten: as FORGET_ONE has them"""
        if self._forget_many is not None:
            self._forget_many(forgotten)
            return
        for nodeid, n in FORGET_ONE.iter_unpack(forgotten):
            self.forget(nodeid, n)

    def released(self, node: Node) -> None:
        """A handle of a node was released."""
        if not node.nlookup:
            self._forget(node, 0)

    def _forget(self, node: Node, n: int) -> None:
        if self._nodes.forget(node, n):
            if node.is_passed:
                self._cache.changed(node.source)  # a look made meanwhile has seen what may be old
            for table in self._tables:
                table.drop(node)


def _stale() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))
