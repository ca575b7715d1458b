"""Sums over orphans by user, project or age, and how much space the removal of a tree frees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from fusefs.core.record import TreeSize

STAT_BLOCK_BYTES = 512
"""The unit of st_blocks, whatever the filesystem's block size is."""
INLINE_MAX_BYTES = 2048
"""btrfs stores a file up to this size (max_inline) in its metadata, but reports a block for it."""


class Survey(NamedTuple):
    """The result of a walk over a container.

    n_entries     number of entries, as a reaper counts them
    n_bytes       size of the blocks of all inodes, each counted once
    linked_bytes  the part of n_bytes that deleting the tree does not free, because of hard links outside
    shared_bytes  the most that may remain in use after a delete, because snapshots or reflinks share it; 0 if not
                  requested. Blocks that only files of this tree share are included, since they can't be distinguished
    n_failed      number of entries that could not be read; an unreadable directory counts as one
    is_at_least   not all files with hard links could be remembered: each name of the others added its share of the
                  file's size, and no links from outside were assumed
    n_spare_names  entries whose removal frees no inode, because the inode has other names inside or outside the tree
    """

    n_entries: int
    n_bytes: int
    linked_bytes: int
    shared_bytes: int
    n_failed: int
    is_at_least: bool
    n_spare_names: int = 0

    def freed_inodes_and_bytes(self) -> tuple[int, int]:
        return self.n_entries - self.n_spare_names, max(self.n_bytes - self.linked_bytes - self.shared_bytes, 0)


class MeasuredSize(NamedTuple):
    """The size of a tree, as far as it could be measured.

    size        None: nothing is known
    n_failed    number of entries that could not be read
    is_stopped  counting was stopped before the end
    """

    size: TreeSize | None
    n_failed: int = 0
    is_stopped: bool = False


def space_of_file(size: int, n_blocks: int, block_bytes: int, inline_max_bytes: int) -> int:
    """Compute the disk space of a file from its stat.

    n_blocks          st_blocks
    block_bytes       the filesystem's block size
    inline_max_bytes  files up to this size may be stored in the metadata; 0 if all files have their own blocks
    """
    taken = n_blocks * STAT_BLOCK_BYTES
    is_inline = 0 < size <= inline_max_bytes and taken <= block_bytes
    return size if is_inline else taken


_HOUR_S, _DAY_S = 3600, 86_400
_AGES_S = (0, _HOUR_S, _DAY_S, 7 * _DAY_S, 30 * _DAY_S, 90 * _DAY_S)
"""Lower bounds of the age brackets."""


class SumBy(Enum):
    """The property by which orphans are grouped."""

    USER = "user"
    PROJECT = "project"
    AGE = "age"


class SumKey(NamedTuple):
    """The common property of a group of orphans. Fields of other kinds of groups, and unknown values, are None.

    project  the first directories of their original paths, below the directory that holds the store
    from_s, under_s  their age bracket; under_s: None for the oldest one
    """

    uid: int | None = None
    project: bytes | None = None
    from_s: int | None = None
    under_s: int | None = None


class OrphanSum(NamedTuple):
    """The sum of a group of orphans.

    n_bytes    total of the known sizes; the sizes of `n_unknown` orphans are not known
    is_at_least  the actual sum may be larger
    n_due      number of expired orphans
    oldest_s   age of the oldest orphan; None: no record states an age
    """

    n_orphans: int = 0
    n_bytes: int = 0
    n_unknown: int = 0
    is_at_least: bool = False
    n_due: int = 0
    oldest_s: int | None = None

    def plus(self, other: OrphanSum) -> OrphanSum:
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
    """An orphan to be summed.

    base                  the directory that holds the store
    age_s, expires_in_s   None if no record states them; expires_in_s is also None if the orphan is pinned
    """

    uid: int
    base: bytes
    origin: bytes | None
    age_s: int | None
    expires_in_s: int | None
    size: TreeSize | None


class OrphanSums:
    def __init__(self, by: SumBy, depth: int = 1) -> None:
        """depth: how many directories of a path form a project's name"""
        self._by = by
        self._depth = depth
        self._sums: dict[SumKey, OrphanSum] = {}

    def add(self, one: OrphanToSum) -> None:
        size = one.size
        is_at_least = size is None or size.is_at_least
        is_due = one.expires_in_s is not None and one.expires_in_s <= 0
        n_bytes = 0 if size is None else size.n_bytes
        self.add_sums([(self._key(one), OrphanSum(1, n_bytes, int(size is None), is_at_least, int(is_due), one.age_s))])

    def add_sums(self, sums: Iterable[KeyedSum]) -> None:
        """Add sums that were computed elsewhere."""
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
        """Iterate over the sums: the youngest first if they are grouped by age, otherwise the largest first."""
        if self._by is SumBy.AGE:
            return iter(sorted(self._sums.items(), key=lambda one: (one[0].from_s is None, one[0].from_s or 0)))
        return iter(sorted(self._sums.items(), key=lambda one: (-one[1].n_bytes, -one[1].n_orphans, repr(one[0]))))


def age_key(age_s: int | None) -> SumKey:
    """Return the bracket of an age; a negative age counts as 0."""
    if age_s is None:
        return SumKey()
    bracket = max(index for index, from_s in enumerate(_AGES_S) if index == 0 or age_s >= from_s)
    return SumKey(from_s=_AGES_S[bracket], under_s=_AGES_S[bracket + 1] if bracket + 1 < len(_AGES_S) else None)


def project_of(base: bytes, origin: bytes, depth: int) -> bytes:
    """Return the first directories of an original path below `base`, or `base` itself if the path is no deeper."""
    top = base.rstrip(b"/")
    inside = origin[len(top) :].strip(b"/").split(b"/")[:depth]
    return top + b"/" + b"/".join(inside) if inside != [b""] else base
