"""Space that should come back: what a tree takes, what keeps some of it, and how long to wait for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from fusefs.core.record import TreeSize

STAT_BLOCK_BYTES = 512
"""What st_blocks counts in, whatever the filesystem's own blocks are."""
INLINE_MAX_BYTES = 2048
"""btrfs keeps a file up to this size (max_inline) in its metadata, and says of it that it has a block."""
_LEAST_TOLERANCE_BYTES = 256 << 10
_STEPS = 16
_SETTLED = 10


class Survey(NamedTuple):
    """What a walk found in a container.

    n_entries     as a reaper counts them
    n_bytes       the blocks of all inodes, each inode once
    linked_bytes  of these: they stay, as hard links outside keep them
    shared_bytes  of these: at most as many stay, as snapshots or reflinks share them; 0 if not asked for. Those
                  that only the tree's own files share with each other are counted too: they can't be told apart.
    n_failed      what could not be looked at: entries, or directories with all that is in them
    is_at_least   there are more hard links than can be remembered: of those beyond, each name counts as its part of
                  the inode, and none as one that stays
    """

    n_entries: int
    n_bytes: int
    linked_bytes: int
    shared_bytes: int
    n_failed: int
    is_at_least: bool


class AskedSize(NamedTuple):
    """What a tree takes, as far as that could be found out.

    size        None: nothing
    n_failed    what could not be looked at
    is_stopped  it was not counted to the end
    """

    size: TreeSize | None
    n_failed: int = 0
    is_stopped: bool = False


class SpaceKeeper(Enum):
    """Why space does not come back.

    OPEN    a process has it open
    SERVED  a mount's daemon has it open, for no process that is seen: it lets go by itself
    LEFT    could not be removed: it is in quarantine
    LESS    the trees never took as much
    NOBODY  no reaper serves the volume
    BROKEN  too many errors: the reaper rests
    """

    OPEN = "open"
    SERVED = "served"
    LINKS = "links"
    LEFT = "left"
    SHARED = "shared"
    UNKNOWN = "unknown"
    LESS = "less"
    NOBODY = "nobody"
    PAUSED = "paused"
    BROKEN = "broken"
    PINNED = "pinned"
    RESTORED = "restored"


_AS_MEANT = frozenset({SpaceKeeper.LINKS, SpaceKeeper.SHARED})
"""Others use it still: that is no failure of the reap."""


class SpaceKept(NamedTuple):
    """One thing that keeps space, how much of it, and what a person should know of it."""

    kind: SpaceKeeper
    n_bytes: int
    detail: str


class Waited(NamedTuple):
    """What became of the space that a reaped tree took.

    came_bytes      the most that was free at a time, above what was free before
    expected_bytes  what the tree took
    reasons         for what is missing; none if nothing is
    is_complete     it all came, within `tolerance_bytes`
    """

    came_bytes: int
    expected_bytes: int
    reasons: tuple[SpaceKept, ...]
    is_complete: bool

    def is_well(self) -> bool:
        """Whether all came that should."""
        return self.is_complete or all(reason.kind in _AS_MEANT for reason in self.reasons)


class WaitStep(Enum):
    """What a waiting process does next."""

    DONE = "all came that can"
    KEEP_WAITING = "it still grows, or did not long ago"
    GIVE_UP = "it has not grown for too long"


class SpaceCourse(NamedTuple):
    """How what is free went, bytes or inodes, since a moment before the tree was removed.

    before      free then
    highest     the most that was free since
    grown       free when it had last grown
    grown_at_s  when that was; growth by less than a step does not count, so that waiting must end
    """

    before: int
    highest: int
    grown: int
    grown_at_s: float

    def came(self) -> int:
        """What came: by the highest, as others may have used it since."""
        return self.highest - self.before


def begin(before: int, now_s: float) -> SpaceCourse:
    """The course before the first look."""
    return SpaceCourse(before, before, before, now_s)


def look(course: SpaceCourse, expected_bytes: int, free: int, now_s: float) -> SpaceCourse:
    """The course after one more look at what is free; inodes go by the steps of bytes."""
    course = course._replace(highest=max(course.highest, free))
    if free < course.grown + tolerance_bytes(expected_bytes) // _STEPS:
        return course
    return course._replace(grown=free, grown_at_s=now_s)


def decide(
    course: SpaceCourse, expected_bytes: int, reasons: Sequence[SpaceKept], now_s: float, patience_s: float
) -> WaitStep:
    """Say whether to wait on.

    reasons     as far as they are known; SERVED is over soon; SHARED is only an upper bound: what may come in spite
                of it is waited for too, though not for long
    patience_s  how long free space may stay as it is
    """
    missing = expected_bytes - course.came() - tolerance_bytes(expected_bytes)
    lasting = [reason for reason in reasons if reason.kind is not SpaceKeeper.SERVED]
    certain = sum(reason.n_bytes for reason in lasting if reason.kind is not SpaceKeeper.SHARED)
    if missing <= certain:
        return WaitStep.DONE
    if missing <= sum(reason.n_bytes for reason in lasting):
        patience_s /= _SETTLED
    return WaitStep.KEEP_WAITING if now_s - course.grown_at_s < patience_s else WaitStep.GIVE_UP


def conclude(course: SpaceCourse, expected_bytes: int, reasons: Sequence[SpaceKept], unknown: str) -> Waited:
    """What to tell at the end; `unknown` is the detail of what no reason explains."""
    came = max(course.came(), 0)
    missing = expected_bytes - came
    tolerance = tolerance_bytes(expected_bytes)
    if missing <= tolerance:
        return Waited(came, expected_bytes, (), True)
    told = []
    for reason in sorted(reasons, key=lambda reason: reason.kind is SpaceKeeper.SHARED):
        if reason.kind is SpaceKeeper.SHARED:
            reason = reason._replace(n_bytes=min(reason.n_bytes, max(missing, 0)))
            if not reason.n_bytes:
                continue
        missing -= reason.n_bytes
        told.append(reason)
    if missing > tolerance:
        told.append(SpaceKept(SpaceKeeper.UNKNOWN, missing, unknown))
    return Waited(came, expected_bytes, tuple(told), False)


def tolerance_bytes(expected_bytes: int) -> int:
    """How much may be missing without a word: metadata comes and goes, and others write a little all the time."""
    return max(_LEAST_TOLERANCE_BYTES, expected_bytes // 50)


def foreseen(survey: Survey, left_bytes: int) -> list[SpaceKept]:
    """The reasons that are known before anything is waited for.

    left_bytes  of the tree that could not be removed
    """
    links = "other names outside the tree keep files" + (", maybe more" if survey.is_at_least else "")
    shared = "snapshots or reflinks share it (at most)"
    found = [
        SpaceKept(SpaceKeeper.LINKS, survey.linked_bytes, links),
        SpaceKept(SpaceKeeper.LEFT, left_bytes, "could not be removed"),
        SpaceKept(SpaceKeeper.SHARED, survey.shared_bytes, shared),
    ]
    return [reason for reason in found if reason.n_bytes]


def describe_unknown(*, is_local: bool, sees_all: bool) -> str:
    """What may keep space when nothing was found that does.

    is_local  no server has a part in it
    sees_all  we may look at all processes
    """
    causes = ["others wrote meanwhile"]
    if not sees_all:
        causes.append("processes of other users have deleted files open (root would see them)")
    causes.append("a snapshot keeps it" if is_local else "the server frees it later, or keeps it in a snapshot")
    return ", or ".join(causes)


def total(surveys: Iterable[Survey]) -> Survey:
    """Several surveys as one. Links between their trees count as links outside."""
    several = [Survey(0, 0, 0, 0, 0, False), *surveys]
    sums = Survey._make(map(sum, zip(*several, strict=True)))
    return sums._replace(is_at_least=any(survey.is_at_least for survey in several))


def taken_bytes(size: int, n_blocks: int, block_bytes: int, inline_max_bytes: int) -> int:
    """The space that a file takes, by its stat.

    n_blocks          of `STAT_BLOCK_BYTES`
    block_bytes       the filesystem's own
    inline_max_bytes  files up to this size may lie in the metadata; 0 where all have blocks of their own
    """
    taken = n_blocks * STAT_BLOCK_BYTES
    is_inline = 0 < size <= inline_max_bytes and taken <= block_bytes
    return size if is_inline else taken
