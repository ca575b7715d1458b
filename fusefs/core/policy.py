"""The administrator's policy for the reaper, and the decisions that follow from it: values in, values out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple

from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.names import ContainerId
from fusefs.core.orphan_age import Clock, FirstSight, age_ns, see

DAY_MIN = 24 * 60


class TimeWindow(NamedTuple):
    """From one minute of the local day to another, which is not part of it; over midnight if it ends no later."""

    begins_min: int
    ends_min: int

    def __str__(self) -> str:
        """As it is typed: `22:00-06:00`."""
        return "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in self)


def parse_window(text: str) -> TimeWindow:
    """The window in `22:00-06:00`; a day ends at 24:00.

    Raises  ValueError
    """
    found = re.fullmatch(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})", text)
    if not found:
        raise ValueError(text)
    begins_h, begins_m, ends_h, ends_m = map(int, found.groups())
    begins, ends = begins_h * 60 + begins_m, ends_h * 60 + ends_m
    if begins_m > 59 or ends_m > 59 or begins >= DAY_MIN or ends > DAY_MIN or begins == ends:
        raise ValueError(text)
    return TimeWindow(begins, ends)


def opens_in_s(windows: Iterable[TimeWindow], second: int) -> int:
    """Seconds until work may be done; 0 if it may now, or if there are no windows.

    second  of the local day; on a day on which the clocks change look again at least every hour
    """
    return min((_opens_in_s(window, second) for window in windows), default=0)


def _opens_in_s(window: TimeWindow, second: int) -> int:
    begins, ends = window.begins_min * 60, window.ends_min * 60
    is_open = begins <= second < ends if begins < ends else second >= begins or second < ends
    return 0 if is_open else (begins - second) % (DAY_MIN * 60)


MINIMUM_AGE_S = 600
"""Ten minutes, whatever the volume lacks: to notice that it was the wrong directory, and to type the restore."""
HORIZON_S = 86_400
"""A day: what fell due is gone before as much again falls due, in an even flow."""
LOW, HIGH = 0.05, 0.10
"""Of a volume. Below 5 % free filesystems get slow, and people call; at 10 % there is room for the next hour's work."""


class DeleteAs(Enum):
    """The user as whom the reaper deletes: the owner of the orphan, or root."""

    OWNER = "owner"
    ROOT = "root"


class RetentionRules(NamedTuple):
    """What holds for orphans from one place.

    retention_s    where none but the usual was asked for; None: kept until space is wanted
    minimum_age_s  no rule lets an orphan go younger than that, unless its owner asked for less
    keep           patterns (fnmatch, `*` matches `/` too) of origins: never reaped by itself
    users          names or uids for which `delete_as` applies if it is ROOT: users write records, so that a path in one
                   proves nothing
    clears_flags   immutable and append-only ones too, where root deletes
    """

    retention_s: int | None = DEFAULT_RETENTION_S
    minimum_age_s: int = MINIMUM_AGE_S
    keep: tuple[str, ...] = ()
    delete_as: DeleteAs = DeleteAs.OWNER
    users: tuple[str, ...] = ()
    clears_flags: bool = False

    def gives_root(self, uid: int, name: str) -> bool:
        """Whether root deletes what this user swapped."""
        return self.delete_as is DeleteAs.ROOT and (name in self.users or str(uid) in self.users)

    def keeps(self, origin: bytes | None) -> bool:
        """Whether a pattern keeps what came from there."""
        return origin is not None and any(fnmatchcase(origin, pattern.encode()) for pattern in self.keep)


class Quota(NamedTuple):
    """How much the trash of one volume may take, of each kind; None: any amount. A full trash blocks no delete."""

    bytes: int | None = None
    inodes: int | None = None
    share: float | None = None

    def limit_bytes(self, total_bytes: int) -> int | None:
        """Bytes that the trash may take on a volume of that size."""
        of_volume = None if self.share is None else int(self.share * total_bytes)
        return min((limit for limit in (self.bytes, of_volume) if limit is not None), default=None)


class Watermark(NamedTuple):
    """Shares of a volume that should be free: below `low` the reaper hurries, until there is `high`."""

    low: float = LOW
    high: float = HIGH


class VolumePolicy(NamedTuple):
    """What holds for one volume.

    path               where it is mounted
    id                 of the volume that it is about, wherever that is mounted; empty: of whichever is at `path`
    mounted_at         where that volume is now; empty: at `path`
    paths              rules for what came from a directory or from below it; of several the deepest
    max_entries_per_s  and bytes; None: as fast as the kernel, as far as neighbours allow
    windows            none: always
    horizon_s          the backlog shall be gone within; None: at whatever pace neighbours allow
    blocks, inodes     watermarks; None: nothing hurries
    paced              whether it makes way for others that use the disk
    n_nodes            that serve it: each has its part of those rates, and of the backlog
    takeover_s         of silence until another node's command is taken over; None: by the type of the filesystem
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

    def usual(self, origin: bytes | None) -> bytes | None:
        """The origin that something would have if its volume were mounted where its rules know it."""
        if origin is None or self.mounted_at in (b"", self.path) or not is_at_or_below(origin, self.mounted_at):
            return origin
        way = origin[len(self.mounted_at.rstrip(b"/")) :]
        return self.path.rstrip(b"/") + way or b"/"

    def part_of(self, rate: int | None) -> int | None:
        """What one node may have of a volume's rate."""
        return None if rate is None else max(rate // self.n_nodes, 1)

    def closed_s(self, second: int, *, hurries: bool) -> int:
        """Seconds until a window opens; 0 if one is open, if there are none, or if the volume runs full: that is first.

        second  of the local day
        """
        return 0 if hurries else opens_in_s(self.windows, second)

    def rules_for(self, origin: bytes | None) -> RetentionRules:
        """The rules for what came from there; those of the volume for what was dropped."""
        deepest = self.deepest(origin)
        return self.rules if deepest is None else dict(self.paths)[deepest]

    def deepest(self, origin: bytes | None) -> bytes | None:
        """The path among `paths` whose rules those are; None if they are the volume's."""
        found = (path for path, _rules in self.paths if origin is not None and is_at_or_below(origin, path))
        return max(found, key=len, default=None)


class OrphanSize(NamedTuple):
    """What goes with a container, as it was counted: not what other names, snapshots or reflinks keep."""

    n_inodes: int
    n_bytes: int


class KnownOrphan(NamedTuple):
    """What the service knows of one container.

    created_ns   wall time, by the word of its maker
    retention_s  as its owner asked; None: pinned
    origin       full path; None for what was dropped
    is_claimed   in reaping/: it is given up already
    size         None if it was not counted
    sight        None: it is seen for the first time now
    """

    id: ContainerId
    created_ns: int
    retention_s: int | None
    origin: bytes | None = None
    is_claimed: bool = False
    size: OrphanSize | None = None
    sight: FirstSight | None = None


def is_at_or_below(path: bytes, top: bytes) -> bool:
    """Whether an absolute path is `top`, or lies in it."""
    return path == top or path.startswith(top.rstrip(b"/") + b"/")


def due_at_s(known: KnownOrphan, rules: RetentionRules, clock: Clock, *, early: bool = False) -> float | None:
    """Seconds until an orphan may be reaped, 0 or less if it may now; None: not by itself.

    early  space is wanted: its retention is given up, but not its first minutes
    """
    if known.is_claimed:
        return 0.0
    if known.retention_s is None or rules.keeps(known.origin):
        return None
    asked_for_other = known.retention_s != DEFAULT_RETENTION_S
    retention_s = known.retention_s if asked_for_other else rules.retention_s
    least_s = min(rules.minimum_age_s, known.retention_s) if asked_for_other else rules.minimum_age_s
    if early:
        wait_s = least_s
    elif retention_s is None:
        return None
    else:
        wait_s = max(retention_s, least_s)
    return wait_s - age_s(known, clock)


def warning_in_s(known: KnownOrphan, rules: RetentionRules, clock: Clock, before_s: float) -> float | None:
    """Seconds until it is to be told that an orphan's term ends, 0 or less if it is to be now; None: nothing is.

    before_s  so long before that end. Of one that is kept no longer than that nothing is told: who took it away just
              now knows it; nor of one whose term is over, or that goes early
    """
    due_s = None if known.is_claimed else due_at_s(known, rules, clock)
    if due_s is None or due_s <= 0 or due_s + age_s(known, clock) <= before_s:
        return None
    return due_s - before_s


def age_s(known: KnownOrphan, clock: Clock) -> float:
    """How old an orphan is."""
    return age_ns(clock, known.created_ns, known.sight or see(clock, known.created_ns)) / 1e9


def hurries(watermark: Watermark | None, free: float | None, hurried: bool) -> bool:
    """Whether a volume wants space.

    free     share that ordinary users can have; None where the filesystem doesn't count it (inodes on btrfs)
    hurried  whether it did at the last look: it goes on until `high`
    """
    if watermark is None or free is None:
        return False
    return free < (watermark.high if hurried else watermark.low)


class SpaceWanted(NamedTuple):
    """So much is to be given up before its time; 0: nothing of it."""

    n_inodes: int = 0
    n_bytes: int = 0

    def is_met(self) -> bool:
        """Whether that is nothing."""
        return self.n_inodes <= 0 and self.n_bytes <= 0

    def less(self, size: OrphanSize) -> SpaceWanted:
        """What is still wanted when an orphan goes."""
        return SpaceWanted(self.n_inodes - size.n_inodes, self.n_bytes - size.n_bytes)


Held = Mapping[int, Iterable[KnownOrphan]]
"""The orphans of each user; those of a user's subordinate uids are that user's."""
_MATTERS = 100
"""What is less than a hundredth of what is wanted helps nobody who waits for space."""


def beyond_quota(trash: Held, volume: VolumePolicy, total_bytes: int) -> SpaceWanted:
    """How much the trash is larger than it may be.

    What was not counted takes no room as yet, and what is claimed goes anyway.
    """
    sizes = [size for known in trash.values() for _known, size in _counted(known)]
    return SpaceWanted(
        _excess((size.n_inodes for size in sizes), volume.quota.inodes),
        _excess((size.n_bytes for size in sizes), volume.quota.limit_bytes(total_bytes)),
    )


def go_early(
    trash: Held, wanted: SpaceWanted, volume: VolumePolicy, clock: Clock, *, all_of_it: bool = True
) -> list[ContainerId]:
    """The orphans that go before their time so that so much is given up: of the largest holders the oldest.

    Nobody gives up more than down to the level at which all others would give up as much: whoever holds less than that
    loses nothing, whatever the others have pinned. Pinned and kept ones stay, and so does what is too young.
    all_of_it  whether the last bit matters; else nothing goes that could not help
    """
    held = {uid: list(_counted(known)) for uid, known in trash.items()}
    n_inodes = {uid: sum(size.n_inodes for _known, size in ones) for uid, ones in held.items()}
    n_bytes = {uid: sum(size.n_bytes for _known, size in ones) for uid, ones in held.items()}
    few = _level(n_inodes.values(), sum(n_inodes.values()) - wanted.n_inodes)
    little = _level(n_bytes.values(), sum(n_bytes.values()) - wanted.n_bytes)
    going: list[tuple[ContainerId, OrphanSize]] = []
    left = wanted
    surplus_of = {
        uid: SpaceWanted(
            n_inodes[uid] - few if wanted.n_inodes > 0 else 0, n_bytes[uid] - little if wanted.n_bytes > 0 else 0
        )
        for uid in held
    }
    for uid, surplus in sorted(surplus_of.items(), key=lambda one: (-one[1].n_bytes, -one[1].n_inodes, one[0])):
        if surplus.is_met():
            continue
        for known, size in sorted(held[uid], key=lambda one: (-age_s(one[0], clock), one[0].id)):
            if surplus.is_met() or left.is_met():
                break
            due_s = due_at_s(known, volume.rules_for(known.origin), clock, early=True)
            if due_s is None or due_s > 0:
                continue
            going.append((known.id, size))
            surplus, left = surplus.less(size), left.less(size)
    if not all_of_it:
        _drop_what_cannot_help(going, wanted)
    return [identifier for identifier, _size in going]


def _drop_what_cannot_help(going: list[tuple[ContainerId, OrphanSize]], wanted: SpaceWanted) -> None:
    """Let the last ones stay, as long as all that stays is a trifle of what is wanted."""
    stays = SpaceWanted(wanted.n_inodes // _MATTERS, wanted.n_bytes // _MATTERS)
    while going:
        stays = stays.less(going[-1][1])
        if (wanted.n_inodes > 0 and stays.n_inodes <= 0) or (wanted.n_bytes > 0 and stays.n_bytes <= 0):
            return
        going.pop()


def _counted(trash: Iterable[KnownOrphan]) -> Iterator[tuple[KnownOrphan, OrphanSize]]:
    return ((known, known.size) for known in trash if known.size is not None and not known.is_claimed)


def _excess(sizes: Iterable[int], limit: int | None) -> int:
    """By how much they are above a limit; 0 or less if they are not."""
    return 0 if limit is None else sum(sizes) - limit


def _level(held: Iterable[int], allowed: int) -> int:
    """The level down to which each has to give up what is above it, so that all of it is so much."""
    amounts = sorted(held)
    for index, amount in enumerate(amounts):
        n_left = len(amounts) - index
        if amount * n_left > allowed:
            return max(allowed, 0) // n_left
        allowed -= amount
    return amounts[-1] if amounts else 0
