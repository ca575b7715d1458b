"""Sums over orphans by user, project or age, and how much of a tree's space its removal frees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from fusefs.core.record import TreeSize

STAT_BLOCK_BYTES = 512
"""What st_blocks counts in, whatever the filesystem's own blocks are."""
INLINE_MAX_BYTES = 2048
"""btrfs keeps a file up to this size (max_inline) in its metadata, and says of it that it has a block."""


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
    n_spare_names  of the entries: names that take no inode with them, as there are others, here or outside
    """

    n_entries: int
    n_bytes: int
    linked_bytes: int
    shared_bytes: int
    n_failed: int
    is_at_least: bool
    n_spare_names: int = 0

    def goes(self) -> tuple[int, int]:
        """The inodes and the bytes that go with it."""
        return self.n_entries - self.n_spare_names, max(self.n_bytes - self.linked_bytes - self.shared_bytes, 0)


class AskedSize(NamedTuple):
    """What a tree takes, as far as that could be found out.

    size        None: nothing
    n_failed    what could not be looked at
    is_stopped  it was not counted to the end
    """

    size: TreeSize | None
    n_failed: int = 0
    is_stopped: bool = False


def taken_bytes(size: int, n_blocks: int, block_bytes: int, inline_max_bytes: int) -> int:
    """The space that a file takes, by its stat.

    n_blocks          of `STAT_BLOCK_BYTES`
    block_bytes       the filesystem's own
    inline_max_bytes  files up to this size may lie in the metadata; 0 where all have blocks of their own
    """
    taken = n_blocks * STAT_BLOCK_BYTES
    is_inline = 0 < size <= inline_max_bytes and taken <= block_bytes
    return size if is_inline else taken


_HOUR_S, _DAY_S = 3600, 86_400
_AGES_S = (0, _HOUR_S, _DAY_S, 7 * _DAY_S, 30 * _DAY_S, 90 * _DAY_S)
"""Where each bracket of ages begins."""


class SumBy(Enum):
    """What orphans are put together by."""

    USER = "user"
    PROJECT = "project"
    AGE = "age"


class SumKey(NamedTuple):
    """What orphans of one sum have in common; of the others, and where a record does not tell it: None.

    project  the first directories of where they came from, below the one that holds the store
    from_s, under_s  their age; under_s: None for the last bracket
    """

    uid: int | None = None
    project: bytes | None = None
    from_s: int | None = None
    under_s: int | None = None


class OrphanSum(NamedTuple):
    """So many orphans together.

    n_bytes    that are known; what is known of `n_unknown` others is nothing
    is_at_least  there may be more
    n_due      whose term has ended
    oldest_s   the age of the oldest; None: no record tells one
    """

    n_orphans: int = 0
    n_bytes: int = 0
    n_unknown: int = 0
    is_at_least: bool = False
    n_due: int = 0
    oldest_s: int | None = None

    def plus(self, other: OrphanSum) -> OrphanSum:
        """Both together."""
        ages = [one for one in (self.oldest_s, other.oldest_s) if one is not None]
        return OrphanSum(
            self.n_orphans + other.n_orphans,
            self.n_bytes + other.n_bytes,
            self.n_unknown + other.n_unknown,
            self.is_at_least or other.is_at_least,
            self.n_due + other.n_due,
            max(ages, default=None),
        )


KeyedSum = tuple[SumKey, OrphanSum]


class OrphanToSum(NamedTuple):
    """What is summed of one: `base` holds its store; age_s, left_s: None if no record tells it, or it is kept."""

    uid: int
    base: bytes
    origin: bytes | None
    age_s: int | None
    left_s: int | None
    size: TreeSize | None


class OrphanSums:
    """Sums by their keys."""

    def __init__(self, by: SumBy, depth: int = 1) -> None:
        """depth: so many directories of a path are a project's name."""
        self._by = by
        self._depth = depth
        self._sums: dict[SumKey, OrphanSum] = {}

    def add(self, one: OrphanToSum) -> None:
        """One orphan more."""
        size = one.size
        is_at_least = size is None or size.is_at_least
        is_due = one.left_s is not None and one.left_s <= 0
        known = 0 if size is None else size.n_bytes
        self.take_in([(self._key(one), OrphanSum(1, known, int(size is None), is_at_least, int(is_due), one.age_s))])

    def take_in(self, sums: Iterable[KeyedSum]) -> None:
        """Those of others, as well."""
        for key, one in sums:
            self._sums[key] = self._sums.get(key, OrphanSum()).plus(one)

    def _key(self, one: OrphanToSum) -> SumKey:
        match self._by:
            case SumBy.USER:
                return SumKey(uid=one.uid)
            case SumBy.PROJECT:
                return SumKey(project=None if one.origin is None else project_of(one.base, one.origin, self._depth))
            case SumBy.AGE:
                return age_key(one.age_s)

    def __iter__(self) -> Iterator[KeyedSum]:
        """By age the youngest first, else what holds most."""
        if self._by is SumBy.AGE:
            return iter(sorted(self._sums.items(), key=lambda one: (one[0].from_s is None, one[0].from_s or 0)))
        return iter(sorted(self._sums.items(), key=lambda one: (-one[1].n_bytes, -one[1].n_orphans, repr(one[0]))))


def age_key(age_s: int | None) -> SumKey:
    """The bracket that an age is in; what seems to come from the future is new."""
    if age_s is None:
        return SumKey()
    at = max(index for index, from_s in enumerate(_AGES_S) if index == 0 or age_s >= from_s)
    return SumKey(from_s=_AGES_S[at], under_s=_AGES_S[at + 1] if at + 1 < len(_AGES_S) else None)


def project_of(base: bytes, origin: bytes, depth: int) -> bytes:
    """The first directories of an origin below the one that holds the store; that one, if the origin is no deeper."""
    top = base.rstrip(b"/")
    inside = origin[len(top) :].strip(b"/").split(b"/")[:depth]
    return top + b"/" + b"/".join(inside) if inside != [b""] else base
