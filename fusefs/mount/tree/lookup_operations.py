"""What nodes are, and how long that may be believed."""

from __future__ import annotations

from dataclasses import dataclass

from fusefs.core.nodeids import NodeId
from fusefs.linux.fuse_caller import Caller
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree import trashd_dir
from fusefs.mount.tree.inode_reader import InodeReader
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.validity import EntryParam


@dataclass(eq=False, repr=False)
class LookupOperations:
    """Those of one mount. To be used with the tables' lock; all methods raise OSError only.

    The cache says for how long anything may be believed.
    """

    _lock: TablesLock
    _nodes: Tables
    _cache: DaemonCache
    _drops: trashd_dir.DropLinks
    _access: NodeAccess
    _reader: InodeReader

    def __post_init__(self) -> None:
        self._submounts = self._lock.submounts

    def is_steady(self, node: Node) -> bool:
        """Whether attributes that were seen just now may be believed at all."""
        return self.are_asked(node.dev) and not node.is_unsteady

    def are_asked(self, dev: int) -> bool:
        """Whether attributes on a device are those that its server has, if it has one."""
        self._submounts.meet(dev)
        return self._reader.asks or dev not in self._submounts.devices

    def getattr(self, nodeid: int, caller: Caller) -> EntryParam:
        """The attributes of a node as they are now."""
        uid = trashd_dir.user_of(nodeid)
        if uid is not None:
            return self.drop(uid, caller)
        return self.known(self._access.node(nodeid))

    def known(self, node: Node) -> EntryParam:
        """What a node is now."""
        look = self._cache.looking()
        try:
            seen = self._reader.attributes(node)
            if trashd_dir.is_below(self._nodes, node):
                return EntryParam(node.nodeid, seen, 0, is_fickle=True)
            look.learn_attributes(node.source, seen)
            is_steady = not node.is_unsteady
            node.is_told |= is_steady
            return EntryParam(node.nodeid, seen, self._cache.lifetime_s, look.proof(node.source, named=None), is_steady)
        finally:
            look.end()

    def drop(self, uid: int, caller: Caller) -> EntryParam:
        """The link to a user's drop folder."""
        return EntryParam(NodeId((seen := self._lock.call(self._drops.look, uid, caller)).ino), seen, 0)
