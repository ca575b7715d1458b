"""Blocks that a file shares with others, by FIEMAP: with a snapshot, a reflink, a deduplicated copy."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, EXT_MAGIC, TMPFS_MAGIC, XFS_MAGIC, Kernel

_SHARING = frozenset({BTRFS_MAGIC, XFS_MAGIC, 0xCA451A4E})
"""btrfs, xfs, bcachefs"""
_NOT_SHARING = frozenset({EXT_MAGIC, TMPFS_MAGIC, 0xF2F52010})
"""ext4, tmpfs, f2fs"""
_FS_IOC_FIEMAP = 0xC020660B
_HEADER = struct.Struct("=QQIIII")  # start, length, flags, extents told, extents wanted
_EXTENT = struct.Struct("=QQQ16xI12x")  # logical, physical, length, flags
_LAST, _SHARED = 0x0001, 0x2000
_AT_ONCE = 256
_WHOLE = (1 << 64) - 1


def may_share(magic: int) -> bool:
    """Whether files of that filesystem can share blocks, and FIEMAP says so."""
    return magic in _SHARING


def never_shares(magic: int) -> bool:
    """Whether files of that filesystem have their blocks for themselves."""
    return magic in _NOT_SHARING


def tells_sharing(magic: int) -> bool:
    """Whether it is known which blocks files of that filesystem share; not of a server's, nor of ZFS with snapshots."""
    return may_share(magic) or never_shares(magic)


def shared_bytes(kernel: Kernel, file: Fd) -> int:
    """The bytes of a regular file that lie in shared extents, holes left out; compressed ones in their full size.

    file    may be O_PATH: it is opened again by its magic link, so that it can't be another one
    Raises  OSError: not ours to read; EOPNOTSUPP
    """
    with kernel.reopen(file, os.O_RDONLY | os.O_NONBLOCK) as fd:
        return sum(extent.length for extent in _extents(kernel, fd) if extent.flags & _SHARED)


class _Extent(NamedTuple):
    logical: int
    physical: int
    length: int
    flags: int


def _extents(kernel: Kernel, fd: Fd) -> Iterator[_Extent]:
    start = 0
    while True:
        buffer = bytearray(_HEADER.size + _AT_ONCE * _EXTENT.size)
        _HEADER.pack_into(buffer, 0, start, _WHOLE - start, 0, 0, _AT_ONCE, 0)
        kernel.ioctl(fd, _FS_IOC_FIEMAP, buffer)
        n_extents = _HEADER.unpack_from(buffer)[3]
        for at in range(n_extents):
            extent = _Extent(*_EXTENT.unpack_from(buffer, _HEADER.size + at * _EXTENT.size))
            yield extent
        if not n_extents or extent.flags & _LAST:
            return
        start = extent.logical + extent.length
