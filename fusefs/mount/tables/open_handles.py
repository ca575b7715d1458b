"""What clients have open: a handle is the number of the daemon's own fd, or of none if that may not be needed."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Sequence

from fusefs.core.packed_entries import Dirent, PackedEntries
from fusefs.linux.fd import Fd
from fusefs.linux.getdents import Dirents
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import CacheFill
from fusefs.mount.tables.prefetch import PrefetchBatch, PrefetchQueue

_NO_FD = 1 << 32
"""More than any fd."""
_SPARE_FDS, _SPARE_FDS_MAX = 64, 2048
"""For the daemon's own needs, and those that operations hold for a moment: many, where many wait."""
LEAST_DIRECTORIES = 16


def n_handles(max_fds: int) -> int:
    """How many handles clients of a process that may have so many fds share."""
    return n_for_clients(max_fds) - LEAST_DIRECTORIES


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
        self.opener = -1

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
    """Open files and directories, by handle."""

    def __init__(self, nodes: Tables) -> None:
        """Begin with none."""
        self._nodes = nodes
        self._listings: dict[int, DirHandle] = {}
        self._late = itertools.count(_NO_FD)

    def __len__(self) -> int:
        """How many are open."""
        return self._nodes.n_handles + sum(listing.is_late for listing in self._listings.values())

    def add_listing(self, fd: Fd, opener: int, listing: DirHandle) -> int:
        """A handle of a directory, opened by a uid; the fd is closed with it."""
        self._nodes.open_handle(listing.node, fd, opener, os.O_RDONLY, 0, None)
        self._listings[fd] = listing
        return int(fd)

    def add_late(self, opener: int, listing: DirHandle) -> int:
        """A handle of a directory that is not open."""
        fh = next(self._late)
        listing.opener = opener
        self._nodes.add_to_share(opener, 1)
        self._listings[fh] = listing
        return fh

    def remove_listing(self, fh: int) -> DirHandle:
        """What a directory's handle has read; that of one which was not open is no more."""
        listing = self.listing(fh)
        del self._listings[fh]
        if listing.is_late:
            self._nodes.add_to_share(listing.opener, -1)
        return listing

    def node(self, fh: int) -> Node:
        """The node that a handle is of."""
        listing = self._listings.get(fh)
        return self._nodes.handle(fh)[0] if listing is None else listing.node

    def opened(self, fh: int) -> tuple[Node, Fd]:
        """Whose handle it is, and its fd."""
        return self._nodes.handle(fh)

    def listing(self, fh: int) -> DirHandle:
        """What a directory's handle reads. Raises  OSError EBADF: it is not one"""
        listing = self._listings.get(fh)
        if listing is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return listing
