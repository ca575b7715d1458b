"""What clients have open: a handle is the number of the daemon's own fd, or of none if that may not be needed."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

from fusefs.core.fair_share import FairShares
from fusefs.core.packed_entries import Dirent, PackedEntries
from fusefs.linux.fd import Fd
from fusefs.linux.getdents import Dirents
from fusefs.mount.native._core import Node
from fusefs.mount.tables.daemon_cache import CacheFill
from fusefs.mount.tables.prefetch import PrefetchBatch, PrefetchQueue
from fusefs.mount.tables.tables_lock import TablesLock

FOR_EXECUTION = 0x20
"""Of the flags of OPEN: the file is a program, and its handle stays for as long as it runs.

Source  include/linux/fs.h, __FMODE_EXEC
"""
_NO_FD = 1 << 32
"""More than any fd."""
_SPARE_FDS, _SPARE_FDS_MAX = 64, 2048
"""For the daemon's own needs, and those that operations hold for a moment: many, where many wait."""
LEAST_DIRECTORIES = 16


def shares_of(max_fds: int, *, is_for_all: bool) -> FairShares:
    """Of what a process that may have so many fds can have open for clients. is_for_all: for one user else"""
    return FairShares(n_for_clients(max_fds) - LEAST_DIRECTORIES, is_for_all=is_for_all)


def n_spare(max_fds: int) -> int:
    """How many fds of a process that may have so many are the daemon's own."""
    return max(_SPARE_FDS, min(max_fds // 4, _SPARE_FDS_MAX))


def n_for_clients(max_fds: int) -> int:
    """How many it can have open for clients."""
    return max(max_fds - n_spare(max_fds), 2 * LEAST_DIRECTORIES)


class DirHandle:
    """A directory that a client reads.

    is_unchanged  it is as it was when it was opened before, so what the kernel keeps of its listing is right

    Of a slow filesystem:

    at        the offset for which entries are ready
    ready     the entries from there on: some of them, or all
    queue     how far it is told
    n_new     how many of them were not looked at yet; the last ones
    batches   what was looked at for the next reply
    gathered  the entries from the beginning on, to be remembered at the end; the look began with them
    recalled  all entries, from memory
    n_passed  how many of those, or of what was gathered, were made ready
    """

    def __init__(self, node: Node, entries: Dirents | None, *, is_unchanged: bool = False) -> None:
        """entries: from its beginning; None: it is opened when something has to be read."""
        self.node = node
        self.entries = entries
        self.is_unchanged = is_unchanged
        self.is_late = entries is None
        self.at = -1
        self.ready: Sequence[Dirent] = ()
        self.queue: PrefetchQueue | None = None
        self.batches: Sequence[PrefetchBatch] = ()
        self.is_complete = False
        self.n_new = 0
        self.gathered: PackedEntries | None = None
        self.look: CacheFill | None = None
        self.recalled: PackedEntries | None = None
        self.n_passed = 0

    @property
    def known(self) -> PackedEntries | None:
        """Entries from the beginning on: all, or those that were read so far."""
        return self.gathered if self.recalled is None else self.recalled

    def opened(self, entries: Dirents) -> Dirents:
        """What it is read from from now on: this, unless another thread was quicker."""
        if self.entries is None:
            self.entries = entries
        else:
            entries.fd.close()
        return self.entries

    def close(self) -> None:
        """It is not read any more, or not from one end to the other."""
        self.gathered = self.recalled = None
        if self.look is not None:
            self.look.end()
            self.look = None


class OpenHandles:
    """Open files and directories, by handle and by node."""

    def __init__(self, lock: TablesLock, shares: FairShares) -> None:
        """Begin with none. shares: of those that there may be"""
        self._lock = lock
        self.shares = shares
        self._openers: dict[int, int] = {}
        self._nodes: dict[int, Node] = {}
        self._fds: dict[Node, list[Fd]] = {}
        self._listings: dict[int, DirHandle] = {}
        self._executed: set[int] = set()
        self._to_append: set[int] = set()
        self._late = itertools.count(_NO_FD)

    def __len__(self) -> int:
        """How many are open."""
        return len(self._nodes)

    def add(self, node: Node, fd: Fd, opener: int, flags: int = 0, listing: DirHandle | None = None) -> int:
        """A handle of a node, opened by a uid, with flags; the fd is closed with it."""
        self._open(fd, node, opener)
        self._fds.setdefault(node, []).append(fd)
        if listing is not None:
            self._listings[fd] = listing
        if flags & FOR_EXECUTION:
            self._executed.add(fd)
        if flags & os.O_APPEND:
            self._to_append.add(fd)
            _write_anywhere(fd)
        node.n_open += 1
        return int(fd)

    def add_late(self, node: Node, opener: int, listing: DirHandle) -> int:
        """A handle of a directory that is not open."""
        fh = next(self._late)
        self._open(fh, node, opener)
        self._listings[fh] = listing
        return fh

    def remove_late(self, fh: int) -> None:
        """Let such a one go."""
        self._close(fh)
        del self._listings[fh]

    def _open(self, fh: int, node: Node, opener: int) -> None:
        self._nodes[fh] = node
        self._openers[fh] = opener
        self.shares.add(opener, 1)

    def _close(self, fh: int) -> Node:
        """The node that it was of. Requests to release it come without a name, and perhaps not from its opener."""
        self.shares.add(self._openers.pop(fh), -1)
        return self._nodes.pop(fh)

    def remove(self, fh: int) -> Fd:
        """Let a handle go; its fd is the caller's now."""
        node = self._close(fh)
        self._listings.pop(fh, None)
        self._executed.discard(fh)
        self._to_append.discard(fh)
        fds = self._fds[node]
        if len(fds) == 1:
            del self._fds[node]
        else:
            fds.remove(Fd(fh))
        node.n_open -= 1
        return Fd(fh)

    def node(self, fh: int) -> Node:
        """The node that a handle is of, to be asked. Raises  WouldWait"""
        node = self._nodes[fh]
        self._lock.enter(node.source[0])
        return node

    def file(self, fh: int) -> Fd:
        """The fd of a handle."""
        return Fd(fh)

    def opened(self, fh: int) -> tuple[Node, Fd]:
        """Whose handle it is, to be asked, and its fd. Raises  WouldWait"""
        return self.node(fh), Fd(fh)

    def fd_of(self, node: Node) -> Fd:
        """An fd of some handle of a node that is open, for this operation."""
        return self._lock.lend(self._fds[node][0])

    def has_writer(self, node: Node) -> bool:
        """Whether a node is open for writing."""
        return any(self._accesses(node))

    def may_be_mapped(self, node: Node) -> bool:
        """Whether a node may be written to by mapped memory: what is mapped stays open."""
        return os.O_RDWR in self._accesses(node)

    def _accesses(self, node: Node) -> Iterator[int]:
        return (fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE for fd in self._fds.get(node, ()))

    def is_to_append(self, fh: int) -> bool:
        """Whether a handle was opened with O_APPEND."""
        return fh in self._to_append

    def runs_no_more(self, fh: int) -> None:
        """The process that ran a program by a handle has ended; the handle goes, too, perhaps later."""
        self._executed.discard(fh)

    def is_executed(self, node: Node) -> bool:
        """Whether a node runs as a program."""
        return bool(self._executed) and not self._executed.isdisjoint(self._fds.get(node, ()))

    def listing(self, fh: int) -> DirHandle:
        """What a directory's handle reads."""
        return self._listings[fh]

    def close(self) -> None:
        """Close all."""
        for fh in list(self._nodes):
            if fh < _NO_FD:
                self.remove(fh).close()


def _write_anywhere(fd: Fd) -> None:
    """An fd that was opened to append: not all that is written by its handle is. A file that may only grow keeps it."""
    with suppress(PermissionError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_APPEND)
