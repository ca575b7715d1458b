"""Choose the number and kind of workers that delete fastest on a filesystem (docs/internals/benchmarks/2026-11.md).

On xfs, each worker has an allocation group to itself while it unlinks there. Each unlink, and each release of an inode,
briefly takes the group's lock, and sleeps if another worker holds it. Two workers in one group take more than twice as
long as a single one; in different groups they take half as long.
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
from fusefs.linux.kernel import BTRFS_MAGIC, EXT_MAGIC, FUSE_MAGIC, XFS_MAGIC, Kernel, needs_no_server

_NETWORK = frozenset(
    {FUSE_MAGIC, 0x6969, 0xFF534D42, 0xFE534D42, 0x517B, 0x00C36400, 0x0BD00BD0, 0x19830326, 0x01021997, 0x47504653}
)
"""FUSE, NFS, CIFS, SMB2, SMB, CephFS, Lustre, BeeGFS, 9p, GPFS"""
_MANY_THREADS = 16
_SERVERS_SHARE, LEAST_RANKS_SHARE, _LOCAL_SHARE = 8, 32, 1024
_MOST_PROCESSES = 8
_WINDOW, _SORTED_WINDOW = 16_384, 262_144
_ROOM, _ROOM_CHARS = 1 << 20, 1 << 22
"""Divided by the square of the number of workers, this is the size of a window; the workers need memory, too."""

_RANKS_ROOM, _RANKS_LEAST_WINDOW = 1 << 20, 256
"""Approximate total size of all ranks' windows in a job: the first rank stores the unfinished work of their slices."""


class Workers(Enum):
    """The kind of workers that run slices in parallel."""

    PROCESSES = "forked: the kernel's work is short, and Python's lock would make threads wait for each other"
    THREADS = "they wait for a server most of the time"


class Strategy(NamedTuple):
    """The best way to delete on a filesystem.

    n_workers    number of slices that run at a time
    window       number of directory entries that are read together; this limits the use of memory
    window_chars  limit on the total length of their names
    by_inode     unlink in inode order: ext4 lists names in hash order, but stores inodes by number
    splits       two workers are faster than one in the same flat directory, because a large part of the work does not
                 need the directory's lock
    least_share  the fewest names that a worker takes from such a directory, unless fewer remain: on a local disk, a
                 smaller share would be deleted before the next one could be assigned
    lookup_first  look names up before unlinking them. The kernel lets only one process at a time unlink in a directory,
                 and an unlink includes a lookup; but any number of processes can look names up
    lists_types  listings contain file types; if not, an entry is a directory if unlink fails with EISDIR
    is_at_once   a stat needs no request to a server
    group_shift  number of low bits of an inode number that give the inode's place in its allocation group; set if two
                 workers in one group slow each other down
    afterwork    work that the kernel does after unlink has returned, as a fraction of the work before: xfs removes
                 inodes from its trees in the background, which slows others down just as much (measured)
    """

    n_workers: int
    workers: Workers
    window: int
    window_chars: int
    by_inode: bool
    splits: bool
    least_share: int
    lookup_first: bool
    lists_types: bool
    is_at_once: bool
    group_shift: int | None
    afterwork: float


def in_order(names: list[str], inos: list[int], *, by_inode: bool) -> list[str]:
    """Return a listing's names in reverse listing order or reverse inode order: the first to be handled is at the end.

    inos  the inode numbers of the names; unused if by_inode is not set
    """
    if by_inode:
        return [names[at] for at in sorted(range(len(inos)), key=inos.__getitem__, reverse=True)]
    return names[::-1]


def choose_strategy(kernel: Kernel, container: Fd, n_workers: int | None = None) -> Strategy:
    """Choose the strategy for the filesystem of a container.

    n_workers  the number that the user requested; None: the best number for the filesystem
    """
    magic = kernel.filesystem(container)
    tells_types = kernel.lists_types(container)
    by_inode = magic == EXT_MAGIC
    if magic in _NETWORK:
        most, workers = _MANY_THREADS, Workers.THREADS
    else:
        # btrfs serialises access to its trees: two workers are a fifth faster than one, but three are not.
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
        lookup_first=workers is Workers.THREADS,
        lists_types=tells_types,
        is_at_once=needs_no_server(magic),
        group_shift=group_shift(kernel, container) if magic == XFS_MAGIC and most > 1 else None,
        afterwork=1.0 if magic == XFS_MAGIC else 0.0,
    )


def choose_for_rank(kernel: Kernel, directory: Fd, n_workers: int | None, n_ranks: int) -> Strategy:
    """Choose the strategy for each rank of a job: threads on a network filesystem, else one process per rank."""
    strategy = choose_strategy(kernel, directory, n_workers)
    if strategy.workers is Workers.PROCESSES and n_workers is None:
        strategy = strategy._replace(n_workers=1)
    window = ranks_window(n_ranks * strategy.n_workers)
    least_share = max(strategy.least_share, LEAST_RANKS_SHARE)
    return strategy._replace(window=min(strategy.window, window), least_share=least_share, group_shift=None)


def ranks_window(n_workers: int) -> int:
    """Return the window of each worker in a job with this number of workers."""
    return max(_RANKS_LEAST_WINDOW, _RANKS_ROOM // n_workers)


_XFS_IOC_FSGEOMETRY_V1 = 0x80705864
_GEOMETRY_BYTES = 112
_GEOMETRY = struct.Struct("=7I")
"""The first fields: blocksize, rtextsize, agblocks, agcount, logblocks, sectsize, inodesize."""
_MOST_PASSED_OVER = 8


def group_shift(kernel: Kernel, fd: Fd) -> int | None:
    """Return the number of low bits of an inode number that give the inode's place in its allocation group.

    Return None if there are no groups, or if they are not known. fd: opened for reading
    """
    buffer = bytearray(_GEOMETRY_BYTES)
    try:
        kernel.ioctl(fd, _XFS_IOC_FSGEOMETRY_V1, buffer)
    except OSError:
        return None  # without it, removals are only slower
    block_bytes, _, group_blocks, n_groups, _, _, inode_bytes = map(int, _GEOMETRY.unpack_from(buffer))
    if n_groups < 2:
        return None
    return (group_blocks - 1).bit_length() + (block_bytes // inode_bytes).bit_length() - 1


class AllocationGroups:
    """A lock for each allocation group, shared with processes forked later."""

    def __init__(self, kernel: Kernel, shift: int | None) -> None:
        """shift: as returned by group_shift; None: there are no groups, and nothing is locked"""
        self._kernel = kernel
        self._shift = shift
        self._locks = None if shift is None else Fd(os.memfd_create("groups"))
        self._n_passed_over = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._locks is not None:
            self._locks.close()

    @contextmanager
    def lock_group(self, fd: Fd) -> Iterator[None]:
        """Lock a directory's group while the block runs. If the process is killed, the kernel releases the lock."""
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
        """Whether another directory should be taken first, because a worker is already in this one's group.

        Only a limited number of directories is passed over in a row, because all remaining ones may be in one group.
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
        """Return a directory's allocation group, which is also that of its files while the group has free inodes."""
        assert self._shift is not None
        return self._kernel.fstat(fd).st_ino >> self._shift
