"""How many workers, of which kind, delete fastest on which filesystem; measured, see docs/performance.md.

On xfs a worker has an allocation group for itself while it unlinks there. Each unlink and each freeing of an inode
takes its group's lock for a moment, and sleeps if another has it: two workers in one group take more than twice the
time of one, in different ones half of it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, Self

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, EXT_MAGIC, FUSE_MAGIC, XFS_MAGIC, Kernel, is_at_once

_NETWORK = frozenset(
    {FUSE_MAGIC, 0x6969, 0xFF534D42, 0xFE534D42, 0x517B, 0x00C36400, 0x0BD00BD0, 0x19830326, 0x01021997, 0x47504653}
)
"""FUSE, NFS, CIFS, SMB2, SMB, CephFS, Lustre, BeeGFS, 9p, GPFS"""
_MANY_THREADS = 16
_SERVERS_SHARE, LEAST_RANKS_SHARE, _LOCAL_SHARE = 8, 32, 1024
_MOST_PROCESSES = 8
_WINDOW, _SORTED_WINDOW = 16_384, 262_144
_ROOM, _ROOM_CHARS = 1 << 20, 1 << 22
"""What two workers may list at a time, times four: more of them need memory themselves, and have smaller windows."""

_RANKS_ROOM, _RANKS_LEAST_WINDOW = 1 << 20, 256
"""What all ranks of a job list at a time, about: what their slices leave of it is the first rank's to keep."""


class Workers(Enum):
    """What runs the slices beside each other."""

    PROCESSES = "forked: the kernel's work is short, and Python's lock would make threads wait for each other"
    THREADS = "they wait for a server most of the time"


class Strategy(NamedTuple):
    """What is best here.

    n_workers    slices at a time
    window       entries of a directory that are looked at together: memory is bounded by it
    window_chars  the same for the sum of their names' lengths
    by_inode     unlink in the order of inode numbers: ext4 lists in the order of hashes, and finds inodes by number
    splits       two workers in one flat directory are faster than one: what the directory's lock does not cover
                 is a large part of the work
    least_share  names that such a worker takes, unless no more are left: on a local disk fewer are gone before they
                 are handed out
    looks_ahead  names are looked up before they are unlinked: the kernel lets one process at a time unlink in a
                 directory and find the name there, but as many as like look for names
    tells_types  listings tell types; where not, what unlink calls a directory is one
    is_at_once   what an inode is needs no server to tell
    group_shift  two workers in one allocation group stand in each other's way; how many low bits of an inode's
                 number are its place in its group
    afterwork    what the kernel does when unlink has returned already, as a part of what it did before: xfs takes
                 inodes out of its trees in the background, which others feel as much (measured)
    """

    n_workers: int
    workers: Workers
    window: int
    window_chars: int
    by_inode: bool
    splits: bool
    least_share: int
    looks_ahead: bool
    tells_types: bool
    is_at_once: bool
    group_shift: int | None
    afterwork: float


def in_order(names: list[str], inos: list[int], *, by_inode: bool) -> list[str]:
    """Names of a listing as they are to be taken from the end: as it has them, or by their inode numbers.

    inos  theirs; not looked at otherwise
    """
    if by_inode:
        return [names[at] for at in sorted(range(len(inos)), key=inos.__getitem__, reverse=True)]
    return names[::-1]


def choose(kernel: Kernel, container: Fd, n_workers: int | None = None) -> Strategy:
    """The strategy for the filesystem that a container is on.

    n_workers  asked for by a person
    """
    magic = kernel.filesystem(container)
    tells_types = kernel.tells_types(container)
    by_inode = magic == EXT_MAGIC
    if magic in _NETWORK:
        most, workers = _MANY_THREADS, Workers.THREADS
    else:
        # btrfs serialises on its trees: two workers gain a fifth, a third one loses it again.
        useful = 2 if magic == BTRFS_MAGIC else _MOST_PROCESSES
        most = min(len(os.sched_getaffinity(0)), useful)
        workers = Workers.PROCESSES
    most = n_workers or most
    return Strategy(
        n_workers=most,
        workers=workers,
        window=min(_SORTED_WINDOW if by_inode else _WINDOW, _ROOM // most**2),
        window_chars=_ROOM_CHARS // most**2,
        by_inode=by_inode,
        splits=by_inode or magic in _NETWORK,
        least_share=_SERVERS_SHARE if workers is Workers.THREADS else _LOCAL_SHARE,
        looks_ahead=workers is Workers.THREADS,
        tells_types=tells_types,
        is_at_once=is_at_once(magic),
        group_shift=group_shift(kernel, container) if magic == XFS_MAGIC and most > 1 else None,
        afterwork=1.0 if magic == XFS_MAGIC else 0.0,
    )


def choose_for_rank(kernel: Kernel, directory: Fd, n_workers: int | None, n_ranks: int) -> Strategy:
    """That of one of so many ranks: threads where there is a server, else the rank is a process by itself."""
    own = choose(kernel, directory, n_workers)
    if own.workers is Workers.PROCESSES and n_workers is None:
        own = own._replace(n_workers=1)
    window = ranks_window(n_ranks * own.n_workers)
    least_share = max(own.least_share, LEAST_RANKS_SHARE)
    return own._replace(window=min(own.window, window), least_share=least_share, group_shift=None)


def ranks_window(n_workers: int) -> int:
    """The window of each of so many workers of a job."""
    return max(_RANKS_LEAST_WINDOW, _RANKS_ROOM // n_workers)


_XFS_IOC_FSGEOMETRY_V1 = 0x80705864
_GEOMETRY_BYTES = 112
_GEOMETRY = struct.Struct("=7I")
"""The first fields: blocksize, rtextsize, agblocks, agcount, logblocks, sectsize, inodesize."""
_MOST_PASSED_OVER = 8


def group_shift(kernel: Kernel, fd: Fd) -> int | None:
    """How many low bits of an inode's number are its place in its group; None if there are no groups, or no telling.

    fd  opened for reading
    """
    buffer = bytearray(_GEOMETRY_BYTES)
    try:
        kernel.ioctl(fd, _XFS_IOC_FSGEOMETRY_V1, buffer)
    except OSError:
        return None  # without it the work is slower, not wrong
    block_bytes, _, group_blocks, n_groups, _, _, inode_bytes = map(int, _GEOMETRY.unpack_from(buffer))
    if n_groups < 2:
        return None
    return (group_blocks - 1).bit_length() + (block_bytes // inode_bytes).bit_length() - 1


class AllocationGroups:
    """A lock for each group, shared with the processes that are forked after it was made."""

    def __init__(self, kernel: Kernel, shift: int | None) -> None:
        """shift: as group_shift says; None: there are no groups, and no worker is in another's way."""
        self._kernel = kernel
        self._shift = shift
        self._locks = None if shift is None else Fd(os.memfd_create("groups"))
        self._n_passed_over = 0

    def __enter__(self) -> Self:
        """Own the locks for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of them."""
        if self._locks is not None:
            self._locks.close()

    @contextmanager
    def alone_in(self, fd: Fd) -> Iterator[None]:
        """Have the group of a directory for the block. A lock ends with its process: one that is killed blocks none."""
        if self._locks is None:
            yield
            return
        group = self._of(fd)
        fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, group)
        try:
            yield
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, group)

    def is_crowded(self, fd: Fd) -> bool:
        """Whether another directory had better be taken first: another worker is in the group of this one.

        Only some are passed over in a row: all that are left may be in one group.
        """
        if self._locks is None or self._n_passed_over == _MOST_PASSED_OVER:
            self._n_passed_over = 0
            return False
        group = self._of(fd)
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, group)
        except BlockingIOError:
            self._n_passed_over += 1
            return True
        fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, group)
        self._n_passed_over = 0
        return False

    def _of(self, fd: Fd) -> int:
        """The group of a directory, and of its files as long as there is room in it."""
        assert self._shift is not None
        return self._kernel.fstat(fd).st_ino >> self._shift
