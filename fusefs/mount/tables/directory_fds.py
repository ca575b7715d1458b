"""How a node's inode is reached: by its name in a directory that is open, or by its file handle; always verified.

Fds of directories are kept, up to some number of them; nothing else is, so that no deleted file's blocks are held.
A name that means something else by now is no obstacle where the backing filesystem has file handles.
"""

from __future__ import annotations

import errno
import os

from fusefs.core.inode_attributes import Attributes
from fusefs.core.nodeids import source_key
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import FUSE_MAGIC
from fusefs.linux.statx import TO_PEEK, look_at, open_handle
from fusefs.linux.syscalls import handle_of, statfs_type
from fusefs.mount.native._core import Node, Tables, counted_fd
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.tables_lock import TablesLock

TO_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def have_handles(root: Fd) -> bool:
    """Whether a file handle stays that of the same inode: a FUSE filesystem may forget an inode, and number anew."""
    return statfs_type(root) != FUSE_MAGIC


class DirectoryFds:
    """The backing tree by nodes. All methods raise OSError: ESTALE for what is not to be found any more."""

    def __init__(self, root: Fd, nodes: Tables, lock: TablesLock, retries: EstaleRetries) -> None:
        """Begin at a directory.

        root     O_PATH or readable; stays its owner's
        retries  what is held for a lost race is another way to it
        """
        self._root = root
        self._nodes = nodes
        self._lock = lock
        self._retries = retries
        self.has_handles = have_handles(root)
        self.mount = self._open_mount()

    def _open_mount(self) -> Fd | None:
        """An fd on the mount that handles are opened with; None where they can't be opened."""
        handle = self.handle_of(self._root)
        if not handle:
            return None
        fd = Fd(os.open(self._root.path(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            open_handle(fd, handle, os.O_PATH).close()
        except OSError:
            fd.close()
            return None
        return fd

    def close(self) -> None:
        """Open nothing any more."""
        if self.mount is not None:
            self.mount.close()

    def handle_of(self, fd: int) -> bytes:
        """The file handle of what an fd holds; empty where there are none that last."""
        return self.lasting(handle_of(fd))

    def lasting(self, handle: bytes) -> bytes:
        """A handle, if it stays that of the same inode."""
        return handle if self.has_handles else b""

    def fd_of(self, directory: Node) -> Fd:
        """The O_PATH fd of a directory, open for as long as the caller has it."""
        fd = self._nodes.directory_fd(directory)
        return self._nodes.keep_directory_fd(directory, self._find(directory)) if fd is None else fd

    def open_to_read(self, directory: Node) -> Fd:
        """A new fd of a directory, to be read, of one that the kernel has opened already.

        Raises  OSError ENOENT: it was removed behind the mount; any filesystem says so to those that have it open
        """
        try:
            return Fd(self._lock.call(os.open, self.fd_of(directory).path(), TO_READ))
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error

    def hold(self, node: Node) -> Fd:
        """An O_PATH fd of any node, open for as long as the caller has it."""
        return self.fd_of(node) if node.is_directory else counted_fd(self._find(node))

    def hold_by_name(self, node: Node, *, is_alone: bool) -> tuple[Fd, Attributes] | None:
        """An O_PATH fd of any node, the caller's own, and what it is; by its name, where its directory is open.

        is_alone  names don't change behind the mount: its birth tells the incarnation, where there is one
        Returns   None if it is not to be had so
        """
        dir_fd = None if node.parent is None else self._nodes.directory_fd(node.parent)
        if dir_fd is None:
            return None
        try:
            fd = counted_fd(self._lock.call(os.open, node.name, TO_PEEK, dir_fd=dir_fd))
        except OSError:
            return None  # the other way tells why
        seen = self._seen_to_be(node, fd, is_alone=is_alone)
        return None if seen is None else (fd, seen)

    def _seen_to_be(self, node: Node, fd: Fd, *, is_alone: bool) -> Attributes | None:
        """What an fd holds, if that is the node, as in `hold_by_name`; else it is closed."""
        call = self._lock.call
        try:
            seen = call(look_at, fd)
            is_it = is_alone and seen.btime_ns and node.is_seen_in(seen)
            if is_it or source_key(seen, call(self.handle_of, fd)) == node.source:
                return seen
        except BaseException:
            fd.close()
            raise
        fd.close()
        return None

    def _find(self, node: Node) -> Fd:
        """A new fd: by name from an open directory, else by handle, else by its names from the root."""
        held = self._retries.fd_of(node) if self._retries else None
        if held is not None:
            return Fd(os.dup(held))
        if node.last is not None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        for parent, name in node.places():
            if self._nodes.directory_fd(parent) is not None:
                fd = self._by_name(node, parent, name)
                if fd is not None:
                    return fd
        device, handle = node.source[:2]
        if self.mount is not None and isinstance(handle, bytes) and device == self._nodes.root.dev:
            return self._lock.call(open_handle, self.mount, handle, TO_PEEK)
        for parent, name in node.places():
            fd = self._by_name(node, self._open_above(parent), name)
            if fd is not None:
                return fd
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def _by_name(self, node: Node, parent: Node, name: bytes) -> Fd | None:
        try:
            fd = Fd(self._lock.call(os.open, name, TO_PEEK, dir_fd=self.fd_of(parent)))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return None  # moved behind the mount
            raise
        return None if self._seen_to_be(node, fd, is_alone=False) is None else fd

    def _open_above(self, directory: Node) -> Node:
        """Open what leads to a directory, from above: a deep one needs no deep stack."""
        closed = []
        at: Node | None = directory
        while at is not None and self._nodes.directory_fd(at) is None:
            closed.append(at)
            at = at.parent
        for one in reversed(closed):
            self.fd_of(one)
        return directory
