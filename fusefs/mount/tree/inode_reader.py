"""What a name or a node is on the backing filesystem, just now."""

from __future__ import annotations

import errno
import os
from dataclasses import KW_ONLY, dataclass

from fusefs.core.inode_attributes import Attributes
from fusefs.linux.fd import Fd
from fusefs.linux.statx import StatxReaders
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.tables_lock import TablesLock


@dataclass(eq=False, repr=False)
class InodeReader:
    """That of one mount. To be used with the tables' lock; all methods raise OSError only.

    lookers    one for each thread
    is_shared  names may change behind the mount at any time: each look verifies what it sees
    """

    _lock: TablesLock
    _nodes: Tables
    _directories: DirectoryFds
    _lookers: StatxReaders
    _: KW_ONLY
    is_shared: bool

    def __post_init__(self) -> None:
        self.asks = self._lookers.asks

    def find(self, fd: int, name: bytes) -> tuple[Attributes, bytes] | None:
        """The attributes and the file handle of a name in a directory, both of one inode; None if nothing has it."""
        try:
            seen, handle = self._lock.look(self._lookers.looker.peek_name, fd, name)
        except FileNotFoundError:
            return None
        return seen, self._directories.lasting(handle)

    def identify(self, fd: int, name: bytes) -> tuple[Attributes, bytes]:
        """The attributes and the file handle of a name in a directory. Raises  OSError ENOENT"""
        found = self.find(fd, name)
        if found is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return found

    def identify_made(self, fd: Fd) -> tuple[Attributes, bytes]:
        """The attributes and the file handle of what was just made, by its own fd."""
        lock = self._lock
        seen, handle = lock.look(self._lookers.looker.peek, fd)
        return seen, self._directories.lasting(handle)

    def attributes(self, node: Node) -> Attributes:
        """What a node is: what it was last, if it has ended."""
        try:
            return self._look_at(node)
        except OSError:
            if node.last is None:
                raise
            return node.last  # another operation has ended it meanwhile

    def _look_at(self, node: Node) -> Attributes:
        look = self._lock.look
        ask = self._lookers.looker.look
        fd = self._nodes.fd_of(node)
        if fd is not None:
            return look(ask, fd)
        if node.last is not None:
            return node.last
        if node.is_directory:
            return look(ask, self._directories.fd_of(node))
        if node.parent is not None and not self.is_shared:
            try:
                seen = look(ask, self._directories.fd_of(node.parent), node.name)
            except (FileNotFoundError, NotADirectoryError):
                pass  # moved behind the mount
            else:
                if node.is_seen_in(seen):
                    return seen
        with self._directories.hold(node) as held:
            return look(ask, held)
