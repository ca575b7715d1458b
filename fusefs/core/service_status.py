"""The service's status: a small file that every user may read, at almost no cost.

Because every user may read it, it contains no names of users' files, and only the end of an orphan's id.
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
"""Replaces, together with the end of the store's id, those names of a path that other users may not see."""


class HookCounts(NamedTuple):
    """Hooks since the service started: all that ran, those that failed or were killed, and those dropped."""

    n_run: int = 0
    n_failed: int = 0
    n_dropped: int = 0


class VolumePhase(Enum):
    """The activity of a volume's reaper.

    LOOKING    recovers, adopts, and checks what is due
    REAPING    at full speed
    YIELDING   paced: other processes use the disk
    HURRYING   space is low
    WINDOW     waits for its working hours
    BROKEN     too many errors, or its store exists and can't be used: waits before it tries again
    ELSEWHERE  another reaper serves the volume
    UNPROVEN   not trusted: a user's store that is not in that user's registry, or a store of root that root did not
               make, or a copy of a mounted volume, or one that had rules elsewhere; nothing is reaped
    GONE       there is no store: not mounted any more, or another filesystem is mounted there
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
    """An orphan that is being reaped: `id_end` is the end of its id, which all commands accept."""

    uid: int
    id_end: str
    n_removed: int


class StatusFault(msgspec.Struct, frozen=True):
    """An error and its wall time; without names of users' files."""

    at_ns: int
    text: str


class HeldBytes(NamedTuple):
    """Space of orphans: the sum of the known sizes, and the number of orphans whose size is not known."""

    n_bytes: Count
    n_unknown: Count


class HeldByUser(msgspec.Struct, frozen=True):
    """Space of one user's orphans, as in HeldBytes."""

    uid: Count
    n_bytes: Count
    n_unknown: Count


class PassedOver(msgspec.Struct, frozen=True):
    """A name that looks like a user's folder and is not one, and what a person can do; `where` is printable."""

    where: str
    what: str
    hint: str


class SeenNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that serves a volume shared by several machines, by its heartbeat in the store.

    is_here      it is the node that reports
    is_alive     whether its heartbeat changed lately; None: not watched for long enough
    unchanged_s  how long the reporting service has seen it unchanged, by its own clock
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

    path       the directory that holds the store, quoted as in records; for a user's own store served by root only the
               part that every user can see, and part of its id
    owner      uid of the user whose own store it is, if root's service serves it
    why        a sentence that explains the phase, such as what it waits for
    is_known   whether the store has been read since the service started; otherwise n_users and n_orphans are 0
    n_unread   new orphans that were not read yet, e.g. outside of its windows; the other counts don't include them
    n_orphans  all orphans in the store, including those being reaped; n_due of them may be deleted now
    entries_per_s, bytes_per_s  over the last seconds
    tempo_entries_per_s         the present limit; None: unlimited
    io, memory, cpu             share of the time in which a task stalled, 0 to 1; None without PSI
    probe_ms, unlink_us         recent times of a small durable write and of an unlink
    eta_s      seconds until everything due is deleted
    oldest_overdue_s            how long the oldest has been due
    next_due_ns                 wall time at which the next one expires; None: none will
    free_trend_bytes_per_s      recent change of the free space, whatever the cause
    removed_entries, freed_bytes, n_reaped  since the service started
    held       space of each user's orphans; empty in the status file, which every user may read
    faults     the last ones, the newest last
    refused    names in the store that look like users' folders and are not used as such, a few for each owner
    nodes      the nodes seen to serve it, if several machines may have mounted it
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
        """The directory that holds the store."""
        return unquote_path(self.path)

    def public_path(self) -> bytes:
        """The part of that path that is shown."""
        path = self.root_path()
        return path if self.owner is None else path.partition(b"/" + HIDDEN)[0] or b"/"


IDLE_WRITE_S = 300.0
"""Seconds between two status files while nothing happens."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the service.

    updated_ns    wall time of this file: an idle service writes it seldom, a working one every second;
                  updated_boot_ns is CLOCK_BOOTTIME at the same time
    passed_over   stores that users registered and that are not served, a line for each user
    refreshes_s   if the file is older than this, something is wrong with the service
    config_files  those that were read
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
    """A status as another process reads it.

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
    """The age of a status, by a clock that can't be set if the machine has not been rebooted since.

    boot_id, boot_ns  at present; boot_ns is CLOCK_BOOTTIME
    """
    is_of_this_boot = status.boot_id == boot_id and status.updated_boot_ns is not None
    since_ns = boot_ns - (status.updated_boot_ns or 0) if is_of_this_boot else wall_ns - status.updated_ns
    return max(0.0, since_ns / 1e9)


def encode_status(status: Status) -> bytes:
    """Encode as indented JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(status), indent=1) + b"\n"


def decode_status(text: bytes) -> Status:
    """Decode what `encode` wrote. Raises  TrashdError for anything else"""
    try:
        status = msgspec.json.decode(text, type=Status)
        for volume in status.volumes:
            volume.root_path()
        return status
    except (msgspec.MsgspecError, ValueError) as error:
        hint = "restart the service if it is of another version"
        raise TrashdError(f"the status of the service can't be read ({error})", hint) from error
