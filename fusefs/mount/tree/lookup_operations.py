"""What names and nodeids mean, and how long that may be believed."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from fusefs.core.inode_attributes import Attributes
from fusefs.core.nodeids import ROOT, TOP, NodeId, source_key
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.fuse_caller import Caller
from fusefs.linux.mountinfo import TOP as TOP_NAME
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import CacheFill, DaemonCache
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.prefetch import Prefetch
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree import trashd_dir
from fusefs.mount.tree.inode_reader import InodeReader
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.references import NodeReferences
from fusefs.mount.tree.validity import NOTHING, EntryParam, NameValidity
from fusefs.store.layout import DROP


@dataclass(eq=False, repr=False)
class LookupOperations:
    """Those of one mount. To be used with the tables' lock; all methods raise OSError only.

    The cache says for how long anything may be believed.
    """

    _lock: TablesLock
    _nodes: Tables
    _cache: DaemonCache
    _directories: DirectoryFds
    _retries: EstaleRetries
    _prefetch: Prefetch
    _validity: NameValidity
    _drops: trashd_dir.DropLinks
    _stored: trashd_dir.StoredNodes
    _access: NodeAccess
    _references: NodeReferences
    _reader: InodeReader

    def __post_init__(self) -> None:
        self._submounts = self._lock.submounts
        self._missing = EntryParam(NodeId(0), NOTHING, self._cache.lifetime_s)

    # Names.

    def lookup(self, parent: int, name: bytes, caller: Caller) -> EntryParam:
        """What a name means; one more reference for the kernel.

        Raises  OSError ENAMETOOLONG and so on; ENOENT where that must not be remembered
        """
        directory, fd = self._access.directory(parent)
        if name == DROP and trashd_dir.is_drop(directory, name):
            return self._drop(caller.uid, caller)
        if parent == ROOT and name == TOP_NAME and self._nodes.root.nodeid == TOP:  # asked by mount/life/root_inode.py
            return self._top(self._nodes.root)
        if self._retries:
            known = self._look_again(directory, fd, name, caller) or self._look_at_moved(directory, fd, name, caller)
            if known is not None:
                return known
        is_fickle = self._validity.is_fickle(directory, fd, name)
        if not is_fickle and self._lock.is_slow:
            self._prefetch.asked(directory, fd)
        look = self._cache.looking()
        try:
            found = self._reader.find(fd, name)
            if found is None:
                if is_fickle:
                    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
                look.learn_missing(directory, name)
                return self._missing._replace(proof=look.proof(None, named=(directory, name)))
            known = self._learn(directory, name, *found, look, is_fickle=is_fickle)
        finally:
            look.end()
        self._references.counted(known)
        return known

    def _top(self, root: Node) -> EntryParam:
        root.nlookup += 1
        return EntryParam(TOP, self._reader.attributes(root)._replace(ino=TOP), 0)

    def _look_again(self, directory: Node, dir_fd: Fd, name: bytes, caller: Caller) -> EntryParam | None:
        """What a name is to a client that was told ESTALE, and has it held; None: it was not. Raises  OSError ENOENT"""
        fd = self._retries.open(caller.pid, dir_fd, name)
        if fd is None:
            return None
        with closed_on_error(fd):
            known = self.see_made(directory, dir_fd, name, fd)
            node = self._access.node(known.nodeid)
            self._references.counted(known)
        self._retries.hold(caller.pid, node, fd)
        return known

    def _look_at_moved(self, directory: Node, dir_fd: Fd, name: bytes, caller: Caller) -> EntryParam | None:
        """What a client has just moved to a name that does not mean it any more; None: nothing, or it has looked."""
        fd = self._retries.moved_to(caller.pid, (directory, name))
        if fd is None:
            return None
        with fd:
            known = self.see_made(directory, dir_fd, name, fd)
        node = self._access.node(known.nodeid)
        self._nodes.take_away(node, directory, name)
        self._references.counted(known)
        return known

    def see(self, directory: Node, fd: Fd, name: bytes) -> EntryParam:
        """What a name means, not counted yet: `counted` must follow."""
        is_fickle = self._validity.is_fickle(directory, fd, name)
        with self._cache.looking() as look:
            return self._learn(directory, name, *self._reader.identify(fd, name), look, is_fickle=is_fickle)

    def see_made(self, directory: Node, dir_fd: Fd, name: bytes, fd: Fd) -> EntryParam:
        """What a name means that was just made, by its own fd, not counted yet."""
        is_fickle = self._validity.is_fickle(directory, dir_fd, name)
        with self._cache.looking() as look:
            return self._learn(directory, name, *self._reader.identify_made(fd), look, is_fickle=is_fickle)

    def _learn(
        self, directory: Node, name: bytes, seen: Attributes, handle: bytes, look: CacheFill, *, is_fickle: bool
    ) -> EntryParam:
        """What was seen under a name, as a node."""
        source = source_key(seen, handle)
        node = self._nodes.learn(source, seen, directory, name)
        if is_fickle:
            self._stored.seen(directory, node)
            return EntryParam(node.nodeid, seen, 0, is_fickle=True)
        look.learn(directory, name, source, seen)
        proof = look.proof(source, named=(directory, name))
        return EntryParam(node.nodeid, seen, self._cache.lifetime_s, proof, self.is_steady(node))

    def is_steady(self, node: Node) -> bool:
        """Whether attributes that were seen just now may be believed at all."""
        self._submounts.meet(node.dev)
        was_asked = self._reader.asks or node.dev not in self._submounts.devices
        return was_asked and not node.is_unsteady

    # Nodes.

    def getattr(self, nodeid: int, caller: Caller) -> EntryParam:
        """The attributes of a node as they are now."""
        uid = trashd_dir.user_of(nodeid)
        if uid is not None:
            return self._drop(uid, caller)
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
            node.is_told |= is_steady and not node.is_directory
            return EntryParam(node.nodeid, seen, self._cache.lifetime_s, look.proof(node.source, named=None), is_steady)
        finally:
            look.end()

    def _drop(self, uid: int, caller: Caller) -> EntryParam:
        return EntryParam(NodeId((seen := self._lock.call(self._drops.look, uid, caller)).ino), seen, 0)
