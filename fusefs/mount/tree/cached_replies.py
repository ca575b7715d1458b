"""Requests answered from memory, on the loop's own thread: nothing here asks the backing filesystem."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fusefs.core.nodeids import NodeId
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.prefetch import Prefetch
from fusefs.mount.tree import trashd_dir
from fusefs.mount.tree.validity import NOTHING, EntryParam
from fusefs.store.layout import is_stores_own


@dataclass(eq=False, repr=False)
class CachedReplies:
    """Those of one mount. None everywhere: it is not remembered, and has to be asked."""

    _nodes: Tables
    _cache: DaemonCache
    _retries: EstaleRetries
    _prefetch: Prefetch

    def lookup(self, parent: int, name: bytes, pid: int) -> EntryParam | None:
        """What a name means to a thread of a client's; one more reference for the kernel."""
        directory = self._nodes.get(parent)
        if directory is None or directory.last is not None or pid in self._retries:
            return None
        known = self.name(directory, name)
        if known is not None and known.nodeid:
            self._prefetch.asked(directory, self._nodes.directory_fd(directory))
            node = self._nodes.get(known.nodeid)
            assert node is not None, "it was just found"
            node.nlookup += 1
            node.is_told = True
            node.told_until_s = time.monotonic() + known.timeout_s
        return known

    def name(self, directory: Node, name: bytes) -> EntryParam | None:
        """What a name means, not counted yet: that must follow."""
        if is_stores_own(name) or trashd_dir.is_below(self._nodes, directory):
            return None
        found = self._cache.name(directory, name)
        if found is None:
            return None
        source, left_s = found
        if source is None:
            return EntryParam(NodeId(0), NOTHING, left_s)
        attributes = self._cache.attributes(source)
        if attributes is None:
            return None
        seen, also_left_s = attributes
        return EntryParam(self._nodes.learn(source, seen, directory, name).nodeid, seen, min(left_s, also_left_s))

    def getattr(self, nodeid: int) -> EntryParam | None:
        """What a node is."""
        node = self._nodes.get(nodeid)
        if node is None or node.last is not None or trashd_dir.is_below(self._nodes, node):
            return None
        attributes = self._cache.attributes(node.source)
        if attributes is None:
            return None
        node.is_told |= not node.is_directory
        return EntryParam(node.nodeid, *attributes)

    def readlink(self, nodeid: int) -> bytes | None:
        """Where a link leads."""
        node = self._nodes.get(nodeid)
        return None if node is None else self._cache.target(node)
