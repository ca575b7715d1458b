"""The state that all operations of a mount share: tables, caches, their lock, the native core, and its callbacks.

Everything is synchronous, so that nothing happens between finding a node and counting its reference (I8). Callers must
hold the tables lock, which is released during each call to the backing filesystem.
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
from fusefs.core.mount_options import Coherence, MountOptions
from fusefs.core.names import STORE
from fusefs.core.slow_backing import QUICK_NS
from fusefs.linux import syscalls
from fusefs.linux.credentials import in_no_group, own_capability_sets, sets_with_effective
from fusefs.linux.fd import Fd
from fusefs.linux.filesystem_probes import find_case_folding
from fusefs.linux.kernel import FUSE_MAGIC, Kernel
from fusefs.linux.statx import open_handle, stat_at
from fusefs.linux.syscalls import name_to_handle_at
from fusefs.linux.xattrs import are_same_for_all_users, is_selinux_enabled
from fusefs.mount.native._core import Core, Node, Tables
from fusefs.mount.places.counters import CELL_OF, LAYOUT, Counters
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.prefetch import Prefetch
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.forget_stored import StoredNotices
from fusefs.mount.tree.kernel_timeouts import NO_ATTRIBUTES, AttrTimeouts, EntryParam
from fusefs.mount.tree.passthrough import Passthrough
from fusefs.mount.tree.trashd_dir import is_in_store
from fusefs.store.layout import is_store_name

R = TypeVar("R")

_SPARE_FDS, _SPARE_FDS_MAX = 64, 2048
"""Fds for the daemon itself, and for operations that hold one briefly; with many waiting threads, these add up."""
_N_DIRECTORIES_MIN = 16
_RACY_NS = 2_000_000_000
"""The coarsest timestamp granularity of any filesystem. If a server's clock is behind ours by more than this, two
writes in one tick of its clock can leave pages cached that are out of date."""
_WITHOUT_HANDLES = 1 << 30
"""Value of WITHOUT_HANDLES in native/core.h."""
_COUNTER_NAMES = {
    Opcode.BATCH_FORGET: "forget", Opcode.RENAME2: "rename", Opcode.COPY_FILE_RANGE_64: "copy_file_range",
    Opcode.READDIRPLUS: "readdir",
}  # fmt: skip
CELL_OF_OPCODE: Final[dict[int, int]] = {
    opcode: CELL_OF[name] for opcode in Opcode if (name := _COUNTER_NAMES.get(opcode, opcode.name.lower())) in CELL_OF
}
"""Maps an opcode to the cell where its counters begin, for requests that are counted."""
_N_OPCODES = 64
"""Size of `cell_of` in native/core.h."""

_log = logging.getLogger(__name__)


def n_spare_fds(max_fds: int) -> int:
    """Return how many fds are reserved for the daemon itself. max_fds: the process's limit"""
    return max(_SPARE_FDS, min(max_fds // 4, _SPARE_FDS_MAX))


def n_client_handles(max_fds: int) -> int:
    """Return how many handles all clients of a mount share. The remaining fds hold directories open."""
    return max(max_fds - n_spare_fds(max_fds) - _N_DIRECTORIES_MIN, _N_DIRECTORIES_MIN)


class MountState:
    """The state of one mount. Callers must hold the tables lock. Methods raise nothing but OSError."""

    def __init__(self, root: Fd, lock: TablesLock, stats: Counters, options: MountOptions, max_fds: int) -> None:
        """Set up the state for a backing tree.

        root     the tree's directory (O_PATH is enough), owned by the caller
        max_fds  how many fds this process may have
        """
        kernel, root_stat, n_open = Kernel(), stat_at(root), n_client_handles(max_fds)
        self.root, self.lock, self.stats, self.options = root, lock, stats, options
        self.is_shared = options.coherence is Coherence.SHARED
        self.has_handles = kernel.filesystem(root) != FUSE_MAGIC
        """Whether a file handle identifies an inode for good. A FUSE filesystem may forget and renumber an inode."""
        handle = self.stable_handle(name_to_handle_at(root))
        self._mount_fd = _open_mount(root, handle)
        self.nodes = Tables(
            source_key(root_stat, handle), root_stat, root=root, n_fds=n_open + _N_DIRECTORIES_MIN, n_handles=n_open,
            is_for_all=options.default_permissions, is_shared=self.is_shared, racy_ns=_RACY_NS,
        )  # fmt: skip
        self.cache = DaemonCache(lock, self.nodes, stats, options.cache_bytes, options.timeout_s)
        self.retries = EstaleRetries(lock, self.nodes)
        self.prefetch = Prefetch(
            lock, self.cache, root_stat.dev,
            has_handles=self.has_handles, n_in_flight=options.n_in_flight, n_fds=n_spare_fds(max_fds),
        )  # fmt: skip
        self.timeouts = AttrTimeouts(self.nodes)
        self.passthrough = Passthrough(lock, self.nodes, root)
        self.stored_notices = StoredNotices(lock, self.nodes, self.timeouts)
        lock.submounts.on_change = self._set_blocking_names
        lock.submounts.asks_server = not kernel.needs_no_server(root)
        self.has_common_xattrs = are_same_for_all_users(root)
        """Whether all users see the same extended attributes on the backing filesystem."""
        self.core = self._make_core()

    def _make_core(self) -> Core:
        lock, options = self.lock, self.options
        calls = SimpleNamespace(
            took=lock.note_latency, errno_of=errno_of, changed=self.stats.note_change, forget=self._forget,
            unused=self._end_unused, meets=lock.submounts.are_up_to_date,
            told_stale=partial(_with_tables, lock, self.retries.add_process),
            refused=partial(_with_tables, lock, self.passthrough.note_refusal),
            folds=partial(_with_tables, lock, self._may_fold),
            stored=partial(_with_tables, lock, self.stored_notices.note_stored),
            came_back=partial(_with_tables, lock, self.cache.clear),
        )  # fmt: skip
        sync_flag = 0 if lock.submounts.asks_server else syscalls.AT_STATX_DONT_SYNC
        return Core(
            calls=calls,
            mutex=lock.mutex,
            nodes=self.nodes,
            cells=self.stats.cells,
            rests=self.stats.needs_wake,
            cell_of=array("I", (CELL_OF_OPCODE.get(opcode, 0) for opcode in range(_N_OPCODES))).tobytes(),
            layout=LAYOUT,
            mount_fd=-1 if self._mount_fd is None else self._mount_fd,
            statx_flags=sync_flag | (0 if self.has_handles else _WITHOUT_HANDLES),
            is_measured=lock.latency is not None,
            is_flushed=not Kernel().is_local(self.root),
            shows_xattrs=options.has_xattrs,
            is_for_all=self.has_common_xattrs,
            hides_labels=not is_selinux_enabled(),
            hides_trash=not options.show_trash,
            lifetime_s=options.timeout_s,
            quick_ns=QUICK_NS,
            nobody_gid=in_no_group().gid,
            at_rest=own_capability_sets(),
            no_capabilities=sets_with_effective(0),
        )

    def close(self) -> None:
        """Close all fds, including those of files that clients have open."""
        with self.lock:
            self.prefetch.close()
            self.nodes.close()
            self.retries.close()
            if self._mount_fd is not None:
                self._mount_fd.close()

    def stable_handle(self, handle: bytes) -> bytes:
        """Return the file handle if it identifies an inode for good, otherwise an empty one."""
        return handle if self.has_handles else b""

    def do(self, request: Request, held: int = -1) -> bytes:
        """Have the core handle a request; return the reply's body. held: an fd of the inode in question, or -1"""
        return self.lock.call(self.core.do, request, held)

    def count(self, cell: int, begun_ns: int, *, has_failed: bool) -> None:
        """Count a request that Python has replied to. cell: from CELL_OF; begun_ns: from perf_counter_ns"""
        self.core.count(cell, perf_counter_ns() - begun_ns, has_failed)
        self.stats.note_change()

    def directory_fd(self, directory: Node) -> Fd:
        """Return an fd of a directory, which stays open as long as the caller keeps it. Raises  OSError ESTALE: the
        directory is gone"""
        fd = self.nodes.directory_fd(directory)
        return self.core.open_node(directory) if fd is None else fd

    # Which names may be cached. Names in a store change behind the mount. In a case-insensitive directory, one file has
    # many names.

    def is_uncacheable(self, directory: Node, fd: Fd, name: bytes) -> bool:
        """Return whether a name must not be cached. fd: of the directory"""
        return (name.startswith(STORE) and is_store_name(name)) or self.are_uncacheable_in(directory, fd)

    def are_uncacheable_in(self, directory: Node, fd: Fd) -> bool:
        """Return whether no name in a directory may be cached. fd: of the directory"""
        return is_in_store(self.nodes, directory) or self._may_fold(directory, fd)

    def _may_fold(self, directory: Node, fd: int) -> bool:
        """Return whether a name in a directory may have other spellings. fd: of the directory"""
        device, folding = directory.source[0], self.lock.submounts.folding
        is_own = device == self.nodes.root.dev
        if directory.is_case_sensitive or (is_own and self.nodes.is_case_sensitive):
            return False
        folds = folding.get(device)
        if folds is None:
            folds, is_common = self.lock.call(find_case_folding, fd)
            if folds is not None and is_common:
                folding[device] = folds
                if is_own:
                    self.nodes.is_case_sensitive = not folds
        directory.is_case_sensitive = folds is False
        return folds is not False

    def cached_entry(self, directory: Node, name: bytes) -> EntryParam | None:
        """Return the cached entry of a name; None if there is none. The caller must count the reference to its node."""
        if is_store_name(name) or is_in_store(self.nodes, directory):
            return None
        cached = self.cache.find_name(directory, name)
        if cached is None:
            return None
        source, name_valid_s = cached
        if source is None:
            return EntryParam(NodeId(0), NO_ATTRIBUTES, name_valid_s)
        attributes = self.cache.find_attributes(source)
        if attributes is None:
            return None
        inode_stat, attributes_valid_s = attributes
        return EntryParam(
            self.nodes.learn(source, inode_stat, directory, name).nodeid,
            inode_stat,
            min(name_valid_s, attributes_valid_s),
        )

    # Called by the native core without the lock.

    def _forget(self, source: SourceKey | None, directory: Node | None, name: bytes, has_ended: bool) -> None:
        with self.lock:
            names = () if directory is None else ((directory, name),)
            self.cache.forget(() if source is None else (source,), names)
            if source is not None and has_ended:
                self.cache.metadata.note_directory_change(source)

    def _end_unused(self, node: Node) -> None:
        """End a node that the kernel has forgotten, or was never sent."""
        with self.lock.ensure_held():
            if self.nodes.drop_unused(node):
                if node.is_passed:
                    self.cache.metadata.note_attributes_change(node.source)  # clients may have changed them unnoticed
                self.prefetch.drop(node)
                self.retries.release_node(node)

    def _set_blocking_names(self) -> None:
        with self.lock.ensure_held():
            self.nodes.set_blocking_names(b"".join(name + b"\0" for name in self.lock.submounts.names))


def _with_tables(lock: TablesLock, function: Callable[..., R], *args: object) -> R:
    with lock:
        return function(*args)


def _open_mount(root: Fd, handle: bytes) -> Fd | None:
    """Return an fd of the mount for opening file handles; None if they can't be opened. handle: the root's"""
    if not handle:
        return None
    fd = Fd(os.open(root.path(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        open_handle(fd, handle, os.O_PATH).close()
    except OSError:
        fd.close()
        return None
    return fd


def errno_of(error: Exception, operation: object) -> int:
    """Return the errno for the client. An unexpected exception is a bug, and is logged."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if isinstance(error, (OverflowError, struct.error)):  # a number from the client that no system call accepts
        return errno.EINVAL
    _log.exception("%s failed", operation)
    return errno.EIO
