"""Which inode a thing is, told so that it survives reboots, device renumbering and reuse of numbers."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Likelihood(Enum):
    """What comparing two identities can tell."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


class Identity(NamedTuple):
    """One incarnation of one inode on one volume.

    handle    `type:hex` from name_to_handle_at (inode and generation); empty where the filesystem has none
              that lasts (FUSE handles hold the nodeid, which changes with every forget)
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
    it agrees, since numbers are reused, and proves the contrary when it does not.
    """
    if a is None or b is None:
        return Likelihood.UNKNOWN
    if a.handle and b.handle:
        return Likelihood.SAME if a.handle == b.handle else Likelihood.OTHER
    if not a.ino or not b.ino:
        return Likelihood.UNKNOWN
    if a.ino != b.ino:
        return Likelihood.OTHER
    if a.btime_ns and b.btime_ns:
        return Likelihood.SAME if a.btime_ns == b.btime_ns else Likelihood.OTHER
    return Likelihood.UNKNOWN
