"""Keep: pin an orphan, or give it another term, by its record; only its record changes, and only in orphans/."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from fusefs.core.durations import DURATION_MAX_S
from fusefs.core.errors import SETTLE, BadRecord, Busy, NotFound, Refused, TakenOver
from fusefs.core.lifecycle import DEFAULT_RETENTION_S, State
from fusefs.core.names import ContainerId
from fusefs.core.record import Record
from fusefs.linux.clocks import moment
from fusefs.linux.kernel import Kernel
from fusefs.store.claim import ClaimLost, hold_soon
from fusefs.store.container import HeldContainer, move, rewrite, touch
from fusefs.store.find_orphans import act_on
from fusefs.store.layout import TREE, UserFolder
from fusefs.store.list_orphans import ListedContainer
from fusefs.store.reserve import FOR_USER, with_room
from fusefs.store.take_over import take_over
from fusefs.store.victim_rename import take_back

_S = 1_000_000_000
_ELSEWHERE = {
    State.REAPING: ("is being reaped already", "trashd restore takes back what is left of it, on a local filesystem"),
    State.QUARANTINE: ("is in quarantine, where nothing goes by itself", "trashd restore takes it back"),
    State.RESTORING: ("is being restored", SETTLE),
    State.STAGE: ("is not an orphan yet", SETTLE),
}


class PinnedOrphan(NamedTuple):
    """An orphan with its new term.

    retention_s  from its creation, as the record has it; None: pinned
    expires_ns   wall time; None: pinned
    """

    id: ContainerId
    retention_s: int | None
    expires_ns: int | None


class UsualTerm(NamedTuple):
    """The usual term from its creation again, as if no other had been asked for."""


class KeepFor(NamedTuple):
    """So many seconds from now; None: until it is released."""

    seconds: int | None


Term = UsualTerm | KeepFor


def keep_by_id(kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, term: Term) -> PinnedOrphan:
    """Give what a list entry tells of another term, in a process of its owner.

    Raises  TrashdError; its record is as before then
    """
    return act_on(kernel, volumes, entry, lambda folder, _visible: keep(folder, entry.id, term), PinnedOrphan)


def keep(folder: UserFolder, container: ContainerId, term: Term) -> PinnedOrphan:
    """Write another term into an orphan's record; to be run as the folder's owner.

    Raises  Refused for what is no orphan any more; Busy if it is locked; NotFound; BadRecord; OSError
    """
    try:
        held = hold_soon(folder, State.ORPHANS, container)
    except FileNotFoundError as error:
        raise BadRecord(container) from error
    if held is ClaimLost.BUSY:
        raise Busy(container, "a reap or restore of it begins, or somebody holds a lock on its record")
    if isinstance(held, ClaimLost):
        raise _gone(folder, container)
    with held:
        now = moment(folder.store.kernel)
        # Where the wall clock was set some go by it and some know better: by both it is kept so long, or not at all.
        ages = held.record.age_ns(now), now.wall_ns - held.record.created_ns
        retention_s = _retention_s(max(ages) if isinstance(term, KeepFor) and term.seconds else min(ages), term)
        record = held.record._replace(retention_s=retention_s)
        if record != held.record and folder.store.is_shared():
            _keep_anew(held, retention_s)
        elif record != held.record:
            with_room(folder, FOR_USER, partial(rewrite, held, record))
            touch(folder.store.kernel, held.fd)  # the reaper's watch of orphans/ tells it
            folder.store.kernel.fsync(held.fd)  # the name too: the pin has to last through a power failure
        return PinnedOrphan(container, retention_s, record.expires_ns(now))


def _keep_anew(held: HeldContainer, retention_s: int | None) -> None:
    """Give what may be another node's to reap its term in a container of ours, which only then has the orphan's name.

    That node's look at the old one may be stale, and its claim late. Raises  Busy; OSError
    """
    change = partial(Record._replace, retention_s=retention_s)
    kernel = held.folder.store.kernel
    try:
        taken = with_room(held.folder, FOR_USER, partial(take_over, held, State.RESTORING, change))
        if isinstance(taken, ClaimLost):
            raise Busy(held.id)
        with taken:
            if taken.record.lent_mode is not None:
                with kernel.open_beneath(taken.fd, TREE) as tree:
                    take_back(taken, tree, taken.record.lent_mode)
            move(taken, State.ORPHANS)
            kernel.fsync(taken.fd)
    except FileNotFoundError as error:
        raise TakenOver(held.id) from error


def _retention_s(age_ns: int, term: Term) -> int | None:
    """A term as records have it: seconds from the creation."""
    if isinstance(term, UsualTerm):
        return DEFAULT_RETENTION_S
    if term.seconds is None:
        return None
    # Whole seconds: not a moment less than was asked for, and for none at all not a moment more.
    age_s = age_ns // _S + (1 if term.seconds else 0)
    wanted_s = min(max(0, age_s + term.seconds), DURATION_MAX_S)
    # Exactly the usual term would mean that none was asked for.
    return wanted_s + 1 if wanted_s == DEFAULT_RETENTION_S else wanted_s


def _gone(folder: UserFolder, container: ContainerId) -> NotFound | Refused:
    """Why it is no orphan."""
    name = container.encode()
    for state, (what, hint) in _ELSEWHERE.items():
        if name in folder.list(state):
            return Refused(f"{container} {what}", hint)
    return NotFound(container)
