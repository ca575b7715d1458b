"""The administrator's policy for the reaper: retention, quotas, and the decisions that follow from them; pure."""

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
    """A part of the local day, in minutes; the end is excluded. It spans midnight unless it ends after it begins."""

    begins_min: int
    ends_min: int

    def __str__(self) -> str:
        """Format the window as users write it: `22:00-06:00`."""
        return "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in self)


def parse_window(text: str) -> TimeWindow:
    """Parse a window such as `22:00-06:00`; the end of a day may be written as 24:00.

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
    """Return the seconds until a window opens, or 0 if one is open or there are no windows.

    second  the present second of the local day. Because of daylight saving time, the result is valid for an hour at
            most
    """
    return min((_opens_in_s(window, second) for window in windows), default=0)


def _opens_in_s(window: TimeWindow, second: int) -> int:
    begins, ends = window.begins_min * 60, window.ends_min * 60
    is_open = begins <= second < ends if begins < ends else second >= begins or second < ends
    return 0 if is_open else (begins - second) % (DAY_MIN * 60)


MINIMUM_AGE_S = 600
"""Ten minutes, however low the space is: enough time to notice a swap of the wrong directory and restore it."""
HORIZON_S = 86_400
"""One day: if orphans expire at an even rate, a day's orphans are deleted before those of the next day expire."""
LOW, HIGH = 0.05, 0.10
"""Shares of a volume that are free. Below 5 %, filesystems get slow; 10 % is enough for the next hour's work."""


class DeleteAs(Enum):
    """The user that the reaper becomes to delete an orphan: its owner, or root."""

    OWNER = "owner"
    ROOT = "root"


class RetentionRules(NamedTuple):
    """The rules for the orphans of a volume or a directory.

    retention_s    the retention of orphans that have none of their own; None: they are kept until space is low
    minimum_age_s  no rule deletes a younger orphan, unless its owner requested a shorter retention
    keep           patterns (fnmatch, `*` also matches `/`) of original paths whose orphans are only reaped on request
    users          names or UIDs of the users to whom `delete_as` applies if it is ROOT. Rules for paths are not
                   enough, because users write the paths in their records
    clears_flags   if root deletes, also delete immutable and append-only files
    """

    retention_s: int | None = DEFAULT_RETENTION_S
    minimum_age_s: int = MINIMUM_AGE_S
    keep: tuple[str, ...] = ()
    delete_as: DeleteAs = DeleteAs.OWNER
    users: tuple[str, ...] = ()
    clears_flags: bool = False

    def deletes_as_root(self, uid: int, name: str) -> bool:
        return self.delete_as is DeleteAs.ROOT and (name in self.users or str(uid) in self.users)

    def keeps(self, origin: bytes | None) -> bool:
        """Whether a pattern protects orphans from this original path."""
        return origin is not None and any(fnmatchcase(origin, pattern.encode()) for pattern in self.keep)


class Quota(NamedTuple):
    """The most space and inodes that the orphans of a volume may use; None: unlimited. A quota never blocks a swap."""

    bytes: int | None = None
    inodes: int | None = None
    share: float | None = None

    def limit_bytes(self, total_bytes: int) -> int | None:
        """Return the bytes that orphans may use on a volume of this size."""
        of_volume = None if self.share is None else int(self.share * total_bytes)
        return min((limit for limit in (self.bytes, of_volume) if limit is not None), default=None)


class Watermark(NamedTuple):
    """Shares of a volume that should be free: below `low` the reaper hurries, until `high` is free."""

    low: float = LOW
    high: float = HIGH


class VolumePolicy(NamedTuple):
    """The policy for one volume.

    path               where the volume is mounted
    id                 the volume's ID, if the policy applies to it wherever it is mounted; empty: the policy applies to
                       any volume that is mounted at `path`
    mounted_at         where that volume is mounted now; empty: at `path`
    paths              rules for orphans from certain directories; those of the deepest matching directory apply
    max_entries_per_s, max_bytes_per_s  None: limited only by other users of the disk
    windows            the times in which the reaper works; empty: always
    horizon_s          time within which the backlog should be deleted; None: no limit
    blocks, inodes     watermarks; None: the reaper never hurries
    paced              whether the reaper yields to other users of the disk
    n_nodes            number of nodes that serve the volume and share the rates and the backlog
    takeover_s         seconds of silence after which another node's command is taken over; None: depends on the
                       filesystem type
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
        """Return the original path as it would be if the volume were mounted at `path`, for which rules are written."""
        if origin is None or self.mounted_at in (b"", self.path) or not is_at_or_below(origin, self.mounted_at):
            return origin
        below = origin[len(self.mounted_at.rstrip(b"/")) :]
        return self.path.rstrip(b"/") + below or b"/"

    def node_share(self, rate: int | None) -> int | None:
        return None if rate is None else max(rate // self.n_nodes, 1)

    def closed_s(self, second: int, *, hurries: bool) -> int:
        """Return the seconds until a window opens; 0 if one is open, there are no windows, or space is low.

        second  the present second of the local day
        """
        return 0 if hurries else opens_in_s(self.windows, second)

    def rules_for(self, origin: bytes | None) -> RetentionRules:
        """Return the rules for orphans from this original path; for None (a dropped tree), those of the volume."""
        deepest = self.deepest_rules_path(origin)
        return self.rules if deepest is None else dict(self.paths)[deepest]

    def deepest_rules_path(self, origin: bytes | None) -> bytes | None:
        """Return the path in `paths` whose rules apply, or None if the volume's own rules apply."""
        paths = (path for path, _rules in self.paths if origin is not None and is_at_or_below(origin, path))
        return max(paths, key=len, default=None)


class OrphanSize(NamedTuple):
    """The inodes and bytes that deleting a container frees, excluding any that links, snapshots or reflinks keep."""

    n_inodes: int
    n_bytes: int


class KnownOrphan(NamedTuple):
    """The service's knowledge of one container.

    created_ns   wall time, as its maker recorded it
    retention_s  the retention that its owner requested; None: pinned
    origin       full original path; None for a dropped tree
    is_claimed   the container is in reaping/: its deletion has begun
    size         None if it was not counted
    sight        None: the service has not seen it before
    """

    id: ContainerId
    created_ns: int
    retention_s: int | None
    origin: bytes | None = None
    is_claimed: bool = False
    size: OrphanSize | None = None
    sight: FirstSight | None = None


def is_at_or_below(path: bytes, top: bytes) -> bool:
    return path == top or path.startswith(top.rstrip(b"/") + b"/")


def due_in_s(orphan: KnownOrphan, rules: RetentionRules, clock: Clock, *, early: bool = False) -> float | None:
    """Return the seconds until an orphan may be reaped (0 or less: now), or None if it is never reaped automatically.

    early  space is low, so the retention is ignored, but not the minimum age
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
    """Return the seconds until the warning that an orphan expires soon (0 or less: it is due), or None for no warning.

    before_s  how long before the expiry the warning is due. There is no warning if the whole retention is at most this
              long, since the owner has only just trashed the tree; nor if the orphan has expired or is being deleted
    """
    due_s = None if orphan.is_claimed else due_in_s(orphan, rules, clock)
    if due_s is None or due_s <= 0 or due_s + age_s(orphan, clock) <= before_s:
        return None
    return due_s - before_s


def age_s(orphan: KnownOrphan, clock: Clock) -> float:
    return age_ns(clock, orphan.created_ns, orphan.sight or first_sight(clock, orphan.created_ns)) / 1e9


def hurries(watermark: Watermark | None, free: float | None, hurried: bool) -> bool:
    """Whether a volume is low on space.

    free     the share available to ordinary users; None if the filesystem does not report it (inodes on btrfs)
    hurried  whether space was low at the last check: then it counts as low until `high` is free
    """
    if watermark is None or free is None:
        return False
    return free < (watermark.high if hurried else watermark.low)


class SpaceNeeded(NamedTuple):
    """The inodes and bytes to be freed by early deletion."""

    n_inodes: int = 0
    n_bytes: int = 0

    def is_met(self) -> bool:
        return self.n_inodes <= 0 and self.n_bytes <= 0

    def minus(self, size: OrphanSize) -> SpaceNeeded:
        """Return the amount still needed after an orphan is deleted."""
        return SpaceNeeded(self.n_inodes - size.n_inodes, self.n_bytes - size.n_bytes)


OrphansByUser = Mapping[int, Iterable[KnownOrphan]]
"""The orphans of each user, including those of the user's subordinate UIDs."""
_MATTERS = 100
"""Orphans that free less than one part in this many of the amount needed don't help."""


def beyond_quota(trash: OrphansByUser, volume: VolumePolicy, total_bytes: int) -> SpaceNeeded:
    """Return how far the orphans of a volume exceed its quota.

    This ignores orphans that were not counted, and claimed ones, which are being deleted.
    """
    sizes = [size for orphans in trash.values() for _orphan, size in _counted(orphans)]
    return SpaceNeeded(
        _excess((size.n_inodes for size in sizes), volume.quota.inodes),
        _excess((size.n_bytes for size in sizes), volume.quota.limit_bytes(total_bytes)),
    )


def choose_early_deletions(
    trash: OrphansByUser, needed: SpaceNeeded, volume: VolumePolicy, clock: Clock, *, is_urgent: bool = False
) -> list[ContainerId]:
    """Choose orphans to delete early to free the amount needed: the oldest orphans of the users with the most trash.

    There is a level such that cutting every user down to it frees enough. No user loses more than the excess over this
    level: a user with less trash loses nothing, whatever others have pinned. Pinned and protected orphans are never
    chosen, nor are orphans that are too young: these count as chosen, so that others lose none in their place.
    is_urgent  space is low: too young orphans are not waited for, and orphans that are too small to help are not chosen
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
            if due_s is None or (due_s > 0 and is_urgent):
                continue
            if due_s <= 0:
                chosen.append((orphan.id, size))
            surplus, remaining = surplus.minus(size), remaining.minus(size)
    if is_urgent:
        _drop_too_small(chosen, needed)
    return [identifier for identifier, _size in chosen]


def _drop_too_small(chosen: list[tuple[ContainerId, OrphanSize]], needed: SpaceNeeded) -> None:
    """Drop the orphans chosen last that together free less than a hundredth of the amount needed."""
    stays = SpaceNeeded(needed.n_inodes // _MATTERS, needed.n_bytes // _MATTERS)
    while chosen:
        stays = stays.minus(chosen[-1][1])
        if (needed.n_inodes > 0 and stays.n_inodes <= 0) or (needed.n_bytes > 0 and stays.n_bytes <= 0):
            return
        chosen.pop()


def _counted(trash: Iterable[KnownOrphan]) -> Iterator[tuple[KnownOrphan, OrphanSize]]:
    return ((orphan, orphan.size) for orphan in trash if orphan.size is not None and not orphan.is_claimed)


def _excess(sizes: Iterable[int], limit: int | None) -> int:
    """Return how far the sum exceeds a limit; the result is 0 or less if it does not."""
    return 0 if limit is None else sum(sizes) - limit


def _level(held: Iterable[int], allowed: int) -> int:
    """Return the level to which larger amounts must be cut so that the sum is `allowed`."""
    amounts = sorted(held)
    for index, amount in enumerate(amounts):
        n_remaining = len(amounts) - index
        if amount * n_remaining > allowed:
            return max(allowed, 0) // n_remaining
        allowed -= amount
    return amounts[-1] if amounts else 0
