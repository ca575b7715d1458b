"""Which orphans a reap takes, which it leaves, and how that is told."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from fusefs.cli import output
from fusefs.cli.confirm import can_be_asked, is_confirmed
from fusefs.cli.stop_signals import StopSignals
from fusefs.core.durations import format_duration
from fusefs.core.errors import BadRecord, Incomplete, Refused, TrashdError
from fusefs.core.lifecycle import State
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.report import Reaped, Report
from fusefs.core.sizes import format_size
from fusefs.linux.act_as_user import user_name
from fusefs.linux.kernel import Kernel
from fusefs.store.list_orphans import ListedContainer

_SHOWN_MAX = 10


class Choice(NamedTuple):
    """Orphans that a reap may take, and those that it leaves.

    chosen     of those, the ones whose retention has ended go; with --now all
    left       pinned
    unvouched  in stores that may be copies
    unproven   in folders that others may have filled
    """

    chosen: list[ListedContainer]
    left: Sequence[ListedContainer] = ()
    unvouched: Sequence[ListedContainer] = ()
    unproven: Sequence[ListedContainer] = ()


def choose(found: Sequence[ListedContainer], *, everything: bool, pinned: bool, now: bool) -> Choice:
    """Choose among all that there are, none being named."""
    uid = os.geteuid()
    mine = [entry for entry in found if entry.is_served_by(uid)]
    # Of an unproven folder its user alone says by --all that all in it is meant.
    theirs = [] if everything else [entry for entry in found if not entry.is_served_by(uid)]
    unproven = [entry for entry in theirs if not _waits(entry)]
    unvouched = [entry for entry in mine if not entry.is_vouched and (now or not _waits(entry))]
    chosen = [entry for entry in mine if entry.is_vouched]
    if not (everything or pinned):
        return Choice(chosen, (), unvouched, unproven)
    own = [entry for entry in chosen if entry.uid == uid]
    left = [] if pinned else [entry for entry in own if _is_pinned(entry)]
    return Choice([entry for entry in own if (pinned if _is_pinned(entry) else everything)], left, unvouched, unproven)


def by_retention(chosen: Sequence[ListedContainer]) -> tuple[list[ListedContainer], list[ListedContainer]]:
    """Those whose retention has not ended, and those whose has."""
    waiting: list[ListedContainer] = []
    ended: list[ListedContainer] = []
    for entry in chosen:
        (waiting if _waits(entry) else ended).append(entry)
    return waiting, ended


def tell_choice(choice: Choice, *, as_json: bool) -> None:
    """Say what is left, and how it would go."""
    _tell_left(choice.left, as_json=as_json)
    _tell_unvouched(choice.unvouched, as_json=as_json)
    _tell_unproven(choice.unproven, as_json=as_json)


def _is_pinned(entry: ListedContainer) -> bool:
    """Whether it has no term; one that a reaper has begun was named when it began."""
    return entry.state is State.ORPHANS and entry.expires_ns is None and not entry.problem


def _tell_left(left: Sequence[ListedContainer], *, as_json: bool) -> None:
    """Say what --all leaves, and how it would go."""
    if as_json:
        for entry in left:
            output.as_json(Reaped(entry.id, "pinned", Report(0, (), 0)))
    elif left:
        stay = "1 pinned orphan stays" if len(left) == 1 else f"{len(left)} pinned orphans stay"
        output.warn(f"{stay} (trashd keep): --now with the ID reaps one, with --pinned all of them")


def _tell_unvouched(unvouched: Sequence[ListedContainer], *, as_json: bool) -> None:
    """Say what is left in stores that may be copies, and how it would go."""
    why = (
        "which may be a copy: nobody has registered that store. "
        "Its owner does by: trashd init {}; an ID reaps one of them"
    )
    _tell_staying(unvouched, "unregistered", why, as_json=as_json)


def _tell_unproven(unproven: Sequence[ListedContainer], *, as_json: bool) -> None:
    """Say what is left in folders that others may have filled."""
    why = "of which nobody can tell who put them there; trashd doctor {} says what helps"
    _tell_staying(unproven, "unproven", why, as_json=as_json)


def _tell_staying(staying: Sequence[ListedContainer], lost: str, why: str, *, as_json: bool) -> None:
    """Say what stays, store by store. lost: to programs; why: to people, with a place for the volume"""
    if as_json:
        for entry in staying:
            output.as_json(Reaped(entry.id, lost, Report(0, (), 0)))
        return
    for base, several in groupby(sorted(staying, key=ListedContainer.base_path), key=ListedContainer.base_path):
        n_left = len(list(several))
        stay = "1 orphan stays" if n_left == 1 else f"{n_left} orphans stay"
        output.warn(f"{stay} in {printable(base)}/.trashd, {why.format(shell_word(base))}")


def _waits(entry: ListedContainer) -> bool:
    """Whether its retention forbids to reap it; one that a reaper has begun is past that."""
    if entry.state in (State.REAPING, State.QUARANTINE):
        return False
    return entry.expires_ns is None or entry.expires_ns > time.time_ns()


def tell_would_go(due: Sequence[ListedContainer], *, as_json: bool) -> None:
    """Print what a reap would take, as `trashd list` has it."""
    from fusefs.cli.json_objects import RestorableFor

    now_ns = time.time_ns()
    for entry in due:
        if as_json:
            output.as_json(entry, RestorableFor(entry.left_s(now_ns)))
        else:
            print(f"would be reaped: {line_of(entry, now_ns)}")


def ask_about(early: Sequence[ListedContainer]) -> None:
    """Ask that person. Raises  Refused if the answer is no"""
    tell_early(early)
    which = "this" if len(early) == 1 else f"these {len(early):,}"
    if not is_confirmed(f"Delete {which} for good, before {'its' if len(early) == 1 else 'their'} time?"):
        raise Refused("nothing was deleted")


def check_quarantined(entries: Sequence[ListedContainer]) -> None:
    """Raises  Refused if one of them is not in quarantine; BadRecord if its record can't be read"""
    for entry in entries:
        if entry.state is not State.QUARANTINE:
            raise Refused(f"{entry.id} is not in quarantine", "trashd reap without --force deletes it")
        if entry.problem:
            raise BadRecord(f"{entry.id}: {entry.problem}")


def ask_about_force(entries: Sequence[ListedContainer]) -> None:
    """Ask whether they may be deleted with the caller's right. Raises  Refused if the answer is no"""
    for entry in entries:
        print(f"{entry.id}  {user_name(entry.uid)}  {output.origin(entry.origin)}", file=sys.stderr)
    extent = "whoever owns the files in it" if os.geteuid() == 0 else "with what came in after the swap"
    if not is_confirmed(f"Delete this for good, {extent}?"):
        raise Refused("nothing was deleted")


def tell_early(early: Sequence[ListedContainer]) -> None:
    """Tell on stderr which it is about."""
    now_ns = time.time_ns()
    for entry in early[:_SHOWN_MAX]:
        print(line_of(entry, now_ns), file=sys.stderr)
    if len(early) > _SHOWN_MAX:
        print(f"and {len(early) - _SHOWN_MAX:,} more (--dry-run shows all)", file=sys.stderr)


def line_of(entry: ListedContainer, now_ns: int) -> str:
    """An orphan, whose it is, where it came from, and how long it can be restored."""
    left = entry.left_s(now_ns)
    term = "kept" if left is None else f"{format_duration(left)} left" if left > 0 else "expired"
    return f"{entry.id}  {user_name(entry.uid)}  {output.origin(entry.origin)}  ({term})"


def enough_to_free(
    kernel: Kernel,
    volumes: Sequence[bytes],
    ended: Sequence[ListedContainer],
    waiting: Sequence[ListedContainer],
    wanted_bytes: int,
    *,
    yes: bool,
) -> tuple[list[ListedContainer], list[ListedContainer]]:
    """As many orphans as take so much: of those that have expired, the oldest first, and then of those that can still
    be restored, those that would go first; the two told apart. What is pinned is left.

    What they take is counted where it isn't known. What other names keep, or may be shared, does not count.
    yes     the answer to the question whether the latter may go
    Raises  Refused: they may not, or nobody can be asked; Incomplete: all together it is not as much
    """
    with StopSignals() as stop:
        chosen, came_bytes = _until(kernel, volumes, ended, wanted_bytes, stop)
        early: list[ListedContainer] = []
        if came_bytes < wanted_bytes:
            soonest = sorted(
                (entry for entry in waiting if entry.expires_ns is not None), key=lambda entry: entry.expires_ns or 0
            )
            early, more_bytes = _until(kernel, volumes, soonest, wanted_bytes - came_bytes, stop)
            came_bytes += more_bytes
        if stop():
            raise Refused("stopped while it was counted: nothing was deleted")
    if came_bytes < wanted_bytes:
        have = f"all that may go takes {format_size(came_bytes)}"
        raise Incomplete(
            f"{have}, not {format_size(wanted_bytes)}: nothing was deleted", "trashd du shows what there is"
        )
    if early and not yes:
        if not can_be_asked():
            tell_early(early)
            count = output.counted(len(early), "orphan")
            told = f"for {format_size(wanted_bytes)} also {count} would go that can still be restored"
            raise Refused(told, "--yes says that they may")
        ask_about(early)
    return chosen, early


def _until(
    kernel: Kernel, volumes: Sequence[bytes], entries: Sequence[ListedContainer], wanted_bytes: int, stop: StopSignals
) -> tuple[list[ListedContainer], int]:
    """The first of some that take so much together, or all of them; what they take."""
    from fusefs.cli.count_orphan import CountOptions, count_orphan  # only --free counts

    chosen, came_bytes = [], 0
    for entry in entries:
        if came_bytes >= wanted_bytes or stop():
            break
        try:
            # What another user's record says is that user's word.
            how = CountOptions(anew=entry.uid != os.geteuid(), far=True, paced=True)
            size = count_orphan(kernel, volumes, entry, stop, how).size
        except TrashdError as error:
            output.warn(f"{entry.id}: {error.message()}")
            continue
        chosen.append(entry)
        came_bytes += 0 if size is None else size.surely_freed()
    return chosen, came_bytes
