"""The administrator's policy for the reaper, and the decisions that follow from it; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple

from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.names import ContainerId
from fusefs.core.orphan_age import Clock, FirstSight, age_ns, first_sight

DAY_MIN = 24 * 60


class TimeWindow(NamedTuple):
    """A part of the local day in minutes, without its last minute; over midnight if it ends no later than it begins."""

    begins_min: int
    ends_min: int

    def __str__(self) -> str:
        """As users write it: `22:00-06:00`."""
        return "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in self)


def parse_window(text: str) -> TimeWindow:
    """Parse a window such as `22:00-06:00`; a day ends at 24:00.

    Raises  ValueError
    """
    match = re.fullmatch(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})", text)
    if not match:
        raise ValueError(text)
    begins_h, begins_m, ends_h, ends_m = map(int, match.groups())
    begins, ends = begins_h * 60 + begins_m, ends_h * 60 + ends_m
    if begins_m > 59 or ends_m > 59 or begins >= DAY_MIN or ends > DAY_MIN or begins == ends:
        raise ValueError(text)
    return TimeWindow(begins, ends)


def opens_in_s(windows: Iterable[TimeWindow], second: int) -> int:
    """Seconds until a window opens; 0 if one is open, or if there are none.

    second  of the local day; because of daylight saving time, ask again at least every hour
    """
    return min((_opens_in_s(window, second) for window in windows), default=0)


def _opens_in_s(window: TimeWindow, second: int) -> int:
    begins, ends = window.begins_min * 60, window.ends_min * 60
    is_open = begins <= second < ends if begins < ends else second >= begins or second < ends
    return 0 if is_open else (begins - second) % (DAY_MIN * 60)


MINIMUM_AGE_S = 600
"""Ten minutes, however low the volume's space: enough to notice that it was the wrong directory, and to restore it."""
HORIZON_S = 86_400
"""A day: with an even flow, expired orphans are deleted before the same amount expires again."""
LOW, HIGH = 0.05, 0.10
"""Shares of a volume. Below 5 % free filesystems get slow; 10 % free is enough for the next hour's work."""


class DeleteAs(Enum):
    """The user as whom the reaper deletes: the owner of the orphan, or root."""

    OWNER = "owner"
    ROOT = "root"


class RetentionRules(NamedTuple):
    """The rules for orphans from one place.

    retention_s    for orphans without a retention of their own; None: kept until space is low
    minimum_age_s  no rule deletes a younger orphan, unless its owner requested less
    keep           patterns (fnmatch, `*` also matches `/`) of origins that are never reaped automatically
    users          names or uids to which `delete_as` applies if it is ROOT: users write records, so that a path in one
                   proves nothing
    clears_flags   delete immutable and append-only files, too, if root deletes
    """

    retention_s: int | None = DEFAULT_RETENTION_S
    minimum_age_s: int = MINIMUM_AGE_S
    keep: tuple[str, ...] = ()
    delete_as: DeleteAs = DeleteAs.OWNER
    users: tuple[str, ...] = ()
    clears_flags: bool = False

    def deletes_as_root(self, uid: int, name: str) -> bool:
        """Whether root deletes what this user swapped."""
        return self.delete_as is DeleteAs.ROOT and (name in self.users or str(uid) in self.users)

    def keeps(self, origin: bytes | None) -> bool:
        """Whether a pattern protects orphans from there."""
        return origin is not None and any(fnmatchcase(origin, pattern.encode()) for pattern in self.keep)


class Quota(NamedTuple):
    """The most that one volume's trash may use, of each kind; None: unlimited. A full trash never blocks a delete."""

    bytes: int | None = None
    inodes: int | None = None
    share: float | None = None

    def limit_bytes(self, total_bytes: int) -> int | None:
        """The bytes that the trash may use on a volume of that size."""
        of_volume = None if self.share is None else int(self.share * total_bytes)
        return min((limit for limit in (self.bytes, of_volume) if limit is not None), default=None)


class Watermark(NamedTuple):
    """Shares of a volume that should be free: below `low` the reaper hurries, until `high` is free."""

    low: float = LOW
    high: float = HIGH


class VolumePolicy(NamedTuple):
    """The policy for one volume.

    path               where it is mounted
    id                 of the volume, wherever it is mounted; empty: whichever volume is mounted at `path`
    mounted_at         where that volume is mounted now; empty: at `path`
    paths              rules for orphans from a directory or below it; the deepest matching one counts
    max_entries_per_s, max_bytes_per_s  None: unlimited, as far as other users of the disk allow
    windows            empty: always
    horizon_s          time in which the backlog should be deleted; None: whatever other users of the disk allow
    blocks, inodes     watermarks; None: the reaper never hurries
    paced              whether the reaper yields to other users of the disk
    n_nodes            number of nodes that serve it: each has its share of the rates and of the backlog
    takeover_s         seconds of silence after which another node's command is taken over; None: by filesystem type
    """

    path: bytes
    is_served: bool = True
    rules: RetentionRules = RetentionRules()
    paths: tuple[tuple[bytes, RetentionRules], ...] = ()
    max_entries_per_s: int | None = None
    max_bytes_per_s: int | None = None
    windows: tuple[TimeWindow, ...] = ()
    horizon_s: int | None = HORIZON_S
    quota: Quota = Quota()
    blocks: Watermark | None = Watermark()
    inodes: Watermark | None = Watermark()
    paced: bool = True
    n_nodes: int = 1
    takeover_s: int | None = None
    id: str = ""
    mounted_at: bytes = b""

    def usual_origin(self, origin: bytes | None) -> bytes | None:
        """The origin as it would be if the volume were mounted at `path`, for which the rules are written."""
        if origin is None or self.mounted_at in (b"", self.path) or not is_at_or_below(origin, self.mounted_at):
            return origin
        below = origin[len(self.mounted_at.rstrip(b"/")) :]
        return self.path.rstrip(b"/") + below or b"/"

    def node_share(self, rate: int | None) -> int | None:
        """One node's share of a rate of the volume."""
        return None if rate is None else max(rate // self.n_nodes, 1)

    def closed_s(self, second: int, *, hurries: bool) -> int:
        """Seconds until a window opens; 0 if one is open, if there are none, or if space is low, which has priority.

        second  of the local day
        """
        return 0 if hurries else opens_in_s(self.windows, second)

    def rules_for(self, origin: bytes | None) -> RetentionRules:
        """The rules for orphans from there; for a dropped tree, those of the volume."""
        deepest = self.deepest_rules_path(origin)
        return self.rules if deepest is None else dict(self.paths)[deepest]

    def deepest_rules_path(self, origin: bytes | None) -> bytes | None:
        """The path in `paths` whose rules apply; None: those of the volume."""
        paths = (path for path, _rules in self.paths if origin is not None and is_at_or_below(origin, path))
        return max(paths, key=len, default=None)


class OrphanSize(NamedTuple):
    """What deleting a container frees, as counted: without what other names, snapshots or reflinks keep."""

    n_inodes: int
    n_bytes: int


class KnownOrphan(NamedTuple):
    """The service's knowledge of one container.

    created_ns   wall time, as its maker recorded it
    retention_s  as its owner requested; None: pinned
    origin       full path; None for a dropped tree
    is_claimed   it is in reaping/: its deletion has begun
    size         None if it was not counted
    sight        None: this is the first time that it is seen
    """

    id: ContainerId
    created_ns: int
    retention_s: int | None
    origin: bytes | None = None
    is_claimed: bool = False
    size: OrphanSize | None = None
    sight: FirstSight | None = None


def is_at_or_below(path: bytes, top: bytes) -> bool:
    """Whether an absolute path is `top` or below it."""
    return path == top or path.startswith(top.rstrip(b"/") + b"/")


def due_in_s(orphan: KnownOrphan, rules: RetentionRules, clock: Clock, *, early: bool = False) -> float | None:
    """Seconds until an orphan may be reaped, 0 or less if it may be now; None: never automatically.

    early  space is low: its retention is ignored, but not its minimum age
    """
    if orphan.is_claimed:
        return 0.0
    if orphan.retention_s is None or rules.keeps(orphan.origin):
        return None
    has_own_retention = orphan.retention_s != DEFAULT_RETENTION_S
    retention_s = orphan.retention_s if has_own_retention else rules.retention_s
    least_s = min(rules.minimum_age_s, orphan.retention_s) if has_own_retention else rules.minimum_age_s
    if early:
        wait_s = least_s
    elif retention_s is None:
        return None
    else:
        wait_s = max(retention_s, least_s)
    return wait_s - age_s(orphan, clock)


def warning_in_s(orphan: KnownOrphan, rules: RetentionRules, clock: Clock, before_s: float) -> float | None:
    """Seconds until the warning that an orphan expires soon, 0 or less if it is due now; None: no warning.

    before_s  how long before the expiry. An orphan that is kept no longer than that needs no warning: its owner has
              only just trashed it. Nor does one that has expired, or is deleted early
    """
    due_s = None if orphan.is_claimed else due_in_s(orphan, rules, clock)
    if due_s is None or due_s <= 0 or due_s + age_s(orphan, clock) <= before_s:
        return None
    return due_s - before_s


def age_s(orphan: KnownOrphan, clock: Clock) -> float:
    """The age of an orphan in seconds."""
    return age_ns(clock, orphan.created_ns, orphan.sight or first_sight(clock, orphan.created_ns)) / 1e9


def hurries(watermark: Watermark | None, free: float | None, hurried: bool) -> bool:
    """Whether a volume is low on space.

    free     share available to ordinary users; None if the filesystem doesn't count it (inodes on btrfs)
    hurried  whether it was at the last check: it stays so until `high` is free
    """
    if watermark is None or free is None:
        return False
    return free < (watermark.high if hurried else watermark.low)


class SpaceNeeded(NamedTuple):
    """The amount to be deleted early; 0: nothing of that kind."""

    n_inodes: int = 0
    n_bytes: int = 0

    def is_met(self) -> bool:
        """Whether nothing more is needed."""
        return self.n_inodes <= 0 and self.n_bytes <= 0

    def minus(self, size: OrphanSize) -> SpaceNeeded:
        """The amount still needed after an orphan is deleted."""
        return SpaceNeeded(self.n_inodes - size.n_inodes, self.n_bytes - size.n_bytes)


OrphansByUser = Mapping[int, Iterable[KnownOrphan]]
"""The orphans of each user; those of a user's subordinate uids belong to that user."""
_MATTERS = 100
"""Less than a hundredth of the amount needed doesn't help."""


def beyond_quota(trash: OrphansByUser, volume: VolumePolicy, total_bytes: int) -> SpaceNeeded:
    """How far the trash exceeds its quota.

    Orphans that were not counted are ignored, and so are claimed ones, which are being deleted.
    """
    sizes = [size for orphans in trash.values() for _orphan, size in _counted(orphans)]
    return SpaceNeeded(
        _excess((size.n_inodes for size in sizes), volume.quota.inodes),
        _excess((size.n_bytes for size in sizes), volume.quota.limit_bytes(total_bytes)),
    )


def choose_early_deletions(
    trash: OrphansByUser, needed: SpaceNeeded, volume: VolumePolicy, clock: Clock, *, is_exact: bool = True
) -> list[ContainerId]:
    """The orphans to delete early, to free the amount needed: the oldest of the users with the most trash.

    There is a level at which cutting every user down to it frees enough. No user loses more than what is above it: a
    user with less trash loses nothing, whatever others have pinned. Orphans that are pinned, kept or too young stay.
    is_exact   whether the exact amount matters; otherwise orphans too small to help are left out
    """
    held = {uid: list(_counted(orphans)) for uid, orphans in trash.items()}
    n_inodes = {uid: sum(size.n_inodes for _orphan, size in ones) for uid, ones in held.items()}
    n_bytes = {uid: sum(size.n_bytes for _orphan, size in ones) for uid, ones in held.items()}
    inode_level = _level(n_inodes.values(), sum(n_inodes.values()) - needed.n_inodes)
    byte_level = _level(n_bytes.values(), sum(n_bytes.values()) - needed.n_bytes)
    chosen: list[tuple[ContainerId, OrphanSize]] = []
    remaining = needed
    surplus_of = {
        uid: SpaceNeeded(
            n_inodes[uid] - inode_level if needed.n_inodes > 0 else 0,
            n_bytes[uid] - byte_level if needed.n_bytes > 0 else 0,
        )
        for uid in held
    }
    for uid, surplus in sorted(surplus_of.items(), key=lambda one: (-one[1].n_bytes, -one[1].n_inodes, one[0])):
        if surplus.is_met():
            continue
        for orphan, size in sorted(held[uid], key=lambda one: (-age_s(one[0], clock), one[0].id)):
            if surplus.is_met() or remaining.is_met():
                break
            due_s = due_in_s(orphan, volume.rules_for(orphan.origin), clock, early=True)
            if due_s is None or due_s > 0:
                continue
            chosen.append((orphan.id, size))
            surplus, remaining = surplus.minus(size), remaining.minus(size)
    if not is_exact:
        _drop_too_small(chosen, needed)
    return [identifier for identifier, _size in chosen]


def _drop_too_small(chosen: list[tuple[ContainerId, OrphanSize]], needed: SpaceNeeded) -> None:
    """Drop the last orphans, as long as those dropped are together less than a hundredth of the amount needed."""
    stays = SpaceNeeded(needed.n_inodes // _MATTERS, needed.n_bytes // _MATTERS)
    while chosen:
        stays = stays.minus(chosen[-1][1])
        if (needed.n_inodes > 0 and stays.n_inodes <= 0) or (needed.n_bytes > 0 and stays.n_bytes <= 0):
            return
        chosen.pop()


def _counted(trash: Iterable[KnownOrphan]) -> Iterator[tuple[KnownOrphan, OrphanSize]]:
    return ((orphan, orphan.size) for orphan in trash if orphan.size is not None and not orphan.is_claimed)


def _excess(sizes: Iterable[int], limit: int | None) -> int:
    """How far the sum exceeds a limit; 0 or less if it does not."""
    return 0 if limit is None else sum(sizes) - limit


def _level(held: Iterable[int], allowed: int) -> int:
    """The level to which each amount must be cut so that the sum is `allowed`."""
    amounts = sorted(held)
    for index, amount in enumerate(amounts):
        n_remaining = len(amounts) - index
        if amount * n_remaining > allowed:
            return max(allowed, 0) // n_remaining
        allowed -= amount
    return amounts[-1] if amounts else 0
