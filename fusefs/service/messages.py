"""What the service and its children say to each other, one message a packet."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from fusefs.core.pacing import Speed
from fusefs.core.record import Failure, Method
from fusefs.linux.children import UserCredentials
from fusefs.store.layout import Volume
from fusefs.store.store_registry import LineOf

MESSAGE_MAX = 128 * 1024
"""A packet: a page of records, the largest that is sent, is cut to fit."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
PAGE = 250
"""Records in a page, at most."""


class Tend(msgspec.Struct, tag=True):
    """Recover, take in what was dropped, stock the reserve; answered by Tended.

    takeover_s  as Store has it
    """

    takeover_s: int = 0


class ReadRecords(msgspec.Struct, tag=True):
    """Read records; answered by a Page.

    base   of the store to look in, as Tended names it
    after  the last id of the page before; empty for the first
    ids    look at these alone
    and_quarantined  with the first page, some that are in quarantine too
    """

    base: bytes
    after: str = ""
    ids: list[str] | None = None
    and_quarantined: bool = False


class DueContainer(NamedTuple):
    """A container that may be reaped, and the retention in its record that this rests on."""

    id: str
    retention_s: int | None


class Reap(msgspec.Struct, tag=True):
    """Reap these one after the other; answered by an OrphanEnded for each, then an OrderDone."""

    base: bytes
    chosen: list[DueContainer]
    by_force: bool = False

    def ids(self) -> list[str]:
        """Of all of them."""
        return [chosen.id for chosen in self.chosen]


class Measure(msgspec.Struct, tag=True):
    """Count what is in these, by a stat for each file; answered by a Measured for each, then an OrderDone.

    when_idle  only while nobody else uses the disk: one that is stopped, or held up for long, is not answered
    """

    base: bytes
    ids: list[str]
    when_idle: bool = False


class Park(msgspec.Struct, tag=True):
    """Leave what is being done where it is; the answer comes soon, and tells how far it came.

    now  also where a large file is being cut: what is left of it goes at once then, with its last fd
    """

    now: bool = False


class SetTempo(msgspec.Struct, tag=True):
    """How fast from now on."""

    tempo: Speed


class Heartbeat(msgspec.Struct, tag=True):
    """I am alive: what was done since the child began.

    busy_s  the sum of the workers' times
    away    why the filesystem's server can't be asked at the moment, as an errno; it is waited for
    """

    n_entries: Count
    n_bytes: Count
    busy_s: float
    away: Count = 0


class Tended(msgspec.Struct, tag=True):
    """The stores in which this user has a folder, the one where we began first; what could not be settled."""

    bases: list[bytes]
    problems: list[str]


class SeenContainer(NamedTuple):
    """A container as its record describes it.

    is_claimed  in reaping/: a reap has begun
    problem     why the record can't be read; the rest is empty then
    is_kept     of one in quarantine: for a reason of ours, its owner decides, not root
    boot_ns     when it was made by CLOCK_BOOTTIME of this boot; None if that is not told
    n_bytes     what it takes; None where that is not known, or only a part of it
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
    """Some containers of one store, by their ids.

    last           the last id that was looked at, to go on after; empty if there are no more
    n_orphans      all that there are now, in orphans/ and reaping/
    n_quarantined  in quarantine/
    quarantined    some of these, if that was asked for
    """

    base: bytes
    seen: list[SeenContainer]
    last: str
    n_orphans: Count
    n_quarantined: Count
    quarantined: list[SeenContainer] = []


class OrphanEnded(msgspec.Struct, tag=True):
    """What became of one orphan.

    origin   where it came from, by its record
    seconds  from the claim to the end, or until it was parked
    lost     why it could not be had; empty if it could
    n_bytes  freed; None if that was not looked at
    stopped  parked: it stays in reaping/, and the next reap goes on
    failure  the first of `n_failed` things that could not be removed: it is in quarantine
    is_kept  some of them for a reason of ours: its owner decides, not root
    error    the container itself could not be worked on
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
    """What goes with one orphan."""

    id: str
    n_inodes: Count
    n_bytes: Count


class OrderDone(msgspec.Struct, tag=True):
    """The order is carried out; or this went wrong with the folder or the volume, and `errno` says it."""

    error: str = ""
    errno: Count = 0


Order = Tend | ReadRecords | Reap | Measure
ToChild = Order | Park | SetTempo
Answer = Tended | Page | OrphanEnded | Measured | OrderDone
FromChild = Answer | Heartbeat

TO_CHILD: msgspec.json.Decoder[ToChild] = msgspec.json.Decoder(ToChild)
FROM_CHILD: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)
"""The user of a child may have had a hand in what it says: it raises MsgspecError."""


def fits(answer: Answer, order: Order) -> bool:
    """Whether that can be an answer to that order."""
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
    """Asks the forker for a child that reads all users' registries, root's own among them; it tells each UserRegistry.

    uids  of users whom the accounts need not list
    """

    uids: list[int]


class UserRegistry(msgspec.Struct):
    """What one user's registry names; an O_PATH fd of its directory is sent along, if it can be had.

    words   the user's own stores that are there, the newest last, as many as are served
    n_more  how many others there are
    """

    uid: int
    words: list[LineOf]
    n_more: int


class Spawn(msgspec.Struct, tag=True):
    """Asks the forker for a child: what goes with the fds of the folder and its store, which are sent along."""

    person: UserCredentials
    area: bytes
    folder: bytes
    is_proven: bool
    base_path: bytes
    volume: Volume
    owner: int
    name: bytes


class Forked(msgspec.Struct):
    """The forker's answer, with the child's pidfd; or why there is no child."""

    pid: int = 0
    errno: int = 0
