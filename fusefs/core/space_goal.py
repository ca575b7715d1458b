"""What a command waits for (`--wait`): the end of the trees or an amount of free space; and how that ended."""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import NamedTuple

from fusefs.core.sizes import parse_size

TOLERANCE_BYTES = 256 << 10
"""So much may be missing: metadata is allocated and freed, and other processes write a little at any time."""
_THOUSANDS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3}


class SpaceGoal(NamedTuple):
    """What has to be free again before a waiting command ends. Without a number: all trees are gone.

    text      as the user typed it
    share     of the bytes that the trees took, above 0, at most 1; until `of` has made bytes of it
    """

    text: str = "done"
    share: float | None = None
    n_bytes: int | None = None
    n_inodes: int | None = None

    def is_done(self) -> bool:
        """Whether only the end of the trees reaches it."""
        return self.share is None and self.n_bytes is None and self.n_inodes is None

    def of(self, tree_bytes: int) -> SpaceGoal:
        """The goal in bytes, for trees of this size; 100% tolerates what metadata keeps."""
        if self.share is None:
            return self
        tolerated = tree_bytes - max(TOLERANCE_BYTES, tree_bytes // 50)
        return self._replace(share=None, n_bytes=max(min(math.ceil(self.share * tree_bytes), tolerated), 0))


DONE = SpaceGoal()


class WaitReasonKind(Enum):
    """Why a goal is not reached."""

    OPEN = "open"  # a process has deleted files open
    LEFT = "left"  # not everything could be removed: the orphan is in quarantine
    RESTORED = "restored"
    PINNED = "pinned"  # another process has locked the orphan
    NOBODY = "nobody"  # no reaper serves the volume
    PAUSED = "paused"
    BROKEN = "broken"  # the reaper rests after too many errors
    LESS = "less"  # the trees are gone, and less space than the goal is free


class WaitReason(NamedTuple):
    """One reason. n_bytes: what a process has open; 0 for all other kinds"""

    kind: WaitReasonKind
    n_bytes: int
    detail: str


class Waited(NamedTuple):
    """How the waiting for one volume ended.

    volume       the directory that holds the store
    goal         as the user typed it
    came_bytes   the most that was free at any time, above what was free before
    came_inodes  0 where the filesystem does not count inodes
    reasons      why the goal is not reached
    """

    volume: bytes
    goal: str
    is_reached: bool
    came_bytes: int
    came_inodes: int
    reasons: tuple[WaitReason, ...]


def parse_goal(text: str) -> SpaceGoal:
    """Parse `done`, `50%`, `100G` (a size) or `inodes:1M` (in thousands).

    Raises  ValueError with a message for the user
    """
    typed = text.strip().lower()
    if typed == DONE.text:
        return DONE
    if share := re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", typed, re.ASCII):
        percent = float(share[1])
        if not 0 < percent <= 100:
            raise ValueError(f"{text!r} is not a part of the space: write 1% to 100%")
        return SpaceGoal(typed, share=percent / 100)
    if count := re.fullmatch(r"inodes:([0-9]{1,15}(?:\.[0-9]{1,6})?)([kmg]?)", typed, re.ASCII):
        n_inodes = int(float(count[1]) * _THOUSANDS[count[2]])
        if n_inodes > 0:
            return SpaceGoal(typed, n_inodes=n_inodes)
    else:
        try:
            n_bytes = parse_size(typed)
        except ValueError:
            n_bytes = 0
        if n_bytes > 0:
            return SpaceGoal(typed, n_bytes=n_bytes)
    raise ValueError(f"{text!r} is nothing to wait for: write 50%, 100G, inodes:1M or done")
