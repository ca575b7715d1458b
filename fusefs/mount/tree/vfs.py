"""The operations of a mount and the state that they share, independent of the transport of requests."""

from __future__ import annotations

from fusefs.core.fuse_protocol import XATTR_OPCODES, Request, read_head
from fusefs.core.mount_counters import Gauges
from fusefs.core.mount_options import MountOptions
from fusefs.linux.fd import Fd
from fusefs.mount.places.counters import Counters
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.listings import DIRECTORIES, Listings
from fusefs.mount.tree.mount_state import MountState
from fusefs.mount.tree.node_operations import NodeOperations
from fusefs.mount.tree.xattr_operations import XattrOperations


class Vfs(MountState):
    def __init__(self, root: Fd, lock: TablesLock, stats: Counters, options: MountOptions, max_fds: int) -> None:
        super().__init__(root, lock, stats, options, max_fds)
        self.node_operations = NodeOperations(self)
        self.xattrs = XattrOperations(self)
        self.listings = Listings(self)

    def answer(self, request: Request) -> bytes:
        """Handle a request about a name, a node or a file; return the reply's body. Raises  OSError with the errno for
        the reply; WouldWait"""
        return self._operations_for(request).answer(request)

    def answer_from_cache(self, request: Request) -> bytes | None:
        """Return the body of a reply from the cache of a slow filesystem; None if the filesystem has to be asked."""
        return self._operations_for(request).answer_from_cache(request)

    def _operations_for(self, request: Request) -> NodeOperations | XattrOperations | Listings:
        opcode = read_head(request)[1]
        if opcode in XATTR_OPCODES:
            return self.xattrs
        return self.listings if opcode in DIRECTORIES else self.node_operations

    def read_gauges(self) -> Gauges:
        with self.lock:
            self.cache.update_is_caching()
            return Gauges(
                n_nodes=len(self.nodes),
                n_handles=self.nodes.n_handles + self.listings.n_unopened,
                n_directory_fds=self.nodes.n_directories,
                n_cached=len(self.cache.metadata),
                cache_bytes=self.cache.metadata.size_bytes if len(self.cache.metadata) else 0,
                cache_size_bytes=self.cache.size_bytes,
                n_threads=self.lock.n_inside,
                n_prefetches=self.prefetch.n_under_way,
                is_slow=int(self.lock.is_slow),
            )
