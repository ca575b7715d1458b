"""FUSE passthrough: the kernel reads and writes files on the backing filesystem without sending requests.

An open inode uses either passthrough or the page cache: the kernel fails an open in the other mode with EIO. So the
first open of a node decides the mode of all opens until the last handle is released, when the kernel leaves the mode.

Source  docs/internals/decisions/0064-passthrough.md
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

_REPORTS_LATE = "the backing filesystem is FUSE, which may report a failed write only when the writing handle is closed"
_TOO_OLD = "it needs Linux 6.9 or later with CONFIG_FUSE_PASSTHROUGH"
_REASONS = {
    errno.EPERM: "it needs root (CAP_SYS_ADMIN outside user namespaces)",
    errno.ELOOP: "too many stacked filesystems below this mount (overlayfs)",
    errno.ENOTTY: _TOO_OLD,
    errno.EOPNOTSUPP: _TOO_OLD,
}
"""Reasons, by errno, that apply to all files of a filesystem."""

_log = logging.getLogger(__name__)


def why_unsupported_on(fd: int) -> str | None:
    """Return why no file of this filesystem may be passed through; None if files may be passed through.

    A FUSE filesystem may report a failed write only when the handle that wrote is closed. In passthrough, this handle
    is the kernel's own, and the kernel discards the error.
    """
    return _REPORTS_LATE if statfs_type(fd) == FUSE_MAGIC else None


def stack_depth(root: int) -> int:
    """Return max_stack_depth for INIT, given the backing tree. The kernel allows at most 2 stacked filesystems.

    An overlayfs can be stacked on a FUSE mount of depth 1, but nothing on one of depth 2. So the depth is 2 only if
    passthrough needs it.
    """
    return 2 if statfs_type(root) == OVERLAY_MAGIC else 1


def why_refused(device: int) -> str | None:
    """Return why the kernel refuses backing files for this mount; None if it accepts them. This is tried with a file in
    memory."""
    with Fd(os.memfd_create("trashd")) as fd:
        try:
            close_backing(device, open_backing(device, fd))
        except OSError as error:
            return _reason_of(error.errno or 0)
    return None


def _reason_of(number: int) -> str:
    return _REASONS.get(number) or os.strerror(number)


class Passthrough:
    """Decides which files of one mount are passed through. Callers must hold the tables lock, or be on the trio thread.

    While clients write to a file without the daemon, its attributes are unsteady: neither the kernel nor the daemon may
    cache them. They are steady again once no handle can write any more. But a file that was opened for reading and
    writing may be mapped, and a mapping outlives its handle. Its attributes stay unsteady until the node ends.
    """

    def __init__(self, lock: TablesLock, nodes: Tables, root: Fd) -> None:
        """Set up with passthrough off. Call `start` when the kernel has agreed to passthrough.

        root  the backing tree's directory, owned by the caller
        """
        self._lock = lock
        self._nodes = nodes
        self._root = root
        self._on_give_up: Callable[[str], None] | None = None  # None: nothing is passed through (any more)
        self._logged_errnos: set[int] = set()

    def start(self, on_give_up: Callable[[str], None]) -> None:
        """Pass through the files that are opened from now on, unless they are open already.

        on_give_up  called with the reason, in any thread, if the kernel turns out to refuse passthrough on this mount
        """
        self._on_give_up = on_give_up
        self._nodes.passes_through = True

    def stop(self) -> None:
        """Pass through no more files; open files are not affected."""
        self._on_give_up = None
        self._nodes.passes_through = False

    def close(self) -> None:
        """Release all backing ids. Otherwise the kernel would keep the files open as long as a dead mount exists."""
        self.stop()
        with self._lock:
            self._nodes.drop_backing()

    def note_refusal(self, node: Node, number: int, fd: int) -> None:
        """Give up passthrough if the kernel would refuse all files; otherwise log the refusal, once per errno."""
        if number in _REASONS and statx(fd).mnt_id == statx(self._root).mnt_id:
            on_give_up = self._on_give_up
            self.stop()
            if on_give_up is not None:
                on_give_up(_reason_of(number))
        elif number not in self._logged_errnos:
            self._logged_errnos.add(number)
            _log.warning("%s and similar files are not passed through: %s", printable(node.name), _reason_of(number))
