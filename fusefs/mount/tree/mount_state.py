"""What all operations of a mount share: its tables and caches, their lock, and the native core; what the core calls.

All is synchronous, so that nothing happens between finding a node and counting its reference (I8). It runs with the
tables' lock, which is released for each call to the backing filesystem.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from array import array
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Final, TypeVar

from fusefs.core.fuse_protocol import Opcode, Request
from fusefs.core.metadata_cache import NodeId, SourceKey, source_key
from fusefs.core.mount_counters import QUICK_NS
from fusefs.core.mount_options import Coherence, MountOptions
from fusefs.core.names import STORE
from fusefs.linux import syscalls
from fusefs.linux.credentials import at_rest, in_no_group, with_effective
from fusefs.linux.fd import Fd
from fusefs.linux.filesystem_probes import case_folding
from fusefs.linux.kernel import FUSE_MAGIC, Kernel
from fusefs.linux.statx import look_at, open_handle
from fusefs.linux.syscalls import handle_of
from fusefs.linux.xattrs import are_for_all, is_selinux_enabled
from fusefs.mount.native._core import Core, Node, Tables
from fusefs.mount.places.counters import CELL_OF, LAYOUT, Counters
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.prefetch import Prefetch
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.forget_stored import StoredNotices
from fusefs.mount.tree.kernel_timeouts import NOTHING, AttrTimeouts, EntryParam
from fusefs.mount.tree.passthrough import Passthrough
from fusefs.mount.tree.trashd_dir import is_below
from fusefs.store.layout import is_stores_own

R = TypeVar("R")

_SPARE_FDS, _SPARE_FDS_MAX = 64, 2048
"""For the daemon's own needs, and those that operations hold for a moment: many, where many wait."""
_N_DIRECTORIES_MIN = 16
_RACY_NS = 2_000_000_000
"""As old as the slowest clock of a filesystem; another machine's may be off by more, and is then not believed."""
_WITHOUT_HANDLES = 1 << 30
"""As in core.h."""
_COUNTED_AS = {
    Opcode.BATCH_FORGET: "forget", Opcode.RENAME2: "rename", Opcode.COPY_FILE_RANGE_64: "copy_file_range",
    Opcode.READDIRPLUS: "readdir",
}  # fmt: skip
CELL_OF_OPCODE: Final[dict[int, int]] = {
    opcode: CELL_OF[name] for opcode in Opcode if (name := _COUNTED_AS.get(opcode, opcode.name.lower())) in CELL_OF
}
"""Where the requests are counted that the mount replies to."""
_N_OPCODES = 64
"""As in core.h."""

_log = logging.getLogger(__name__)


def n_spare(max_fds: int) -> int:
    """How many fds of a process that may have so many are the daemon's own."""
    return max(_SPARE_FDS, min(max_fds // 4, _SPARE_FDS_MAX))


def n_handles(max_fds: int) -> int:
    """How many handles the clients of such a process share; the rest holds directories."""
    return max(max_fds - n_spare(max_fds) - _N_DIRECTORIES_MIN, _N_DIRECTORIES_MIN)


class MountState:
    """What the operations of one mount share. To be used with the tables' lock; all methods raise OSError only."""

    def __init__(self, root: Fd, lock: TablesLock, stats: Counters, options: MountOptions, max_fds: int) -> None:
        """Begin with a backing tree.

        root     its directory (O_PATH will do), which stays the caller's
        max_fds  how many fds this process may have
        """
        kernel, seen, n_open = Kernel(), look_at(root), n_handles(max_fds)
        self.root, self.lock, self.stats, self.options = root, lock, stats, options
        self.is_shared = options.coherence is Coherence.SHARED
        self.has_handles = kernel.filesystem(root) != FUSE_MAGIC
        """A file handle stays that of the same inode: a FUSE filesystem may forget an inode, and number anew."""
        handle = self.lasting(handle_of(root))
        self._mount_fd = _open_mount(root, handle)
        self.nodes = Tables(
            source_key(seen, handle), seen, root=root, n_fds=n_open + _N_DIRECTORIES_MIN, n_handles=n_open,
            is_for_all=options.default_permissions, is_shared=self.is_shared, racy_ns=_RACY_NS,
        )  # fmt: skip
        self.cache = DaemonCache(lock, self.nodes, stats, options.cache_bytes, options.timeout_s)
        self.retries = EstaleRetries(lock, self.nodes)
        self.prefetch = Prefetch(
            lock, self.cache, seen.dev,
            has_handles=self.has_handles, n_in_flight=options.n_in_flight, n_fds=n_spare(max_fds),
        )  # fmt: skip
        self.timeouts = AttrTimeouts(self.nodes)
        self.passthrough = Passthrough(lock, self.nodes, root)
        self.stored = StoredNotices(lock, self.nodes, self.timeouts)
        lock.submounts.tell = self._wait_at
        lock.submounts.asks = not kernel.answers_at_once(root)
        self.has_common_xattrs = are_for_all(root)
        """The filesystem below has the same extended attributes for every user."""
        self.core = self._make_core()

    def _make_core(self) -> Core:
        lock, options = self.lock, self.options
        calls = SimpleNamespace(
            took=lock.took, errno_of=errno_of, changed=self.stats.changed, forget=self._forget, unused=self._end_unused,
            meets=lock.submounts.are_asked,
            told_stale=partial(_with_tables, lock, self.retries.add),
            refused=partial(_with_tables, lock, self.passthrough.refused),
            folds=partial(_with_tables, lock, self._may_fold),
            stored=partial(_with_tables, lock, self.stored.note),
            came_back=partial(_with_tables, lock, self.cache.clear),
        )  # fmt: skip
        asks = 0 if lock.submounts.asks else syscalls.AT_STATX_DONT_SYNC
        return Core(
            calls=calls,
            mutex=lock.mutex,
            nodes=self.nodes,
            cells=self.stats.cells,
            rests=self.stats.rests,
            cell_of=array("I", (CELL_OF_OPCODE.get(opcode, 0) for opcode in range(_N_OPCODES))).tobytes(),
            layout=LAYOUT,
            mount_fd=-1 if self._mount_fd is None else self._mount_fd,
            statx_flags=asks | (0 if self.has_handles else _WITHOUT_HANDLES),
            is_measured=lock.latency is not None,
            is_flushed=not Kernel().is_local(self.root),
            shows_xattrs=options.has_xattrs,
            is_for_all=self.has_common_xattrs,
            hides_labels=not is_selinux_enabled(),
            hides_trash=not options.show_trash,
            lifetime_s=options.timeout_s,
            quick_ns=QUICK_NS,
            nobody_gid=in_no_group().gid,
            at_rest=at_rest(),
            no_capabilities=with_effective(0),
        )

    def close(self) -> None:
        """Close all fds; what clients have open is lost to them."""
        with self.lock:
            self.prefetch.close()
            self.nodes.close()
            self.retries.close()
            if self._mount_fd is not None:
                self._mount_fd.close()

    def lasting(self, handle: bytes) -> bytes:
        """A file handle, if it stays that of the same inode."""
        return handle if self.has_handles else b""

    def do(self, request: Request, held: int = -1) -> bytes:
        """Have the core do a whole request; the body of its reply. held: an fd of what the request is about, or -1"""
        return self.lock.call(self.core.do, request, held)

    def count(self, cell: int, begun_ns: int, *, has_failed: bool) -> None:
        """A request that Python has replied to has ended. cell: of CELL_OF; begun_ns: of perf_counter_ns"""
        self.core.count(cell, perf_counter_ns() - begun_ns, has_failed)
        self.stats.changed()

    def fd_of(self, directory: Node) -> Fd:
        """The fd of a directory, open for as long as the caller has it. Raises  OSError ESTALE: it is gone"""
        fd = self.nodes.directory_fd(directory)
        return self.core.hold(directory) if fd is None else fd

    # What names mean, and whether that may be remembered: the store's names change behind the mount; and where letter
    # case does not matter, one name is many.

    def is_fickle(self, directory: Node, fd: Fd, name: bytes) -> bool:
        """Whether a name must not be remembered. fd: the directory's"""
        return (name.startswith(STORE) and is_stores_own(name)) or self.are_fickle_in(directory, fd)

    def are_fickle_in(self, directory: Node, fd: Fd) -> bool:
        """Whether no name in a directory may be remembered. fd: of it"""
        return is_below(self.nodes, directory) or self._may_fold(directory, fd)

    def _may_fold(self, directory: Node, fd: int) -> bool:
        """Whether a name in a directory may have other spellings. fd: of it"""
        known, device = self.lock.submounts.folding, directory.source[0]
        if directory.is_case_sensitive:
            return False
        if device in known:
            directory.is_case_sensitive = not known[device]
            return known[device]
        folds, is_common = self.lock.call(case_folding, fd)
        if folds is not None and is_common:
            known[device] = folds
            if device == self.nodes.root.dev:
                self.nodes.is_case_sensitive = not folds
        directory.is_case_sensitive = folds is False
        return folds is not False

    def cached_name(self, directory: Node, name: bytes) -> EntryParam | None:
        """What the cache has of a name, whose reference is not counted yet: that must follow. None: it has nothing"""
        if is_stores_own(name) or is_below(self.nodes, directory):
            return None
        found = self.cache.name(directory, name)
        if found is None:
            return None
        source, left_s = found
        if source is None:
            return EntryParam(NodeId(0), NOTHING, left_s)
        attributes = self.cache.attributes(source)
        if attributes is None:
            return None
        seen, also_left_s = attributes
        return EntryParam(self.nodes.learn(source, seen, directory, name).nodeid, seen, min(left_s, also_left_s))

    # What the native core calls, without the lock.

    def _forget(self, source: SourceKey | None, directory: Node | None, name: bytes, has_ended: bool) -> None:
        with self.lock:
            names = () if directory is None else ((directory, name),)
            self.cache.forget(() if source is None else (source,), names)
            if source is not None and has_ended:
                self.cache.metadata.directory_changed(source)

    def _end_unused(self, node: Node) -> None:
        """The kernel has forgotten a node, or was not sent it after all."""
        with self.lock.held():
            if self.nodes.drop_unused(node):
                if node.is_passed:
                    self.cache.metadata.attributes_changed(node.source)  # attributes read meanwhile may be old
                self.prefetch.drop(node)
                self.retries.drop(node)

    def _wait_at(self) -> None:
        with self.lock.held():
            self.nodes.wait_at(b"".join(name + b"\0" for name in self.lock.submounts.names))


def _with_tables(lock: TablesLock, act: Callable[..., R], *args: object) -> R:
    with lock:
        return act(*args)


def _open_mount(root: Fd, handle: bytes) -> Fd | None:
    """An fd on the mount that file handles are opened with; None where they can't be opened. handle: the root's"""
    if not handle:
        return None
    fd = Fd(os.open(root.path(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        open_handle(fd, handle, os.O_PATH).close()
    except OSError:
        fd.close()
        return None
    return fd


def errno_of(error: Exception, failed: object) -> int:
    """The errno for the client; what is no OSError is a fault of ours, and in the log."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if isinstance(error, (OverflowError, struct.error)):  # a number of the client's that no system call takes
        return errno.EINVAL
    _log.exception("%s failed", failed)
    return errno.EIO
