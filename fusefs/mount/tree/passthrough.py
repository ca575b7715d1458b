"""FUSE passthrough: files that the kernel reads and writes itself, on the backing filesystem, without asking us.

An inode that is open is either in this mode or in that of the kernel's page cache: an open that says the other is
refused by the kernel with EIO. So the first open of a node decides for all, until the last one is released; the kernel
has let go of the mode by then.

Source  docs/decisions/0012-passthrough.md
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_device import close_backing, forget_attributes, open_backing, takes_direct
from fusefs.linux.kernel import FUSE_MAGIC, OVERLAY_MAGIC
from fusefs.linux.statx import look_at
from fusefs.linux.syscalls import statfs_type, statx
from fusefs.linux.thread_credentials import ITSELF, ThreadCredentials, call_as
from fusefs.mount.native._core import Node
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.act_as import ContentWriters

_TELLS_LATE = "the filesystem below is FUSE, and may tell of a failed write when its own handle is closed"
_TOO_OLD = "it takes Linux 6.9 with CONFIG_FUSE_PASSTHROUGH"
_REASONS = {
    errno.EPERM: "it takes root (CAP_SYS_ADMIN outside of user namespaces)",
    errno.ELOOP: "too many filesystems lie on each other below (overlayfs)",
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
            return _reason_of(error)
    return None


def _reason_of(error: OSError) -> str:
    """Why the kernel has no backing file for us, for people."""
    return _REASONS.get(error.errno or 0) or os.strerror(error.errno or 0)


@dataclass(slots=True, eq=False)
class OpenMode:
    """How a node is open.

    backing_id  0: the kernel keeps its pages, and asks us for them
    writer      the credentials that it is written with
    n_open      handles
    n_writers   those of them that can write, if it is passed through
    """

    backing_id: int
    writer: ThreadCredentials = ITSELF
    n_open: int = 0
    n_writers: int = 0


class Passthrough:
    """What is open on one mount, and how. Touched on the trio thread or under the tables' lock, as those are.

    Of what is written without us the present state is unknown: its attributes are not steady, and are not believed,
    neither by the kernel nor by our memory. They are steady again when none can write any more; or when the node ends,
    if one had it open for reading and writing: it may have mapped the file, and a mapping outlives its handle.
    """

    def __init__(self, lock: TablesLock, cache: DaemonCache, root: Fd, *, is_shared: bool) -> None:
        """Begin without it; to be started when the kernel has agreed.

        root       the backing tree's directory, which stays its owner's
        is_shared  attributes are not believed for long anyway, and we must not be in the way of those behind the mount
        """
        self._lock = lock
        self._cache = cache
        self._root = root
        self._root_dev = look_at(root).dev
        self._is_shared = is_shared
        self._writers_of = ContentWriters()
        self._device = -1
        self._give_up: Callable[[str], None] | None = None  # None: nothing is passed through (any more)
        self._modes: dict[Node, OpenMode] = {}
        self._writers: set[int] = set()
        self._mapped: set[Node] = set()
        self._told: set[int] = set()

    def __len__(self) -> int:
        """How many ids the kernel keeps for us."""
        return sum(1 for mode in self._modes.values() if mode.backing_id)

    def connect(self, device: int) -> None:
        """Have the session: /dev/fuse, which stays its owner's."""
        self._device = device

    def start(self, give_up: Callable[[str], None]) -> None:
        """From now on what is not open yet is passed through when it is opened.

        give_up  told why, when it turns out that nothing can be on this mount; by any thread
        """
        self._give_up = give_up

    def stop(self) -> None:
        """Nothing more from now on; what is open stays as it is."""
        self._give_up = None

    def close(self) -> None:
        """Let all ids go: the kernel would keep them, and the files, as long as a dead mount stays."""
        self.stop()
        for mode in self._modes.values():
            if mode.backing_id:
                close_backing(self._device, mode.backing_id)
        self._modes.clear()

    def opened(self, node: Node, fh: Fd, flags: int, writer: int | None) -> int:
        """How a node is open by one more handle, for the reply: the id of its file; 0: the kernel keeps its pages.

        fh      the handle, which is an fd of it
        flags   of the client's open
        writer  by `writer_of`; None: unknown
        Raises  OSError EINVAL: the filesystem below has no direct I/O (O_DIRECT); then it is not open so
        """
        is_direct = not flags & os.O_DIRECT or self._lock.call(takes_direct, fh)
        mode = self._modes.get(node)
        if not is_direct and (node in self._mapped or (mode is not None and mode.backing_id)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        if mode is None:
            written_as = self._writers_of.of(node.source[0], fh, writer)
            mode = self._modes[node] = OpenMode(self._open(node, fh, written_as) if is_direct else 0, written_as)
        mode.n_open += 1
        if not mode.backing_id:
            return 0
        self._cache.pass_by(node.source)
        if writes:
            mode.n_writers += 1
            self._writers.add(fh)
            self._cache.unsteady.add(node.source)
            if flags & os.O_ACCMODE == os.O_RDWR and node not in self._mapped:
                self._may_be_mapped(node, is_new=bool(flags & os.O_CREAT))
        return mode.backing_id

    def writer_of(self, node: Node, fd: int) -> ThreadCredentials:
        """The credentials that a node is written with, of which that is an fd."""
        mode = self._modes.get(node)
        return self._writers_of.of(node.source[0], fd, None) if mode is None else mode.writer

    def is_written_late(self, node: Node) -> bool:
        """Whether what is written to memory comes to us later: the kernel keeps its own pages of what is open."""
        mode = self._modes.get(node)
        return mode is None or not mode.backing_id

    def _may_be_mapped(self, node: Node, *, is_new: bool) -> None:
        """Of what is written to memory the kernel tells itself nothing: it must not believe what it was told before."""
        if not self._is_shared:
            self._mapped.add(node)
        if not is_new:
            forget_attributes(self._device, node.nodeid)

    def released(self, node: Node, fh: int) -> int:
        """A handle is released; an id to be let go, by `close_id`, or 0."""
        mode = self._modes.get(node)
        if mode is None:
            return 0  # a directory's
        mode.n_open -= 1
        if not mode.n_open:
            del self._modes[node]
        if not mode.backing_id:
            return 0
        if fh in self._writers:
            self._writers.discard(fh)
            mode.n_writers -= 1
        if node not in self._mapped:
            if not mode.n_open:
                self._cache.settle(node.source)
            if not mode.n_writers:
                self._cache.unsteady.discard(node.source)
        return 0 if mode.n_open else mode.backing_id

    def close_id(self, backing_id: int) -> None:
        """Let an id go that `released` gave. It may be the last that keeps a file open: that may take its time."""
        self._lock.call(close_backing, self._device, backing_id)

    def drop(self, node: Node) -> None:
        """A node has ended: it is not open."""
        if node in self._mapped:
            self._mapped.discard(node)
            self._cache.settle(node.source)
            self._cache.unsteady.discard(node.source)

    def _open(self, node: Node, fh: Fd, writer: ThreadCredentials) -> int:
        give_up = self._give_up
        if give_up is None or (node.source[0] != self._root_dev and why_not_here(fh)):
            return 0
        try:
            return call_as(writer, open_backing, self._device, fh)
        except OSError as error:
            number = error.errno or 0
            if number in _REASONS and statx(fh).mnt_id == statx(self._root).mnt_id:
                self.stop()
                give_up(_reason_of(error))
            elif number not in self._told:
                self._told.add(number)
                _log.warning("%s and others alike are not passed through: %s", printable(node.name), _reason_of(error))
            return 0
