"""The kernel's references to nodes: a node of which it has none, and of which nothing is open, has ended."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from typing import Protocol

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

    def counted(self, known: EntryParam) -> None:
        """The kernel was told: it has one more reference. Raises  OSError ESTALE"""
        if (node := self._nodes.get(known.nodeid)) is None:
            raise _stale()
        node.nlookup += 1
        node.is_told = True
        if self._lock.is_slow:
            node.told_until_s = time.monotonic() + known.timeout_s

    def not_taken(self, node: Node) -> None:
        """The kernel was not told of a node after all, or has let go of it."""
        if self._nodes.drop_unused(node):
            if node.is_passed:
                self._cache.changed(node.source)  # a look made meanwhile has seen what may be old
            for table in self._tables:
                table.drop(node)


def _stale() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))
