"""The service's status: a small file that every user can read at almost no cost.

Because every user can read it, it contains no names of users' files, and only the end of an orphan's ID.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, NamedTuple

import msgspec

from fusefs.core.errors import TrashdError
from fusefs.core.record import unquote_path

Count = Annotated[int, msgspec.Meta(ge=0)]
MOST_FAULTS = 10
HIDDEN = "….".encode()
"""Together with the end of the store's ID, this replaces the names in a path that other users must not see."""


class HookCounts(NamedTuple):
    """The numbers of hooks that ran, that failed or were killed, and that were dropped since the service started."""

    n_run: int = 0
    n_failed: int = 0
    n_dropped: int = 0


class VolumePhase(Enum):
    """The current activity of a volume's reaper.

    LOOKING    recovers, adopts, and checks which orphans are due
    REAPING    reaps at full speed
    YIELDING   reaps slowly because other processes use the disk
    HURRYING   reaps without pacing because space is low
    WINDOW     waits for its working hours
    BROKEN     waits before it tries again, after too many errors, or because the store exists but can't be used
    ELSEWHERE  another reaper serves the volume
    UNPROVEN   reaps nothing, because the store is not trusted: a user's store that is not in the user's registry, a
               store of root's that root did not make, a copy of a mounted volume, or one that had rules elsewhere
    GONE       there is no store: the volume is no longer mounted, or another filesystem is mounted there
    """

    IDLE = "idle"
    LOOKING = "looking"
    REAPING = "reaping"
    YIELDING = "yielding"
    HURRYING = "hurrying"
    WINDOW = "window"
    PAUSED = "paused"
    BROKEN = "broken"
    ELSEWHERE = "elsewhere"
    UNPROVEN = "unproven"
    GONE = "gone"


class CurrentReap(msgspec.Struct, frozen=True):
    """An orphan that is being reaped. id_end: the end of its ID, which all commands accept"""

    uid: int
    id_end: str
    n_removed: int


class StatusFault(msgspec.Struct, frozen=True):
    """An error and its wall time; the text contains no names of users' files."""

    at_ns: int
    text: str


class HeldBytes(NamedTuple):
    """The space that orphans use: the sum of the known sizes, and the number of orphans whose size is not known."""

    n_bytes: Count
    n_unknown: Count


class HeldByUser(msgspec.Struct, frozen=True):
    """The space that one user's orphans use, as in HeldBytes."""

    uid: Count
    n_bytes: Count
    n_unknown: Count


class PassedOver(msgspec.Struct, frozen=True):
    """A name that looks like a user's folder or store but is not used, with advice for people; `where` is printable."""

    where: str
    what: str
    hint: str


class SeenNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that serves a volume shared by several machines, as its heartbeat in the store shows.

    is_here      this is the reporting node
    is_alive     whether its heartbeat changed lately; None: it has not been watched for long enough
    unchanged_s  how long the reporting service has seen the heartbeat unchanged, by the service's own clock
    version, phase, probe_ms  from the node's heartbeat
    """

    host: str
    boot_id: str
    is_here: bool
    is_alive: bool | None
    unchanged_s: float
    version: str
    phase: str
    probe_ms: float | None


class VolumeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one volume.

    path       the directory that holds the store, quoted as in records; for a user's own store served by root: only the
               part that every user can see, and the end of the store's ID
    owner      UID of the owner if it is a user's own store that root's service serves
    why        a sentence that explains the phase, such as what the reaper waits for
    is_known   whether the store has been read since the service started, and is not GONE; otherwise counts are 0
    n_unread   new orphans that have not been read yet, e.g. outside the windows; the other counts don't include them
    n_users    users who have orphans in the store
    n_orphans  all orphans in the store, including those being reaped; n_due of them may be deleted now
    entries_per_s, bytes_per_s  rates over the last seconds
    tempo_entries_per_s         the present limit; None: unlimited
    io, memory, cpu             share of the time in which a task stalled, 0 to 1; None without PSI
    probe_ms, unlink_us         how long a small durable write and an unlink took recently
    eta_s      estimated seconds until all due orphans are deleted
    oldest_overdue_s            how long the oldest orphan has been due
    next_due_ns                 wall time at which the next orphan expires; None: none will
    free_trend_bytes_per_s      recent rate of change of the free space, whatever the cause
    removed_entries, freed_bytes, n_reaped  totals since the service started
    held       space that each user's orphans use; empty in the status file, which every user can read
    faults     the last errors, the newest last
    refused    names in the store that look like users' folders but are not used as such, a few for each owner
    nodes      the nodes that are known to serve the volume, if several machines may have mounted it
    """

    path: str
    owner: int | None = None
    id: str = ""
    filesystem: str = ""
    phase: VolumePhase = VolumePhase.IDLE
    why: str = ""
    is_known: bool = True
    n_unread: int = 0
    n_users: int = 0
    n_orphans: int = 0
    n_due: int = 0
    n_quarantined: int = 0
    entries_per_s: float = 0.0
    bytes_per_s: float = 0.0
    tempo_entries_per_s: int | None = None
    io: float | None = None
    memory: float | None = None
    cpu: float | None = None
    probe_ms: float | None = None
    unlink_us: float | None = None
    eta_s: float | None = None
    oldest_overdue_s: float | None = None
    next_due_ns: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    free_inodes: int | None = None
    total_inodes: int | None = None
    free_trend_bytes_per_s: float | None = None
    removed_entries: int = 0
    freed_bytes: int = 0
    n_reaped: int = 0
    current: tuple[CurrentReap, ...] = ()
    held: tuple[HeldByUser, ...] = ()
    faults: tuple[StatusFault, ...] = ()
    refused: tuple[PassedOver, ...] = ()
    nodes: tuple[SeenNode, ...] = ()

    def root_path(self) -> bytes:
        """Return the directory that holds the store."""
        return unquote_path(self.path)

    def public_path(self) -> bytes:
        """Return the part of the directory's path that all users may see."""
        path = self.root_path()
        return path if self.owner is None else path.partition(b"/" + HIDDEN)[0] or b"/"


IDLE_WRITE_S = 300.0
"""Seconds between two writes of the status file while nothing happens."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the service.

    updated_ns    wall time at which this file was written: rarely by an idle service, every second by a working one;
                  updated_boot_ns is CLOCK_BOOTTIME at the same time
    passed_over   stores that users registered but that are not served, one item for each user
    refreshes_s   if the file is older than this, something is wrong with the service
    config_files  the configuration files that were read
    host          the machine's name
    """

    version: str
    pid: int
    boot_id: str
    host: str = ""
    started_ns: int
    updated_ns: int
    updated_boot_ns: int | None = None
    refreshes_s: int = int(3 * IDLE_WRITE_S)
    config_files: tuple[str, ...] = ()
    volumes: tuple[VolumeStatus, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()


class ObservedStatus(NamedTuple):
    """A status as read by another process.

    is_running  whether the service that wrote it is alive
    age_s       how long ago it was written
    """

    status: Status
    is_running: bool
    age_s: float = 0.0

    def is_stale(self) -> bool:
        """Whether a working service would have written a newer one by now."""
        return self.age_s > self.status.refreshes_s


def age_s(status: Status, boot_id: str, boot_ns: int, wall_ns: int) -> float:
    """Return how long ago a status was written, by CLOCK_BOOTTIME or, if the machine was rebooted, by the wall clock.

    boot_id, boot_ns, wall_ns  the present values; boot_ns is CLOCK_BOOTTIME
    """
    is_of_this_boot = status.boot_id == boot_id and status.updated_boot_ns is not None
    since_ns = boot_ns - (status.updated_boot_ns or 0) if is_of_this_boot else wall_ns - status.updated_ns
    return max(0.0, since_ns / 1e9)


def encode_status(status: Status) -> bytes:
    return msgspec.json.format(msgspec.json.encode(status), indent=1) + b"\n"


def decode_status(text: bytes) -> Status:
    """Decode what `encode_status` wrote. Raises  TrashdError for anything else"""
    try:
        status = msgspec.json.decode(text, type=Status)
        for volume in status.volumes:
            volume.root_path()
        return status
    except (msgspec.MsgspecError, ValueError) as error:
        hint = "if the service is of another version, restart it"
        raise TrashdError(f"the service's status can't be read ({error})", hint) from error
