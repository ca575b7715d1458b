"""Disk usage as filesystems report it: sums without a walk, shared extents, and archived (HSM) files.

CephFS keeps sums of each directory; JuiceFS's Enterprise Edition tells them as a directory's size, the community's as
nothing (`juicefs summary` is a walk, by its daemon); btrfs has them of a subvolume whose quota groups are on. A project
quota is no answer: it counts all that has the project's id, as the fresh directory of a swap has, and what was in the
tree before it got the id may not have it.

Whether a file is archived is judged by its stat, on filesystems that have archives only. A file that is one hole, or
that a ZFS below has compressed to nothing, looks the same.
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
"""All directories of JuiceFS's community edition have that size."""
_SUBVOLUME_INO = 256
_INO_LOOKUP, _FS_INFO, _ROOTREF = 0xD0009412, 0x8400941F, 0xD000943D
_TREE = struct.Struct("=QQ")  # subvolume (0: the fd's), inode
_FSID = slice(16, 32)
_N_INNER = 4088
_SYSFS = "/sys/fs/btrfs"


def known_size(kernel: Kernel, tree: Fd) -> TreeSize | None:
    """What a directory holds by its filesystem's own word; None where that has none, or not of this one alone.

    tree  open for reading
    Only what is asked of a server takes time, and no more than a stat.
    """
    with suppress(OSError):
        magic = kernel.filesystem(tree)
        if magic == BTRFS_MAGIC:
            return _of_subvolume(kernel, tree)
        if not kernel.is_local(tree):
            found = ceph_size(lambda name: kernel.get_xattr(tree, name), kernel.now_ns())
            return found or (_of_juicefs(kernel, tree) if magic == FUSE_MAGIC else None)
    return None


def ceph_size(xattr: Callable[[str], bytes | None], at_ns: int) -> TreeSize | None:
    """What CephFS tells of a directory by two of its attributes; None if it tells nothing that is understood.

    xattr   the value of an attribute by its name
    The bytes are those of files as long as they say they are, each once; the sums lag some seconds behind. Snapshots
    keep what they have of them.
    Source  docs.ceph.com, "CephFS Recursive Accounting" (dirstat); fs/ceph/xattr.c
    """
    n_bytes = _number(xattr(_RBYTES))
    return None if n_bytes is None else TreeSize(_number(xattr(_RENTRIES)), n_bytes, 0, None, False, "cephfs", at_ns)


def _number(text: bytes | None) -> int | None:
    return None if text is None or not _NUMBER.fullmatch(text) else int(text)


def _of_juicefs(kernel: Kernel, tree: Fd) -> TreeSize | None:
    """Source  juicefs.com, "Capacity and Quota" of the Enterprise Edition: a directory's size is the recursive sum"""
    st = kernel.fstat(tree)
    if st.st_size <= _JUICEFS_PLAIN_BYTES:
        return None
    if not any(mount.fstype == _JUICEFS and mount.st_dev() == st.st_dev for mount in read_mounts()):
        return None
    return TreeSize(None, st.st_size, 0, None, False, "juicefs", kernel.now_ns())


def _of_subvolume(kernel: Kernel, tree: Fd) -> TreeSize | None:
    """What a subvolume's own quota group counts; sysfs tells everybody. Subvolumes in it are counted as their own.

    What it shares with others is known exactly. What was written in the last seconds is not counted yet.
    Source  fs/btrfs/sysfs.c, qgroups (Linux 5.9; `inconsistent` and `mode`: 6.1 and 6.7); ioctl-btrfs
    """
    if kernel.fstat(tree).st_ino != _SUBVOLUME_INO:
        return None
    asked = bytearray(4096)
    _TREE.pack_into(asked, 0, 0, _SUBVOLUME_INO)
    kernel.ioctl(tree, _INO_LOOKUP, asked)
    subvolume, _ = _TREE.unpack_from(asked)
    told = bytearray(1024)
    kernel.ioctl(tree, _FS_INFO, told)
    groups = f"{_SYSFS}/{UUID(bytes=bytes(told[_FSID]))}/qgroups"
    if _line(f"{groups}/inconsistent") != b"0" or _line(f"{groups}/mode") not in (None, b"qgroup"):
        return None  # with simple quotas a group counts what was written there first, not what it has
    n_bytes, own_bytes = (_number(_line(f"{groups}/0_{subvolume}/{name}")) for name in ("referenced", "exclusive"))
    if n_bytes is None or own_bytes is None:
        return None
    inner = bytearray(4096)
    kernel.ioctl(tree, _ROOTREF, inner)
    return TreeSize(None, n_bytes, 0, max(n_bytes - own_bytes, 0), inner[_N_INNER] > 0, "qgroup", kernel.now_ns())


def _line(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        return file.read(64).strip()


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


_BLOCKS_OF_RELEASED = {0x0BD00BD0: 1, 0x47504653: 0}
"""Lustre tells one block of a released file, lest tar takes it for a hole (LU-3864); Storage Scale none."""
_SMALL_BYTES = 4096
"""Scale keeps what is small in the inode, and Lustre may tell one block of a page that is not yet written."""


def may_be_archived(kernel: Kernel, fd: int) -> bool:
    """Whether to read a regular file (O_PATH will do) may have its data brought back from an archive."""
    blocks = _BLOCKS_OF_RELEASED.get(kernel.filesystem(fd))
    if blocks is None:
        return False
    st = os.fstat(fd)
    return st.st_size > _SMALL_BYTES and st.st_blocks == blocks
