"""Listings without OPENDIR: the kernel opens and closes the directories without a message.

It asks by the node then, not by a handle, and only for what it has not kept. Whether what it has is still right it
tells by the directory's time, as for all that it keeps.

Source  docs/decisions/0063-what-the-kernel-caches.md
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fusefs.core.packed_entries import Dirent
from fusefs.linux.fd import Fd
from fusefs.linux.getdents import Dirents
from fusefs.linux.kernel import BTRFS_MAGIC, EXT_MAGIC, TMPFS_MAGIC, XFS_MAGIC, Kernel
from fusefs.mount.native._core import Node, counted_fd
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.open_handles import DirHandle
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.file_operations import sync
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.readdir import BYTES_TOLD, Listings, ReaddirEntry
from fusefs.store.layout import is_stores_own

_WITH_LASTING_OFFSETS = frozenset({EXT_MAGIC, XFS_MAGIC, BTRFS_MAGIC, TMPFS_MAGIC})
_SINCE = (6, 13)
"""From then on two changes never leave a directory with the same time, if it was looked at in between."""


def why_not(root: Fd, *, checks_permissions: bool) -> str | None:
    """What keeps us from it; None: nothing.

    checks_permissions  the kernel does; else the filesystem below must, when a directory is opened
    """
    if not checks_permissions:
        return "the filesystem below has to check who opens a directory"
    if Kernel().filesystem(root) not in _WITH_LASTING_OFFSETS:
        return "where a listing goes on is not known to outlast an open directory in this filesystem"
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < _SINCE:
        return "a directory's time may miss a change before Linux 6.13"
    return None


@dataclass(eq=False, repr=False)
class UnopenedListings:
    """Those of one mount, by node. To be used with the tables' lock; all methods raise OSError only."""

    _lock: TablesLock
    _cache: DaemonCache
    _directories: DirectoryFds
    _access: NodeAccess
    _listings: Listings

    def read(self, nodeid: int, offset: int, room: int) -> Iterator[ReaddirEntry]:
        """The entries of a directory from an offset on, on the loop's own thread; `told` must follow each.

        room  bytes of the answer: no more is read than it takes
        """
        node = self._access.node(nodeid)
        with self._open(node) as fd:
            yield from self._listings.looked_at(DirHandle(node, Dirents(fd)), offset, room)

    def read_names(self, nodeid: int, offset: int, room: int) -> list[Dirent]:
        """The entries of a directory from an offset on, without attributes: of a filesystem that has become slow."""
        node = self._access.node(nodeid)
        with self._cache.reads(node.source), self._open(node) as fd:
            hides = self._listings.hides_stores(node)
            told = self._lock.call(Dirents(fd).block, offset, room // BYTES_TOLD)
            return [one for one in told if not (hides and is_stores_own(one[0]))]

    def fsyncdir(self, nodeid: int, *, data_only: bool) -> None:
        """Make a directory's names durable."""
        with self._open(self._access.node(nodeid)) as fd:
            sync(self._lock, fd, data_only=data_only)

    def _open(self, node: Node) -> Fd:
        """The reader may have it from another process that opened it: that was for the kernel to allow."""
        return counted_fd(self._directories.open_to_read(node))
