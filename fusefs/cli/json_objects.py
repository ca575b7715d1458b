"""Types that commands print as JSON, by themselves or together with the fields of other types.

build_docs/json_schema.py lists the types of each command's objects. The first line of a docstring is its description
in the schema.
"""

from __future__ import annotations

from typing import NamedTuple

from fusefs.core.names import ContainerId


class UndoCommand(NamedTuple):
    """The command that restores the orphan; null if the orphan can't be restored."""

    restore: str | None


class RestorableFor(NamedTuple):
    """Seconds until the orphan expires, negative afterwards; null if it is pinned."""

    restorable_for_s: int | None


class SummedBy(NamedTuple):
    """The property by which the sums are grouped: `user`, `project` or `age`."""

    sum_by: str


class KeptAs(NamedTuple):
    """The requested ID, and the ID of the remaining part; null if nothing remains."""

    id: ContainerId
    kept_as: ContainerId | None


class WhoseCount(NamedTuple):
    """The orphan that was counted; origin is null if the orphan came from the drop directory."""

    id: ContainerId
    uid: int
    origin: bytes | None


class KnownSize(NamedTuple):
    """The size, with the keys of core.record.TreeSize; unknown values are null."""

    n_entries: int | None = None
    n_bytes: int | None = None
    linked_bytes: int | None = None
    shared_bytes: int | None = None
    is_at_least: bool = False
    source: str | None = None
    at_ns: int | None = None


class CountEnd(NamedTuple):
    """The number of entries that could not be counted, and whether the count was stopped."""

    n_failed: int
    is_stopped: bool


class PausedVolume(NamedTuple):
    """The directory that holds the store; null for all volumes."""

    volume: bytes | None


class ToldSums(NamedTuple):
    """The counts of a sweep. n_bytes is null if entries were selected only by name."""

    n_seen: int
    n_matched: int
    n_done: int
    n_vanished: int
    n_missing: int
    n_unmatched: int
    n_failed: int
    n_mounts: int
    n_spared: int
    n_inside: int
    n_bytes: int | None


class SweepAction(NamedTuple):
    """`trash`, `delete` or `move`, and whether the matches were only counted."""

    action: str
    dry_run: bool


class SweepOutcome(NamedTuple):
    """The counts, and the command that restores the trashed files."""

    sums: ToldSums
    undo: str | None


class SweepMatch(NamedTuple):
    """A path in the form that find prints; `type` is a letter of `find -type`."""

    path: str
    type: str
    size: int
    mtime_ns: int
    uid: int
    gid: int


class PlannedRule(NamedTuple):
    """The file and the key of a rule."""

    rule: str


class RuleLeftUndone(NamedTuple):
    """A directory in which a rule did nothing, the reason, and the kind of the error if it failed."""

    rule: str
    directory: bytes
    why: str
    error: str | None


class WrittenPurgeLists(NamedTuple):
    """The directory of purge lists, how many users have one, and whether the lists are complete."""

    lists: bytes
    n_users: int
    n_entries: int
    is_whole: bool


class ServiceLife(NamedTuple):
    """The directory of a service's status file, whether that service is running, and the age of the file."""

    directory: bytes
    is_running: bool
    is_stale: bool
    age_s: float


class MemoryUse(NamedTuple):
    """Hits and misses of a cache; hit_rate is null if there were none."""

    n_hits: int
    n_misses: int
    hit_rate: float | None


class RequestTimes(NamedTuple):
    """The number of requests, and how long their replies took; null if there were none."""

    n: int
    n_failed: int
    mean_ns: float | None
    p50_ns: float | None
    p99_ns: float | None
    max_ns: int
    total_ns: int
    counts: tuple[int, ...]


class MountNumbers(NamedTuple):
    """The counters of a mount. updated_ns is null before the first request."""

    mount_point: bytes
    source: bytes
    is_running: bool
    version: str
    pid: int
    started_ns: int
    updated_ns: int | None
    gauges: dict[str, int]
    remembered: dict[str, MemoryUse]
    bounds_ns: tuple[int, ...]
    operations: dict[str, RequestTimes]
    fast_paths: dict[str, bool]


class MountsSeen(NamedTuple):
    """All mounts that the caller may see."""

    mounts: tuple[MountNumbers, ...]


class FastPathReason(NamedTuple):
    """Whether a fast path is on, and what it does, or why it is off."""

    is_on: bool
    why: str


class MountExplained(NamedTuple):
    """The fast paths of a mount."""

    mount_point: bytes
    source: bytes
    is_running: bool
    fast_paths: dict[str, FastPathReason]


class UnmountedPath(NamedTuple):
    """The unmounted path, whether the mount's daemon ended, and whether the daemon had to be killed."""

    path: bytes
    is_ended: bool
    is_killed: bool


class ErrorTold(NamedTuple):
    """An error, printed on standard error: its kind, message, hint (may be empty) and exit code."""

    error: str
    message: str
    hint: str
    exit_code: int
