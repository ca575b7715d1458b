"""FUSE passthrough: files that the kernel reads and writes itself, on the backing filesystem, without asking us.

An inode that is open is either in this mode or in that of the kernel's page cache: an open that says the other is
refused by the kernel with EIO. So the first open of a node decides for all, until the last one is released; the kernel
has let go of the mode by then.

Source  docs/decisions/0064-passthrough.md
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_device import close_backing, open_backing
from fusefs.linux.kernel import FUSE_MAGIC, OVERLAY_MAGIC
from fusefs.linux.syscalls import statfs_type, statx
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.tables_lock import TablesLock

_TELLS_LATE = "the backing filesystem is FUSE, and may report a failed write only when its own handle is closed"
_TOO_OLD = "it needs Linux 6.9 or later with CONFIG_FUSE_PASSTHROUGH"
_REASONS = {
    errno.EPERM: "it needs root (CAP_SYS_ADMIN outside user namespaces)",
    errno.ELOOP: "too many stacked filesystems below (overlayfs)",
    errno.ENOTTY: _TOO_OLD,
    errno.EOPNOTSUPP: _TOO_OLD,
}
"""That hold for all files of a filesystem."""

_log = logging.getLogger(__name__)


def why_not_here(fd: int) -> str | None:
    """Why nothing on a filesystem may be passed through; None: it may be.

    A FUSE filesystem can tell of a failed write at the close of the handle that it came by, and at no other's; and the
    kernel closes its own without a word.
    """
    return _TELLS_LATE if statfs_type(fd) == FUSE_MAGIC else None


def stack_depth(root: int) -> int:
    """What the kernel is told in INIT of a mount of that tree: it counts filesystems that lie on each other, up to 2.

    What lies on a mount of ours that says 1 may be an overlayfs, of one that says 2 nothing: so 2 only where it takes
    that to pass anything through.
    """
    return 2 if statfs_type(root) == OVERLAY_MAGIC else 1


def why_refused(device: int) -> str | None:
    """Why the kernel opens no backing file for a mount, tried on a file in memory; None: it does."""
    with Fd(os.memfd_create("trashd")) as fd:
        try:
            close_backing(device, open_backing(device, fd))
        except OSError as error:
            return _reason_of(error.errno or 0)
    return None


def _reason_of(number: int) -> str:
    """Why the kernel has no backing file for us, for people."""
    return _REASONS.get(number) or os.strerror(number)


class Passthrough:
    """What is open on one mount, and how. Touched on the trio thread or under the tables' lock, as those are.

    Of what is written without us the present state is unknown: its attributes are not steady, and are not believed,
    neither by the kernel nor by our memory. They are steady again when none can write any more; or when the node ends,
    if one had it open for reading and writing: it may have mapped the file, and a mapping outlives its handle.
    """

    def __init__(self, lock: TablesLock, nodes: Tables, root: Fd) -> None:
        """Begin without it; to be started when the kernel has agreed.

        root  the backing tree's directory, which stays its owner's
        """
        self._lock = lock
        self._nodes = nodes
        self._root = root
        self._give_up: Callable[[str], None] | None = None  # None: nothing is passed through (any more)
        self._told: set[int] = set()

    def start(self, give_up: Callable[[str], None]) -> None:
        """From now on what is not open yet is passed through when it is opened.

        give_up  told why, when it turns out that nothing can be on this mount; by any thread
        """
        self._give_up = give_up
        self._nodes.passes = True

    def stop(self) -> None:
        """Nothing more from now on; what is open stays as it is."""
        self._give_up = None
        self._nodes.passes = False

    def close(self) -> None:
        """Let all ids go: the kernel would keep them, and the files, as long as a dead mount stays."""
        self.stop()
        with self._lock:
            self._nodes.drop_backing()

    def refused(self, node: Node, number: int, fd: int) -> None:
        """The kernel has refused a backing file, with an errno: say so once, or that there will be none."""
        if number in _REASONS and statx(fd).mnt_id == statx(self._root).mnt_id:
            give_up = self._give_up
            self.stop()
            if give_up is not None:
                give_up(_reason_of(number))
        elif number not in self._told:
            self._told.add(number)
            _log.warning("%s and similar files are not passed through: %s", printable(node.name), _reason_of(number))
