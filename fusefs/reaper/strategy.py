"""How to delete fast on which filesystem; measured, see docs/performance.md."""

from __future__ import annotations

import os
from enum import Enum
from typing import NamedTuple

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import FUSE_MAGIC, Kernel

_EXT, _XFS, _BTRFS, _TMPFS, _F2FS = 0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0xF2F52010
_NETWORK = frozenset(
    {FUSE_MAGIC, 0x6969, 0xFF534D42, 0xFE534D42, 0x517B, 0x00C36400, 0x0BD00BD0, 0x19830326, 0x01021997}
)
"""FUSE, NFS, CIFS, SMB2, SMB, CephFS, Lustre, BeeGFS, 9p"""
_MANY_THREADS = 16
_MOST_PROCESSES = 8
_WINDOW, _SORTED_WINDOW = 16_384, 65_536


class Workers(Enum):
    """Who runs the slices beside each other."""

    PROCESSES = "forked: the kernel's work is short, and Python's lock would make threads wait for each other"
    THREADS = "they wait for a server most of the time"


class Strategy(NamedTuple):
    """What is best here.

    n_workers    slices at a time
    window       entries of a directory that are looked at together: memory is bounded by it
    by_inode     unlink in the order of inode numbers: ext4 lists in the order of hashes, and finds inodes by number
    splits       two workers in one flat directory are faster than one: what the directory's lock does not cover
                 is a large part of the work
    tells_types  listings tell types; where not, what unlink calls a directory is one
    """

    n_workers: int
    workers: Workers
    window: int
    by_inode: bool
    splits: bool
    tells_types: bool


def choose(kernel: Kernel, container: Fd, n_workers: int | None = None) -> Strategy:
    """The strategy for the filesystem that a container is on.

    n_workers  asked for by a person
    """
    magic = kernel.filesystem(container)
    tells_types = kernel.tells_types(container)
    if magic in _NETWORK:
        return Strategy(n_workers or _MANY_THREADS, Workers.THREADS, _WINDOW, False, True, tells_types)
    # btrfs serialises on its trees: two workers take as long as one, and twice its time on the processors.
    most = 1 if magic == _BTRFS else min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    by_inode, splits = magic == _EXT, magic == _EXT
    window = _SORTED_WINDOW if by_inode else _WINDOW
    return Strategy(n_workers or most, Workers.PROCESSES, window, by_inode, splits, tells_types)
