"""How an operation gets at a node: found by its nodeid, held by an fd, and acted on as whoever asks."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from fusefs.core.inode_attributes import Attributes
from fusefs.core.nodeids import ROOTS
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.act_as import AsCaller
from fusefs.mount.tree.trashd_dir import is_drop, user_of
from fusefs.mount.tree.validity import AttrTimeouts
from fusefs.store.layout import DROP


@dataclass(eq=False, repr=False)
class NodeAccess:
    """That of one mount. To be used with the tables' lock; all methods raise OSError only."""

    _lock: TablesLock
    _nodes: Tables
    _directories: DirectoryFds
    _cache: DaemonCache
    _timeouts: AttrTimeouts

    def __post_init__(self) -> None:
        self.as_caller = partial(AsCaller, self._lock, self._mistaken)
        """One act of a caller's: see AsCaller. If it is refused below, the nodes are not what they were taken for."""

    def _mistaken(self, node: Node) -> None:
        self._cache.metadata.attributes_changed(node.source)
        self._timeouts.renew(node)

    def node(self, nodeid: int) -> Node:
        """The node of a nodeid, to be asked. Raises  OSError ESTALE: the kernel then looks again; WouldWait"""
        node = self._nodes.get(nodeid)
        if node is None:
            _fail(errno.ESTALE if user_of(nodeid) is None else errno.EOPNOTSUPP)
        return node

    def directory(self, nodeid: int) -> tuple[Node, Fd]:
        """A directory and its fd, to be used at once. Raises  OSError ENOENT if it was removed."""
        node = self.node(nodeid)
        if node.last is not None:
            _fail(errno.ENOENT)
        return node, self._directories.fd_of(node)

    def changeable(self, parent: int, name: bytes) -> tuple[Node, Fd]:
        """A directory and its fd, for a change of that name in it. Raises  OSError EPERM for `.trashd/drop`"""
        directory, fd = self.directory(parent)
        if name == DROP and is_drop(directory, name):
            _fail(errno.EPERM)
        return directory, fd

    def hold_shown(self, number: int, _asker: Caller) -> Fd:
        """An fd of a directory by its inode number in the mount, of which a client has an fd, too.

        Raises  OSError ENOTDIR
        """
        root = self._nodes.root
        node = root if number in (*ROOTS, root.ino) else self._nodes.get(number)
        if node is None or not node.is_directory:
            _fail(errno.ENOTDIR)
        return Fd(os.dup(self._directories.fd_of(node)))

    def removed(self, node: Node, seen: Attributes) -> None:
        """A node lost its last link: what it was is all that is told of it, but to those that have it open."""
        if not node.n_open:
            self._nodes.detach(node, seen)
        if node.is_directory:
            self._nodes.drop_directory_fd(node)


def _fail(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))
