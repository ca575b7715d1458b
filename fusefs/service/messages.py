"""Messages between the service, the forker and the children, one per packet."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from fusefs.core.pacing import Speed
from fusefs.core.record import Failure, Method
from fusefs.linux.children import UserCredentials
from fusefs.store.layout import Volume
from fusefs.store.store_registry import UserLine

MESSAGE_MAX = 128 * 1024
"""Largest packet: a page of records, the largest message, is cut to fit."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
PAGE = 250
"""Most records in a page."""


class Tend(msgspec.Struct, tag=True):
    """Recover, adopt dropped directories, refill the reserve; answered by Tended.

    takeover_s  as in Store
    """

    takeover_s: int = 0


class ReadRecords(msgspec.Struct, tag=True):
    """Read records; answered by a Page.

    base   of the store to read, as reported by Tended
    after  the last id of the previous page; empty for the first page
    ids    read only these
    and_quarantined  include some orphans in quarantine in the first page
    """

    base: bytes
    after: str = ""
    ids: list[str] | None = None
    and_quarantined: bool = False


class DueContainer(NamedTuple):
    """A container that may be reaped, and the retention in its record on which that is based."""

    id: str
    retention_s: int | None


class Reap(msgspec.Struct, tag=True):
    """Reap containers one after the other; answered by an OrphanEnded for each, then an OrderDone."""

    base: bytes
    chosen: list[DueContainer]
    by_force: bool = False

    def ids(self) -> list[str]:
        return [chosen.id for chosen in self.chosen]


class Measure(msgspec.Struct, tag=True):
    """Count the content of orphans, with a stat per file; answered by a Measured for each, then an OrderDone.

    when_idle  only while no one else uses the disk: no answer for an orphan whose count was stopped, or delayed for
               long
    """

    base: bytes
    ids: list[str]
    when_idle: bool = False


class Park(msgspec.Struct, tag=True):
    """Leave the current work unfinished; the answer arrives soon and contains the progress.

    now  even while a large file is being cut: the rest of it is then freed at once, with its last fd
    """

    now: bool = False


class SetTempo(msgspec.Struct, tag=True):
    """Set the speed from now on."""

    tempo: Speed


class Heartbeat(msgspec.Struct, tag=True):
    """A sign of life: work since the child began.

    busy_s  the sum of the workers' times
    away    why the filesystem's server does not answer at the moment, as an errno; the child waits for it
    """

    n_entries: Count
    n_bytes: Count
    busy_s: float
    away: Count = 0


class Tended(msgspec.Struct, tag=True):
    """The stores in which this user has a folder, the first one being that of the child; and unsolved problems."""

    bases: list[bytes]
    problems: list[str]


class ContainerEntry(NamedTuple):
    """A container as described by its record.

    is_claimed  in reaping/: a reap has begun
    problem     why the record can't be read; the other fields are then empty
    is_kept     in quarantine for a reason of ours: its owner decides, not root
    boot_ns     CLOCK_BOOTTIME of its creation during this boot; None if not recorded
    n_bytes     its size; None if not known or known in part only
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
    """Some containers of one store, ordered by id.

    last           the last id that was read, for the next order; empty on the last page
    n_orphans      all that there are now, in orphans/ and reaping/
    n_quarantined  in quarantine/
    quarantined    some of these, if requested
    """

    base: bytes
    entries: list[ContainerEntry]
    last: str
    n_orphans: Count
    n_quarantined: Count
    quarantined: list[ContainerEntry] = []


class OrphanEnded(msgspec.Struct, tag=True):
    """The outcome for one orphan.

    origin   its original path, by its record
    seconds  from the claim to the end, or until it was parked
    lost     why it could not be claimed; empty if it was
    n_bytes  freed; None if unknown
    stopped  parked: it stays in reaping/, and the next reap continues
    failure  the first of `n_failed` failures: it is in quarantine
    is_kept  some entries were kept for a reason of ours: its owner decides, not root
    error    the container itself is unusable
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
    """What the removal of one orphan frees."""

    id: str
    n_inodes: Count
    n_bytes: Count


class OrderDone(msgspec.Struct, tag=True):
    """The order is carried out; or `errno` reports an error of the folder or the volume."""

    error: str = ""
    errno: Count = 0


Order = Tend | ReadRecords | Reap | Measure
ToChild = Order | Park | SetTempo
Answer = Tended | Page | OrphanEnded | Measured | OrderDone
FromChild = Answer | Heartbeat

TO_CHILD: msgspec.json.Decoder[ToChild] = msgspec.json.Decoder(ToChild)
FROM_CHILD: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)
"""The user of a child may have tampered with its messages: an invalid one raises MsgspecError."""


def fits(answer: Answer, order: Order) -> bool:
    """Whether an answer is valid for an order."""
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
    """Requests a child from the forker that reads all users' registries, including root's, and sends each UserRegistry.

    uids  of further users, whom the account database need not list
    """

    uids: list[int]


class UserRegistry(msgspec.Struct):
    """The stores in one user's registry; an O_PATH fd of its directory is sent along, if it can be opened.

    words   the user's own stores that exist, the newest last, up to the number that is served
    n_more  how many others there are
    """

    uid: int
    words: list[UserLine]
    n_more: int


class Spawn(msgspec.Struct, tag=True):
    """Requests a child from the forker; describes the fds of the folder and its store, which are sent along."""

    person: UserCredentials
    area: bytes
    folder: bytes
    is_proven: bool
    base_path: bytes
    volume: Volume
    owner: int
    name: bytes


class Forked(msgspec.Struct):
    """The forker's answer, with the child's pidfd; or the errno of the failed fork."""

    pid: int = 0
    errno: int = 0
