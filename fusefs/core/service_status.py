"""The service's status: a small file that every user may read, and that costs nothing to read.

Every user may read it, so there is no name of any user's file in it, and of an orphan's id only its end.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, NamedTuple

import msgspec

from fusefs.core.errors import TrashdError
from fusefs.core.record import unquote

Count = Annotated[int, msgspec.Meta(ge=0)]
MOST_FAULTS = 10
UNSEEN = "….".encode()
"""Stands, with some of the store's id, for the names in a path that other users may not see."""


class HookCounts(NamedTuple):
    """Hooks since the service started: all that ran, of these those that failed or were killed, and those dropped."""

    n_run: int = 0
    n_failed: int = 0
    n_dropped: int = 0


class VolumePhase(Enum):
    """What a volume's reaper does.

    LOOKING    recovers, adopts, and finds out what is due
    REAPING    at full speed
    YIELDING   paced: others work on the disk
    HURRYING   space is low
    WINDOW     waits for the hours in which it may
    BROKEN     too many errors, or its store is there and can't be used: rests before it tries again
    ELSEWHERE  another reaper has the volume
    UNPROVEN   a user's own store not in that user's registry, or of root's that root did not make, or a copy of a
               mounted volume, or one that had rules elsewhere: nothing is reaped
    GONE       no store there: not mounted any more, or another filesystem at its place
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
    """An orphan that is being reaped: `id_end` is enough of its id for all commands."""

    uid: int
    id_end: str
    n_removed: int


class StatusFault(msgspec.Struct, frozen=True):
    """An error, at a wall time; without a name of anybody's file."""

    at_ns: int
    text: str


class HeldBytes(NamedTuple):
    """What orphans take: of those whose size is known, and how many others there are."""

    n_bytes: Count
    n_unknown: Count


class HeldByUser(msgspec.Struct, frozen=True):
    """What one user's orphans take, as HeldBytes has it."""

    uid: Count
    n_bytes: Count
    n_unknown: Count


class PassedOver(msgspec.Struct, frozen=True):
    """What is called like a user's folder and is not one, and what a person can do; `where` is printable."""

    where: str
    what: str
    hint: str


class SeenNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that serves a volume of several machines, by its beat in the store.

    is_here      it is the one that tells
    is_alive     whether its beat was seen to change lately; None: it is not watched for long enough
    unchanged_s  how long the service that tells has seen it unchanged, by its own clock
    version, phase, probe_ms  what the node says of itself
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
    """One volume.

    path       the directory that holds the store, quoted as records have it; of a user's own store that root's service
               serves only so much as every user can see, and some of its id
    owner      uid of the user whose own store it is, if root's service serves it
    why        a sentence that says more than the phase: what it waits for
    is_known   whether what is in the store was looked at since the service started; else n_users and n_orphans are 0
    n_unread   orphans that came and were not looked at yet, outside its window say: they are not in the next ones
    n_orphans  all that are in the store, those being reaped among them; n_due of them may go now
    entries_per_s, bytes_per_s  of the last seconds
    tempo_entries_per_s         what it may; None: as fast as the kernel
    io, memory, cpu             share of the time in which a task waited, 0 to 1; None without PSI
    probe_ms, unlink_us         how long a small durable write and an unlink took lately
    eta_s      until all that is due is gone
    oldest_overdue_s            how long the oldest could have been gone
    next_due_ns                 wall time when the next one may go; None: none will
    free_trend_bytes_per_s      how free space went lately, whatever the cause
    removed_entries, freed_bytes, n_reaped  since the service started
    held       what each user's orphans take: nobody's in the status file, which everybody may read
    faults     the last ones, the newest last
    refused    names in the store that are like users' folders and are not used as such, a few of each owner
    nodes      all that were seen to serve it, of a volume that several machines may have mounted
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

    def root(self) -> bytes:
        """The directory that holds the store."""
        return unquote(self.path)

    def shown(self) -> bytes:
        """So much of that as is told."""
        path = self.root()
        return path if self.owner is None else path.partition(b"/" + UNSEEN)[0] or b"/"


IDLE_TELL_S = 300.0
"""Between two status files when nothing happens."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The service.

    updated_ns    wall time of this file: an idle service writes it seldom, a working one every second;
                  updated_boot_ns is CLOCK_BOOTTIME then
    passed_over   stores that users registered and that are not served, a line for each user
    refreshes_s   after so many seconds without a newer file something is wrong with the service
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
    refreshes_s: int = int(3 * IDLE_TELL_S)
    config_files: tuple[str, ...] = ()
    volumes: tuple[VolumeStatus, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()


class SeenStatus(NamedTuple):
    """A status as another process reads it.

    is_running  the service that wrote it lives
    age_s       how long ago it was written
    """

    status: Status
    is_running: bool
    age_s: float = 0.0

    def is_stale(self) -> bool:
        """Whether a service that works would have written it anew by now."""
        return self.age_s > self.status.refreshes_s


def age_s(status: Status, boot_id: str, boot_ns: int, wall_ns: int) -> float:
    """How old a status is: by a clock that can't be set, as long as the machine has not been booted anew.

    boot_id, boot_ns  of now; boot_ns is CLOCK_BOOTTIME
    """
    is_of_this_boot = status.boot_id == boot_id and status.updated_boot_ns is not None
    since_ns = boot_ns - (status.updated_boot_ns or 0) if is_of_this_boot else wall_ns - status.updated_ns
    return max(0.0, since_ns / 1e9)


def encode(status: Status) -> bytes:
    """The file's bytes: JSON, indented for eyes at three in the morning."""
    return msgspec.json.format(msgspec.json.encode(status), indent=1) + b"\n"


def decode(text: bytes) -> Status:
    """What `encode` wrote. Raises  TrashdError for anything else"""
    try:
        status = msgspec.json.decode(text, type=Status)
        for volume in status.volumes:
            volume.root()
        return status
    except (msgspec.MsgspecError, ValueError) as error:
        hint = "restart the service if it is of another version"
        raise TrashdError(f"the status of the service can't be read ({error})", hint) from error
