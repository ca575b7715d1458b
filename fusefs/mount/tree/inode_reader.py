"""What a name or a node is on the backing filesystem, just now."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from fusefs.core.inode_attributes import Attributes
from fusefs.linux.fd import Fd
from fusefs.linux.statx import StatxReaders
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.tables_lock import TablesLock


@dataclass(eq=False, repr=False)
class InodeReader:
    """That of one mount. To be used with the tables' lock; all methods raise OSError only.

    lookers  one for each thread
    """

    _lock: TablesLock
    _directories: DirectoryFds
    _lookers: StatxReaders

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
