"""The identity of an inode, in a form that survives reboots, renumbered devices and the reuse of inode numbers."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from fusefs.core.names import is_hex

_BTRFS_KIND = "77"
_BTRFS_DIGITS = 40
_N_NUMBERS, _MOST_DIGITS = 2, 20
_MOST_KIND_DIGITS, _LEAST_HANDLE_DIGITS, _MOST_HANDLE_DIGITS, _MARK_DIGITS = 10, 2, 256, 32
_SUBVOLUME_INO = 256
"""The inode number of every btrfs subvolume's top directory."""
MARK = "mark:"
"""Prefix of a mark: a handle that trashd wrote to a directory that has no other identity."""


class IdentityMatch(Enum):
    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


class Identity(NamedTuple):
    """One incarnation of one inode on one volume.

    handle    `type:hex` from name_to_handle_at (inode and generation). Empty if the filesystem has no persistent
              handles (FUSE handles contain the nodeid, which changes with every forget). If there is no birth time
              either: `mark:` and the random digits in an xattr that a swap sets on its replacement
    ino       inode number; 0 if it is not persistent (FUSE without birth times: libfuse assigns numbers on demand)
    btime_ns  birth time in nanoseconds; 0 if the filesystem records none

    st_dev is not part of an identity, since it changes with loop and device numbers, and on btrfs with each mount.
    Source    name_to_handle_at(2), statx(2), docs/internals/store-format.md
    """

    handle: str
    ino: int
    btime_ns: int


def compare(a: Identity | None, b: Identity | None) -> IdentityMatch:
    """Decide whether two identities belong to the same incarnation of the same inode.

    If both identities have a handle, the handles decide; otherwise the inode number and the birth time do. Equal
    inode numbers alone prove nothing, because numbers are reused; different ones prove that the inodes differ. A
    missing mark proves nothing, because attributes may get lost. An inode in a btrfs snapshot counts as the same as its
    source, since after a rollback only the snapshot exists (`is_in_snapshot` distinguishes the two).
    """
    if a is None or b is None:
        return IdentityMatch.UNKNOWN
    if a.handle and b.handle:
        if a.handle == b.handle:
            return IdentityMatch.SAME
        if not is_in_snapshot(a, b):
            return IdentityMatch.OTHER
        if a.ino == b.ino == _SUBVOLUME_INO:
            return IdentityMatch.UNKNOWN  # a directory can contain several subvolumes and all their snapshots
    if not a.ino or not b.ino:
        return IdentityMatch.UNKNOWN
    if a.ino != b.ino:
        return IdentityMatch.OTHER
    if a.btime_ns and b.btime_ns:
        return IdentityMatch.SAME if a.btime_ns == b.btime_ns else IdentityMatch.OTHER
    return IdentityMatch.UNKNOWN


def is_marked(identity: Identity | None) -> bool:
    return identity is not None and identity.handle.startswith(MARK)


def is_in_snapshot(a: Identity, b: Identity) -> bool:
    """Whether two handles differ only in their btrfs subvolume: the same inode, in a snapshot and in its source.

    If both exist at the same time, they are two inodes.
    """
    here, there = _split_btrfs(a.handle), _split_btrfs(b.handle)
    return here is not None and there is not None and here.inode == there.inode and here.subvolume != there.subvolume


class _Btrfs(NamedTuple):
    """The hex digits of a btrfs handle: the subvolume, and the inode number and generation."""

    subvolume: str
    inode: tuple[str, str]


def _split_btrfs(handle: str) -> _Btrfs | None:
    """Split a btrfs handle into its parts. Return None if the handle is from another filesystem.

    Source  fs/btrfs/export.h, struct btrfs_fid: objectid u64, root_objectid u64, gen u32; FILEID_BTRFS_WITHOUT_PARENT
    """
    kind, _, digits = handle.partition(":")
    if kind != _BTRFS_KIND or len(digits) != _BTRFS_DIGITS:
        return None
    return _Btrfs(digits[16:32], (digits[:16], digits[32:]))


def format_identity(identity: Identity) -> str:
    """Format an identity as `HANDLE INO BTIME_NS`, with `-` for no handle, for files that are not JSON."""
    return f"{identity.handle or '-'} {identity.ino} {identity.btime_ns}"


def parse_identity(text: bytes) -> Identity | None:
    """Parse what `format_identity` wrote. Return None for anything else."""
    handle, *numbers = text.decode("ascii", "replace").split(" ")
    if len(numbers) != _N_NUMBERS or not all(one.isdigit() and len(one) <= _MOST_DIGITS for one in numbers):
        return None
    ino, btime_ns = map(int, numbers)
    if handle == "-":
        return Identity("", ino, btime_ns)
    kind, _, digits = handle.partition(":")
    if handle.startswith(MARK):
        is_handle = len(digits) == _MARK_DIGITS
    else:
        number = kind.removeprefix("-")
        is_kind = number.isdigit() and len(number) <= _MOST_KIND_DIGITS
        is_handle = is_kind and _LEAST_HANDLE_DIGITS <= len(digits) <= _MOST_HANDLE_DIGITS
    return Identity(handle, ino, btime_ns) if is_handle and is_hex(digits) else None
