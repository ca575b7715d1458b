"""Which inode a thing is, told so that it survives reboots, device renumbering and reuse of numbers."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from fusefs.core.names import is_hex

_BTRFS_KIND = "77"
_BTRFS_DIGITS = 40
_N_NUMBERS, _MOST_DIGITS = 2, 20
_MOST_KIND_DIGITS, _LEAST_HANDLE_DIGITS, _MOST_HANDLE_DIGITS, _MARK_DIGITS = 10, 2, 256, 32
_SUBVOLUME_INO = 256
"""The number of each btrfs subvolume's own directory."""
MARK = "mark:"
"""How a handle begins that is no file handle, but what was written on a directory of ours that nothing else tells."""


class Likelihood(Enum):
    """What comparing two identities can tell."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


class Identity(NamedTuple):
    """One incarnation of one inode on one volume.

    handle    `type:hex` from name_to_handle_at (inode and generation); empty where the filesystem has none
              that lasts (FUSE handles hold the nodeid, which changes with every forget). Where there is no birth
              time either, `mark:` and the random digits in an xattr that a swap gives its fresh directory
    ino       inode number; 0 where it does not last (FUSE without birth times: libfuse numbers as it goes)
    btime_ns  birth time in nanoseconds; 0 where the filesystem keeps none

    There is no st_dev in it: that changes with loop and device numbers, and on btrfs with each mount.
    Source    name_to_handle_at(2), statx(2), docs/store-format.md
    """

    handle: str
    ino: int
    btime_ns: int


def compare(a: Identity | None, b: Identity | None) -> Likelihood:
    """Say whether two identities mean one incarnation of one inode; total.

    Handles decide where both have one; else number and birth time; a number alone proves nothing when
    it agrees, since numbers are reused, and proves the contrary when it does not. A mark that is missing proves
    nothing: attributes get lost. What a btrfs snapshot has of an inode is taken for it: after a rollback there is
    nothing else (`is_in_snapshot` tells the two apart).
    """
    if a is None or b is None:
        return Likelihood.UNKNOWN
    if a.handle and b.handle:
        if a.handle == b.handle:
            return Likelihood.SAME
        if not is_in_snapshot(a, b):
            return Likelihood.OTHER
        if a.ino == b.ino == _SUBVOLUME_INO:
            return Likelihood.UNKNOWN  # subvolumes and all their snapshots can lie in one directory
    if not a.ino or not b.ino:
        return Likelihood.UNKNOWN
    if a.ino != b.ino:
        return Likelihood.OTHER
    if a.btime_ns and b.btime_ns:
        return Likelihood.SAME if a.btime_ns == b.btime_ns else Likelihood.OTHER
    return Likelihood.UNKNOWN


def is_marked(identity: Identity | None) -> bool:
    """Whether it is a directory that a swap has marked."""
    return identity is not None and identity.handle.startswith(MARK)


def is_in_snapshot(a: Identity, b: Identity) -> bool:
    """Whether two handles differ by their btrfs subvolume alone: one inode, as a snapshot has it and as its source.

    Both may be there at the same time, and then they are two.
    """
    here, there = _split_btrfs(a.handle), _split_btrfs(b.handle)
    return here is not None and there is not None and here.inode == there.inode and here.subvolume != there.subvolume


class _Btrfs(NamedTuple):
    """A btrfs handle's hex digits: of the subvolume, and of inode number and generation."""

    subvolume: str
    inode: tuple[str, str]


def _split_btrfs(handle: str) -> _Btrfs | None:
    """The parts of a handle; None for one of another filesystem.

    Source  fs/btrfs/export.h, struct btrfs_fid: objectid u64, root_objectid u64, gen u32; FILEID_BTRFS_WITHOUT_PARENT
    """
    kind, _, digits = handle.partition(":")
    if kind != _BTRFS_KIND or len(digits) != _BTRFS_DIGITS:
        return None
    return _Btrfs(digits[16:32], (digits[:16], digits[32:]))


def in_words(identity: Identity) -> str:
    """An identity as the notes that are no JSON have it: `HANDLE INO BTIME_NS`, `-` for no handle."""
    return f"{identity.handle or '-'} {identity.ino} {identity.btime_ns}"


def from_words(words: bytes) -> Identity | None:
    """What `in_words` said; None for anything else."""
    handle, *numbers = words.decode("ascii", "replace").split(" ")
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
