"""Messages between the service, the forker and the children, each sent as one packet."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from fusefs.core.pacing import Speed
from fusefs.core.record import Failure, Method
from fusefs.linux.children import UserCredentials
from fusefs.store.layout import Volume
from fusefs.store.store_registry import UserLine

MESSAGE_MAX = 128 * 1024
"""Size limit for a packet. The largest message, a page of records, is cut to fit."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
PAGE = 250
"""Maximum number of records in a page."""


class Tend(msgspec.Struct, tag=True):
    """Order to recover the store, adopt dropped directories and refill the reserve; answered with Tended.

    takeover_s  see Store
    """

    takeover_s: int = 0


class ReadRecords(msgspec.Struct, tag=True):
    """Order to read records; answered with a Page.

    base   path of the store to read, as reported by Tended
    after  the last id of the previous page; empty for the first page
    ids    read only the records of these orphans
    and_quarantined  include some orphans in quarantine in the first page
    """

    base: bytes
    after: str = ""
    ids: list[str] | None = None
    and_quarantined: bool = False


class DueContainer(NamedTuple):
    """A container that may be reaped, and the retention in its record, on which this decision is based."""

    id: str
    retention_s: int | None


class Reap(msgspec.Struct, tag=True):
    """Order to reap containers one after another; answered with an OrphanEnded for each, then with OrderDone."""

    base: bytes
    chosen: list[DueContainer]
    by_force: bool = False

    def ids(self) -> list[str]:
        return [chosen.id for chosen in self.chosen]


class Measure(msgspec.Struct, tag=True):
    """Order to measure orphans, with a stat per file; answered with a Measured for each, then with OrderDone.

    when_idle  measure only while no one else uses the disk; there is no answer for an orphan whose measurement was
               stopped, or delayed for too long
    """

    base: bytes
    ids: list[str]
    when_idle: bool = False


class Park(msgspec.Struct, tag=True):
    """Order to leave the current work unfinished; the answer to that work arrives soon, and contains the progress.

    now  stop even while a large file is being truncated step by step; closing its last fd then frees the rest at once
    """

    now: bool = False


class SetTempo(msgspec.Struct, tag=True):
    """Order to use this speed from now on."""

    tempo: Speed


class Heartbeat(msgspec.Struct, tag=True):
    """A sign of life, with the work that the child has done since it started.

    busy_s  total time that the workers were busy
    away    errno of the current failure of the filesystem's server, for which the child waits; 0: none
    """

    n_entries: Count
    n_bytes: Count
    busy_s: float
    away: Count = 0


class Tended(msgspec.Struct, tag=True):
    """The stores in which this user has a folder, starting with the child's own store, and the unresolved problems."""

    bases: list[bytes]
    problems: list[str]


class ContainerEntry(NamedTuple):
    """A container as described by its record.

    is_claimed  it is in reaping/, because a reap has begun
    problem     why the record can't be read; the other fields are then empty
    is_kept     trashd put it in quarantine because some of its entries must be kept; the owner decides, not root
    boot_ns     CLOCK_BOOTTIME of its creation during this boot; None if not recorded
    n_bytes     its size; None if unknown, or only partly known
    """

    id: str
    is_claimed: bool
    created_ns: Count
    retention_s: Count | None
    origin: bytes | None
    method: Method | None
    problem: str = ""
    is_kept: bool = False
    boot_ns: Count | None = None
    n_bytes: Count | None = None


class Page(msgspec.Struct, tag=True):
    """A page with some of a store's containers, ordered by id.

    last           the last id that was read, for use in the next order; empty on the last page
    n_orphans      current number of containers in orphans/ and reaping/
    n_quarantined  current number of containers in quarantine/
    quarantined    some of the containers in quarantine/, if requested
    """

    base: bytes
    entries: list[ContainerEntry]
    last: str
    n_orphans: Count
    n_quarantined: Count
    quarantined: list[ContainerEntry] = []


class OrphanEnded(msgspec.Struct, tag=True):
    """The outcome for one orphan.

    origin   its original path, according to its record
    seconds  time from the claim to the end of the reap, or until the reap was parked
    lost     why the orphan could not be claimed; empty if it was claimed
    n_bytes  bytes freed; None if unknown
    stopped  the reap was parked: the orphan stays in reaping/, and the next reap continues
    failure  the first of the `n_failed` failures because of which the orphan is in quarantine
    is_kept  trashd kept some entries; the orphan's owner, not root, decides what to do
    error    why the container itself is unusable
    """

    id: str
    origin: bytes | None = None
    seconds: float = 0.0
    lost: str = ""
    n_removed: Count = 0
    n_bytes: Count | None = None
    n_failed: Count = 0
    stopped: bool = False
    failure: Failure | None = None
    is_kept: bool = False
    error: str = ""
    errno: Count = 0


class Measured(msgspec.Struct, tag=True):
    """The inodes and bytes that the removal of one orphan would free."""

    id: str
    n_inodes: Count
    n_bytes: Count


class OrderDone(msgspec.Struct, tag=True):
    """The end of an order, which succeeded unless `errno` reports an error of the folder or the volume."""

    error: str = ""
    errno: Count = 0


Order = Tend | ReadRecords | Reap | Measure
ToChild = Order | Park | SetTempo
Answer = Tended | Page | OrphanEnded | Measured | OrderDone
FromChild = Answer | Heartbeat

TO_CHILD: msgspec.json.Decoder[ToChild] = msgspec.json.Decoder(ToChild)
FROM_CHILD: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)
"""A child's user may have tampered with its messages; an invalid one raises MsgspecError."""


def fits(answer: Answer, order: Order) -> bool:
    """Return whether an answer is valid for an order."""
    match answer:
        case Tended():
            return isinstance(order, Tend)
        case Page():
            return isinstance(order, ReadRecords) and order.base == answer.base
        case OrphanEnded():
            return isinstance(order, Reap) and answer.id in order.ids()
        case Measured():
            return isinstance(order, Measure) and answer.id in order.ids
        case OrderDone():
            return True


class ReadRegistries(msgspec.Struct, tag=True):
    """A request for a child that reads all registries, including root's, and sends a UserRegistry for each user.

    uids  additional users, who may be missing from the account database
    """

    uids: list[int]


class UserRegistry(msgspec.Struct):
    """The stores in one user's registry; an O_PATH fd of the registry's directory is sent along, if possible.

    words   the user's own existing stores, newest last, up to the number that is served
    n_more  how many more of the user's stores are in the registry
    """

    uid: int
    words: list[UserLine]
    n_more: int


class Spawn(msgspec.Struct, tag=True):
    """A request for a child; it describes the fds of the folder and its store, which are sent along."""

    person: UserCredentials
    area: bytes
    folder: bytes
    is_proven: bool
    base_path: bytes
    volume: Volume
    owner: int
    name: bytes


class Forked(msgspec.Struct):
    """The forker's answer: a child's pid, sent with its pidfd, or the errno of the failed fork."""

    pid: int = 0
    errno: int = 0
