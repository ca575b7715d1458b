"""The tree of a mount: its tables and the operations on them, built and passed on; it knows nothing of what calls it.

All operations are synchronous, so that nothing happens between finding a node and counting its reference (I8), and
raise OSError only. They run under the tables' lock, and all that asks the backing filesystem lets go of it.
"""

from __future__ import annotations

from fusefs.core.fuse_protocol import NAMES, XATTRS, Request, read_head
from fusefs.core.mount_counters import Gauges
from fusefs.core.nodeids import SourceKey, source_key
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.statx import look_at
from fusefs.linux.syscalls import handle_of
from fusefs.linux.xattrs import are_for_all
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.places.counters import Counters
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.directory_fds import DirectoryFds, have_handles
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.open_handles import n_for_clients, n_handles, n_spare
from fusefs.mount.tables.prefetch import Prefetch
from fusefs.mount.tables.prefetch_xattrs import PrefetchXattrs
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree import trashd_dir
from fusefs.mount.tree.cached_replies import CachedReplies
from fusefs.mount.tree.drop_adoption import DropAdoption
from fusefs.mount.tree.file_operations import FileOperations
from fusefs.mount.tree.listings import DIRECTORIES, Listings
from fusefs.mount.tree.make_core import make_core
from fusefs.mount.tree.name_operations import NameOperations
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.passthrough import Passthrough
from fusefs.mount.tree.validity import AttrTimeouts, NameValidity
from fusefs.mount.tree.xattr_operations import XattrOperations

_RACY_NS = 2_000_000_000
"""As old as the slowest clock of a filesystem; another machine's may be off by more, and is then not believed."""


class Vfs:
    """One mounted tree."""

    def __init__(
        self,
        root: Fd,
        lock: TablesLock,
        stats: Counters,
        *,
        max_fds: int,
        timeout_s: float = 0,
        cache_bytes: int = 0,
        n_in_flight: int = 1,
        shows_trash: bool = False,
        shows_xattrs: bool = True,
        is_shared: bool = False,
        is_flushed: bool = False,
        is_checked: bool = True,
    ) -> None:
        """Begin with a backing tree.

        root         its directory (O_PATH will do), which stays the caller's
        max_fds      how many fds this process may have
        timeout_s    how long what is told may be believed
        cache_bytes  for what is remembered of a slow backing filesystem
        n_in_flight  looks at a time for one listing of such a one
        shows_trash  `.trashd` is in the root's listing too
        shows_xattrs there are extended attributes
        is_shared    names may change behind the mount at any time: each look verifies what it sees
        is_flushed   the backing filesystem may tell of a failed write as late as at a close
        is_checked   the kernel checks permissions; else the backing filesystem must, when something is opened
        """
        seen = look_at(root)
        self.root = root
        self.lock = lock
        self.stats = stats
        self.is_shared = is_shared

        # What is known, which the tables' lock protects.
        source = source_key(seen, handle_of(root) if have_handles(root) else b"")
        self.nodes = Tables(
            source, seen, root=root, n_fds=n_for_clients(max_fds), n_handles=n_handles(max_fds), is_for_all=is_checked,
            is_shared=is_shared, racy_ns=_RACY_NS,
        )  # fmt: skip
        self.cache = DaemonCache(lock, self.nodes, stats, cache_bytes, timeout_s)
        self.retries = EstaleRetries(lock, self.nodes)
        self.directories = DirectoryFds(root, self.nodes, lock)
        wanted = PrefetchXattrs(seen.dev, has_handles=self.directories.has_handles)
        self.prefetch = Prefetch(lock, self.cache, wanted, n_in_flight, n_spare(max_fds))
        validity = NameValidity(self.nodes, lock)
        self.timeouts = AttrTimeouts(self.nodes)
        self.passthrough = Passthrough(lock, self.nodes, root)
        drops = trashd_dir.DropLinks(Kernel(), root)
        self.stored = trashd_dir.StoredNodes(self.nodes)
        lock.submounts.tell = self._wait_at

        # How an operation gets at it.
        self.access = NodeAccess(lock, self.nodes, self.directories, self.cache, self.timeouts)
        lock.submounts.asks = not Kernel().answers_at_once(root)

        # What is done: both front ends call these.
        self.recalls = CachedReplies(self.nodes, self.cache, self.retries, self.prefetch)
        for_all = are_for_all(root)
        self.core = make_core(
            lock, self.nodes, stats, self.directories, self._calls(validity),
            is_flushed=is_flushed, shows_xattrs=shows_xattrs, is_for_all=for_all, hides_trash=not shows_trash,
            lifetime_s=self.cache.lifetime_s,
        )  # fmt: skip
        self.directories.core = self.core
        self.names = NameOperations(
            lock, self.core, self.nodes, self.cache, self.directories, self.retries, self.prefetch, validity,
            self.timeouts, self.stored, drops, self.access,
            DropAdoption(lock, self.nodes, self.directories, self.access, Kernel()),
        )  # fmt: skip
        self.files = FileOperations(lock, self.core, self.nodes, self.cache, self.retries, drops)
        self.xattrs = XattrOperations(
            lock, self.core, self.nodes, self.cache, self.prefetch, wanted, self.timeouts,
            are_shown=shows_xattrs, are_for_all=for_all,
        )  # fmt: skip
        self.listings = Listings(
            lock, self.core, self.nodes, self.cache, self.directories, self.prefetch, validity, self.timeouts,
            self.recalls,
            is_shared=is_shared, shows_trash=shows_trash, is_checked=is_checked,
        )  # fmt: skip

    def answer(self, request: Request) -> bytes:
        """Do a whole request about a name, a node or a file; the body of its reply. Raises  OSError: its errno is it"""
        opcode = read_head(request)[1]
        if opcode in XATTRS:
            return self.xattrs.answer(request)
        if opcode in DIRECTORIES:
            return self.listings.answer(request)
        return (self.names if opcode in NAMES else self.files).answer(request)

    # What the native core calls when it has let the tables go.

    def _calls(self, validity: NameValidity) -> dict[str, object]:
        return {
            "forget": self._forget, "unused": self._end_unused, "told_stale": self._add_retry, "refused": self._refuse,
            "folds": validity.may_fold, "meets": self.lock.submounts.are_asked, "stored": self._note_stored,
            "came_back": self._come_back,
        }  # fmt: skip

    def _forget(self, source: SourceKey | None, directory: Node | None, name: bytes, has_ended: bool) -> None:
        with self.lock:
            names = () if directory is None else ((directory, name),)
            self.cache.forget(() if source is None else (source,), names)
            if source is not None and has_ended:
                self.cache.metadata.directory_changed(source)

    def _note_stored(self, node: Node, is_moved: bool) -> None:
        with self.lock:
            self.stored.note(node, is_moved=is_moved)

    def _come_back(self) -> None:
        with self.lock:
            self.cache.clear()

    def _end_unused(self, node: Node) -> None:
        """The kernel has let go of a node, or was not told of it after all."""
        with self.lock.held():
            if self.nodes.drop_unused(node):
                if node.is_passed:
                    self.cache.metadata.attributes_changed(node.source)  # what a look made meanwhile saw may be old
                self.prefetch.drop(node)
                self.retries.drop(node)

    def _refuse(self, node: Node, number: int, fd: int) -> None:
        with self.lock:
            self.passthrough.refused(node, number, fd)

    def _add_retry(self, pid: int) -> None:
        with self.lock:
            self.retries.add(pid)

    def _wait_at(self) -> None:
        with self.lock.held():
            self.nodes.wait_at(b"".join(name + b"\0" for name in self.lock.submounts.names))

    def close(self) -> None:
        """Close all fds; what clients have open is lost to them."""
        with self.lock:
            self.prefetch.close()
            self.nodes.close()
            self.directories.close()
            self.retries.close()

    def gauges(self) -> Gauges:
        """How much there is at the moment."""
        with self.lock:
            self.cache.see_idle()
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
