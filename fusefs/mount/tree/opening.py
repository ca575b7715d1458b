"""Handles of nodes: room for one, a file opened as the caller, and what is left when one is released."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import NamedTuple

from fusefs.core.inode_attributes import Attributes
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller
from fusefs.linux.statx import look_at
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.open_handles import FOR_EXECUTION, write_anywhere
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.act_as import by_mode, by_owner_alone
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.passthrough import Passthrough
from fusefs.mount.tree.references import NodeReferences
from fusefs.mount.tree.validity import NOTHING


class OpenedFile(NamedTuple):
    """A handle of a file.

    backing_id  by which the kernel passes its reads and writes through; 0: they come to us
    keeps       whether the kernel may keep what it has of the content
    """

    fh: int
    backing_id: int
    keeps: bool


@dataclass(eq=False, repr=False)
class Opening:
    """What one mount's clients open. To be used with the tables' lock."""

    _lock: TablesLock
    _nodes: Tables
    _cache: DaemonCache
    _passthrough: Passthrough
    _references: NodeReferences
    _access: NodeAccess

    def make_room(self, opener: int) -> None:
        """Before a handle of a uid's: the fds are shared between handles and directories, which give way.

        Raises  OSError EMFILE: the opener has its share
        """
        if not self._nodes.make_room(opener):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def open_as(self, caller: Caller, node: Node, held: Fd, seen: Attributes, flags: int) -> Fd:
        """An fd of the file that an O_PATH fd holds, as the caller, when no lease on it is in the way.

        Raises  OSError EINTR: see TablesLock.patiently; EACCES, EPERM: the filesystem below refuses it;
                ESTALE: it is a FIFO, a socket or a device by now: to open these may wait, or do something
        """
        if stat.S_IFMT(seen.mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        lock = self._lock
        acting = self._access.as_caller(caller, (by_mode(seen), by_owner_alone(seen)), (node,))
        if flags & FOR_EXECUTION:
            acting.call(_execute, held)
            return Fd(lock.patiently(caller.pid, lock.call, os.open, held.path(), flags | os.O_NONBLOCK))
        return Fd(lock.patiently(caller.pid, acting.call, os.open, held.path(), flags | os.O_NONBLOCK))

    def opened(self, node: Node, fd: Fd, opener: int, flags: int, writer: int | None = None) -> int:
        """Have a handle of a node by an fd, which is ours now; the id by which it is passed through, or 0."""
        try:
            backing_id = self._passthrough.backing_for(node, fd, flags, writer)
        except BaseException:
            self._lock.call(fd.close)
            raise
        if flags & os.O_APPEND:
            write_anywhere(fd)
        self._nodes.open_handle(node, fd, opener, flags, backing_id, writer)
        if node.backing_id:
            self._cache.changed(node.source)
        return node.backing_id

    def release(self, fh: int) -> None:
        """Close a handle of a file or a directory; with the last one of what has no name any more, that has ended."""
        node, fd = self._nodes.handle(fh)
        if node.n_open == 1 and node.parent is None and node is not self._nodes.root:
            try:
                seen = self._lock.call(look_at, fd)
            except OSError:
                seen = NOTHING  # what it is can't be told any more
            if node.n_open == 1 and (node.is_directory or not seen.nlink):
                self._nodes.detach(node, seen)
        was_passed = node.backing_id
        self._nodes.close_handle(fh)
        if was_passed and not node.is_passed:
            self._cache.changed(node.source)  # a look made meanwhile has seen what may be old
        self._references.released(node)


def _execute(held: Fd) -> None:
    """Whether a program may be run, which need not be readable. Raises  OSError EACCES"""
    if not os.access(held.path(), os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
