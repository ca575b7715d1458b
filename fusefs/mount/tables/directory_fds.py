"""Directories' fds, and file handles, of a backing filesystem. How a node is reached is in native/reach.c."""

from __future__ import annotations

import errno
import os

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import FUSE_MAGIC
from fusefs.linux.statx import open_handle
from fusefs.linux.syscalls import handle_of, statfs_type
from fusefs.mount.native._core import Core, Node, Tables
from fusefs.mount.tables.tables_lock import TablesLock

TO_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def have_handles(root: Fd) -> bool:
    """Whether a file handle stays that of the same inode: a FUSE filesystem may forget an inode, and number anew."""
    return statfs_type(root) != FUSE_MAGIC


class DirectoryFds:
    """The backing tree by nodes. All methods raise OSError: ESTALE for what is not to be found any more."""

    core: Core

    def __init__(self, root: Fd, nodes: Tables, lock: TablesLock) -> None:
        """Begin at a directory. root: O_PATH or readable; stays its owner's"""
        self._root = root
        self._nodes = nodes
        self._lock = lock
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
        """The fd of a directory, open for as long as the caller has it."""
        fd = self._nodes.directory_fd(directory)
        return self.core.hold(directory) if fd is None else fd

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
