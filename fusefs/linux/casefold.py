"""Whether a directory takes `FOO` for `foo`: then a missing name can begin to exist without having been made."""

from __future__ import annotations

import errno
import itertools
import os
import struct
from contextlib import suppress
from typing import Final, NamedTuple

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.getdents import Dirents

_EXT, _F2FS, _TMPFS, _OVERLAY, _XFS = 0xEF53, 0xF2F52010, 0x01021994, 0x794C7630, 0x58465342
_BTRFS, _RAMFS, _GFS2, _OCFS2, _LUSTRE = 0x9123683E, 0x858458F6, 0x01161970, 0x7461636F, 0x0BD00BD0
_FAT, _EXFAT, _NTFS, _NTFS3, _HFS, _HFS_PLUS = 0x4D44, 0x2011BAB0, 0x5346544E, 0x7366746E, 0x4244, 0x482B
_SMB, _CIFS, _SMB2, _NCP, _VBOX = 0x517B, 0xFF534D42, 0xFE534D42, 0x564C, 0x786F4256
_AFFS, _ADFS, _HPFS = 0xADFF, 0xADF5, 0xF995E849

_EXACT = frozenset({_BTRFS, _RAMFS, _GFS2, _OCFS2, _LUSTRE})
_FOLDING = frozenset(
    {_FAT, _EXFAT, _NTFS, _NTFS3, _HFS, _HFS_PLUS, _SMB, _CIFS, _SMB2, _NCP, _VBOX, _AFFS, _ADFS, _HPFS}
)
_FLAGGED = frozenset({_EXT, _F2FS, _TMPFS, _OVERLAY})
"""A directory of these has a flag for it. All others are tried."""

_INCOMPATIBLE, _INCOMPATIBLE_AT, _EXT4_CASEFOLD = struct.Struct("<I"), 1024 + 0x60, 0x20000
"""s_feature_incompat of an ext4 superblock."""

_TMPFS_FEATURE: Final = "/sys/fs/tmpfs/features/casefold"
"""Of a kernel since Linux 6.13 that has it."""

_FS_IOC_GETFLAGS = 0x80086601
_FLAGS = struct.Struct("=I4x")
_FS_CASEFOLD_FL = 0x40000000
_XFS_IOC_FSGEOMETRY_V1 = 0x80705864
_XFS_GEOMETRY = struct.Struct("=92xI16x")
"""struct xfs_fsop_geom_v1: its flags alone."""
_XFS_FSOP_GEOM_FLAGS_DIRV2CI = 1 << 12
_N_TRIED = 256


class CaseFolding(NamedTuple):
    """Whether names in a directory have other spellings.

    folds      None: the directory can't tell
    is_common  all directories of its filesystem are alike
    """

    folds: bool | None
    is_common: bool


def case_folding(dir_fd: int) -> CaseFolding:
    """Find out whether a directory, and others of its filesystem, find a name by other spellings too.

    dir_fd  of a directory; O_PATH will do
    Cost    a few calls that don't wait; where nothing tells, a part of the directory is read, and two names looked up
    """
    is_flagged = False
    try:
        kind = syscalls.statfs_type(dir_fd)
        if kind in _EXACT or kind in _FOLDING:
            return CaseFolding(kind in _FOLDING, is_common=True)
        is_flagged = kind in _FLAGGED
        if is_flagged and not _may_have_flag(kind, dir_fd):
            return CaseFolding(folds=False, is_common=True)
        with Fd(os.open(b"/proc/self/fd/%d" % dir_fd, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            if is_flagged:
                flags = _asked(fd, _FS_IOC_GETFLAGS, _FLAGS)
                return CaseFolding(bool(flags & _FS_CASEFOLD_FL), is_common=False)
            if kind == _XFS:
                flags = _asked(fd, _XFS_IOC_FSGEOMETRY_V1, _XFS_GEOMETRY)
                return CaseFolding(bool(flags & _XFS_FSOP_GEOM_FLAGS_DIRV2CI), is_common=True)
            return CaseFolding(_finds_another_spelling(fd), is_common=True)
    except OSError as error:
        # A kernel without flags here (tmpfs until 6.6) has no folding here either; else it may only be searched.
        return CaseFolding(False if is_flagged and error.errno == errno.ENOTTY else None, is_common=False)


def _may_have_flag(kind: int, dir_fd: int) -> bool:
    """Whether a directory of a filesystem can have the flag. The superblock of an ext4 filesystem is root's to read."""
    if kind == _TMPFS:
        return os.path.exists(_TMPFS_FEATURE)
    if kind == _EXT:
        with suppress(OSError):
            return has_feature(_device_of(dir_fd))
    return True


def _device_of(dir_fd: int) -> str:
    device = os.fstat(dir_fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    return os.path.join("/dev", os.path.basename(os.readlink(f"/sys/dev/block/{number}")))


def has_feature(path: str) -> bool:
    """Whether directories of an ext4 filesystem may fold. path: of its block device, or of an image"""
    with Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        (features,) = _INCOMPATIBLE.unpack(os.pread(fd, _INCOMPATIBLE.size, _INCOMPATIBLE_AT))
        return bool(features & _EXT4_CASEFOLD)


def _asked(fd: Fd, request: int, answer: struct.Struct) -> int:
    buffer = bytearray(answer.size)
    syscalls.ioctl(fd, request, buffer)
    flags: int = answer.unpack(buffer)[0]
    return flags


def _finds_another_spelling(fd: Fd) -> bool | None:
    """Whether the first name that has letters is there in the other case too, as the same inode; None: no such name."""
    for name, *_ in itertools.islice(Dirents(fd).read_from(0), _N_TRIED):
        other = name.swapcase()
        if other != name:
            try:
                found = os.stat(other, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return os.path.samestat(found, os.stat(name, dir_fd=fd, follow_symlinks=False))
    return None
