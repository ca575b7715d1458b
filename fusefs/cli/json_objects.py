"""What commands add to the values that they print as JSON, or print instead where there is no such value.

An object has the keys of several of these types, and of others: build_docs/json_schema.py says of which.
"""

from __future__ import annotations

from typing import NamedTuple

from fusefs.core.names import ContainerId


class UndoCommand(NamedTuple):
    """The command that takes it back; None if nothing does."""

    restore: str | None


class RestorableFor(NamedTuple):
    """Seconds until its term ends, negative if it has; None: never by itself."""

    restorable_for_s: int | None


class SummedBy(NamedTuple):
    """What orphans were put together by: `user`, `project` or `age`."""

    sum_by: str


class KeptAs(NamedTuple):
    """The id that was asked for, and that of what is left of it now; None if nothing is."""

    id: ContainerId
    kept_as: ContainerId | None


class WhoseCount(NamedTuple):
    """The orphan that was counted; origin: None if it was dropped"""

    id: ContainerId
    uid: int
    origin: bytes | None


class KnownSize(NamedTuple):
    """What it takes, as core.record.TreeSize has it; None: not known."""

    n_entries: int | None = None
    n_bytes: int | None = None
    linked_bytes: int | None = None
    shared_bytes: int | None = None
    is_at_least: bool = False
    source: str | None = None
    at_ns: int | None = None


class CountEnd(NamedTuple):
    """What could not be looked at, and whether it was counted to the end."""

    n_failed: int
    is_stopped: bool


class PausedVolume(NamedTuple):
    """The directory that holds the store; None: all of them."""

    volume: bytes | None


class ToldSums(NamedTuple):
    """Counts of a sweep. n_bytes: None if nothing was looked at beyond its name"""

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
    """`trash`, `delete` or `move`, and whether it was only counted."""

    action: str
    dry_run: bool


class SweepOutcome(NamedTuple):
    """The counts, and the command that takes back what was trashed."""

    sums: ToldSums
    undo: str | None


class SweepMatch(NamedTuple):
    """A path as find prints it; `type` is a letter of `find -type`."""

    path: str
    type: str
    size: int
    mtime_ns: int
    uid: int
    gid: int


class PlannedRule(NamedTuple):
    """File and key of a rule."""

    rule: str


class RuleLeftUndone(NamedTuple):
    """A directory in which a rule did nothing, why, and the kind of the error if it should have."""

    rule: str
    directory: bytes
    why: str
    error: str | None


class WrittenPurgeLists(NamedTuple):
    """The directory of purge lists, how many users have one, and whether nothing lacks in them."""

    lists: bytes
    n_users: int
    n_entries: int
    is_whole: bool


class ServiceLife(NamedTuple):
    """The directory of a service's status file, whether that service lives, and how old the file is."""

    directory: bytes
    is_running: bool
    is_stale: bool
    age_s: float


class MemoryUse(NamedTuple):
    """How often something was remembered when it was asked for; hit_rate: None if nothing was"""

    n_hits: int
    n_misses: int
    hit_rate: float | None


class RequestTimes(NamedTuple):
    """How often a request came, and how long its answers took; None if none came."""

    n: int
    n_failed: int
    mean_ns: float | None
    p50_ns: float | None
    p99_ns: float | None
    max_ns: int
    total_ns: int
    counts: tuple[int, ...]


class MountNumbers(NamedTuple):
    """A mount's numbers. updated_ns: None before anything was asked"""

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
    """Whether a fast path is on, and why not, or what it saves."""

    is_on: bool
    why: str


class MountExplained(NamedTuple):
    """A mount's fast paths."""

    mount_point: bytes
    source: bytes
    is_running: bool
    fast_paths: dict[str, FastPathReason]


class UnmountedPath(NamedTuple):
    """What is no longer mounted, whether its daemon ended, and whether it was killed for that."""

    path: bytes
    is_ended: bool
    is_killed: bool


class ErrorTold(NamedTuple):
    """An error, on standard error: its kind, a sentence, the next step (may be empty), the exit code by itself."""

    error: str
    message: str
    hint: str
    exit_code: int
