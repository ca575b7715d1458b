"""How many workers, of which kind, delete fastest on which filesystem; measured, see docs/performance.md."""

from __future__ import annotations

import os
from enum import Enum
from typing import NamedTuple

from fusefs.engine.xfs_groups import group_shift
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, EXT_MAGIC, FUSE_MAGIC, XFS_MAGIC, Kernel, is_at_once

_NETWORK = frozenset(
    {FUSE_MAGIC, 0x6969, 0xFF534D42, 0xFE534D42, 0x517B, 0x00C36400, 0x0BD00BD0, 0x19830326, 0x01021997, 0x47504653}
)
"""FUSE, NFS, CIFS, SMB2, SMB, CephFS, Lustre, BeeGFS, 9p, GPFS"""
_MANY_THREADS = 16
_SERVERS_SHARE, _LOCAL_SHARE = 8, 1024
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
    return own._replace(window=min(own.window, window), group_shift=None)


def ranks_window(n_workers: int) -> int:
    """The window of each of so many workers of a job."""
    return max(_RANKS_LEAST_WINDOW, _RANKS_ROOM // n_workers)
