"""Disk usage as filesystems report it: sums without a walk, shared extents, and archived (HSM) files.

CephFS keeps sums for each directory. JuiceFS Enterprise Edition reports them as a directory's size; the community
edition does not (`juicefs summary` is a walk by its daemon). btrfs has them for a subvolume if quota groups are on. A
project quota can't be used: it counts everything with the project's ID, including the replacement of a swap, but not
older files in the tree, which lack the ID.

Whether a file is archived is judged from its stat, and only on filesystems that have archives. A file that is a single
hole, or that an underlying ZFS has compressed to nothing, can't be distinguished from it.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple
from uuid import UUID

from fusefs.core.record import TreeSize
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, EXT_MAGIC, FUSE_MAGIC, TMPFS_MAGIC, XFS_MAGIC, Kernel
from fusefs.linux.mountinfo import read_mounts

_RBYTES, _RENTRIES = "ceph.dir.rbytes", "ceph.dir.rentries"
_NUMBER = re.compile(rb"[0-9]{1,18}")
_JUICEFS, _JUICEFS_PLAIN_BYTES = b"fuse.juicefs", 4096
"""The size of every directory in JuiceFS community edition."""
_SUBVOLUME_INO = 256
_INO_LOOKUP, _FS_INFO, _ROOTREF = 0xD0009412, 0x8400941F, 0xD000943D
_TREE = struct.Struct("=QQ")  # subvolume (0: that of the fd), inode
_FSID = slice(16, 32)
_N_INNER = 4088
_SYSFS = "/sys/fs/btrfs"


def reported_size(kernel: Kernel, tree: Fd) -> TreeSize | None:
    """Return the size of a directory's content as its filesystem reports it; None if it reports no size.

    If a server must be asked, this takes no longer than a stat.
    tree  open for reading
    """
    with suppress(OSError):
        magic = kernel.filesystem(tree)
        if magic == BTRFS_MAGIC:
            return _subvolume_size(kernel, tree)
        if not kernel.is_local(tree):
            size = ceph_size(lambda name: kernel.get_xattr(tree, name), kernel.now_ns())
            return size or (_juicefs_size(kernel, tree) if magic == FUSE_MAGIC else None)
    return None


def ceph_size(xattr: Callable[[str], bytes | None], at_ns: int) -> TreeSize | None:
    """Return the size that CephFS reports for a directory in two attributes; None if they are missing or invalid.

    The bytes are the lengths of the files, each counted once. The sums are some seconds out of date.
    Deleting the directory does not free data that a snapshot contains.
    xattr   returns the value of an attribute
    Source  docs.ceph.com, "CephFS Recursive Accounting" (dirstat); fs/ceph/xattr.c
    """
    n_bytes = _number(xattr(_RBYTES))
    return None if n_bytes is None else TreeSize(_number(xattr(_RENTRIES)), n_bytes, 0, None, False, "cephfs", at_ns)


def _number(text: bytes | None) -> int | None:
    return None if text is None or not _NUMBER.fullmatch(text) else int(text)


def _juicefs_size(kernel: Kernel, tree: Fd) -> TreeSize | None:
    """Source  juicefs.com, "Capacity and Quota" of the Enterprise Edition: a directory's size is the recursive sum"""
    st = kernel.fstat(tree)
    if st.st_size <= _JUICEFS_PLAIN_BYTES:
        return None
    if not any(mount.fstype == _JUICEFS and mount.st_dev() == st.st_dev for mount in read_mounts()):
        return None
    return TreeSize(None, st.st_size, 0, None, False, "juicefs", kernel.now_ns())


def _subvolume_size(kernel: Kernel, tree: Fd) -> TreeSize | None:
    """Return the size of a subvolume from its own quota group, which every user can read in sysfs.

    Nested subvolumes have their own groups. The part shared with other subvolumes is exact. Data written in the last
    seconds is not counted yet.
    Source  fs/btrfs/sysfs.c, qgroups (Linux 5.9; `inconsistent` and `mode`: 6.1 and 6.7); ioctl-btrfs
    """
    if kernel.fstat(tree).st_ino != _SUBVOLUME_INO:
        return None
    lookup_args = bytearray(4096)
    _TREE.pack_into(lookup_args, 0, 0, _SUBVOLUME_INO)
    kernel.ioctl(tree, _INO_LOOKUP, lookup_args)
    subvolume, _ = _TREE.unpack_from(lookup_args)
    fs_info = bytearray(1024)
    kernel.ioctl(tree, _FS_INFO, fs_info)
    groups = f"{_SYSFS}/{UUID(bytes=bytes(fs_info[_FSID]))}/qgroups"
    if _read_line(f"{groups}/inconsistent") != b"0" or _read_line(f"{groups}/mode") not in (None, b"qgroup"):
        return None  # with simple quotas, a group counts what was first written there, not what it contains
    n_bytes, own_bytes = (_number(_read_line(f"{groups}/0_{subvolume}/{name}")) for name in ("referenced", "exclusive"))
    if n_bytes is None or own_bytes is None:
        return None
    inner = bytearray(4096)
    kernel.ioctl(tree, _ROOTREF, inner)
    return TreeSize(None, n_bytes, 0, max(n_bytes - own_bytes, 0), inner[_N_INNER] > 0, "qgroup", kernel.now_ns())


def _read_line(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        return file.read(64).strip()


_SHARING = frozenset({BTRFS_MAGIC, XFS_MAGIC, 0xCA451A4E})
"""btrfs, xfs, bcachefs."""
_NOT_SHARING = frozenset({EXT_MAGIC, TMPFS_MAGIC, 0xF2F52010})
"""ext4, tmpfs, f2fs."""
_FS_IOC_FIEMAP = 0xC020660B
_HEADER = struct.Struct("=QQIIII")  # start, length, flags, extents returned, room for extents
_EXTENT = struct.Struct("=QQQ16xI12x")  # logical, physical, length, flags
_LAST, _SHARED = 0x0001, 0x2000
_EXTENTS_PER_CALL = 256
_WHOLE = (1 << 64) - 1


def may_share(magic: int) -> bool:
    """Return whether files on such a filesystem can share blocks, which FIEMAP then reports."""
    return magic in _SHARING


def never_shares(magic: int) -> bool:
    return magic in _NOT_SHARING


def reports_sharing(magic: int) -> bool:
    """Return whether we can find out which blocks of files are shared. Network filesystems and ZFS do not report it."""
    return may_share(magic) or never_shares(magic)


def shared_bytes(kernel: Kernel, file: Fd) -> int:
    """Return how many bytes of a regular file are in shared extents; compressed extents count with their full length.

    file    O_PATH is enough: the same file is reopened through its magic link
    Raises  OSError: the file can't be read; EOPNOTSUPP
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
        buffer = bytearray(_HEADER.size + _EXTENTS_PER_CALL * _EXTENT.size)
        _HEADER.pack_into(buffer, 0, start, _WHOLE - start, 0, 0, _EXTENTS_PER_CALL, 0)
        kernel.ioctl(fd, _FS_IOC_FIEMAP, buffer)
        n_extents = _HEADER.unpack_from(buffer)[3]
        for at in range(n_extents):
            extent = _Extent(*_EXTENT.unpack_from(buffer, _HEADER.size + at * _EXTENT.size))
            yield extent
        if not n_extents or extent.flags & _LAST:
            return
        start = extent.logical + extent.length


_BLOCKS_OF_RELEASED = {0x0BD00BD0: 1, 0x47504653: 0}
"""The blocks of a released file: one on Lustre, so that tar doesn't mistake it for a hole (LU-3864); none on Scale."""
_SMALL_BYTES = 4096
"""Storage Scale keeps smaller files in the inode, and Lustre may report one block for a page not yet written."""


def may_be_archived(kernel: Kernel, fd: int) -> bool:
    """Return whether reading a regular file (O_PATH is enough) may make an archive restore its data."""
    blocks = _BLOCKS_OF_RELEASED.get(kernel.filesystem(fd))
    if blocks is None:
        return False
    st = os.fstat(fd)
    return st.st_size > _SMALL_BYTES and st.st_blocks == blocks
