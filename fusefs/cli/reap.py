"""trashd reap."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import click

from fusefs.cli import output
from fusefs.cli.early_question import ask_about, can_be_asked, line_of
from fusefs.cli.id_completion import OrphanId
from fusefs.cli.json_objects import RestorableFor
from fusefs.cli.mpi_option import mpi_option
from fusefs.cli.options import ParsedValue, json_option, tempo_options, threads_option, volume_option
from fusefs.cli.reap_foreground import ReapOptions, has_expired, is_named, is_unpinned, reap_all
from fusefs.cli.reap_free import enough_to_free
from fusefs.cli.settle_first import tended
from fusefs.cli.wall_clock import tell_kept_by_clock, watched
from fusefs.core.errors import Incomplete, TrashdError, UsageError
from fusefs.core.lifecycle import State
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.report import Reaped, Report
from fusefs.core.sizes import parse_size
from fusefs.core.slice_budget import Speed
from fusefs.store.find_orphans import all_entries, find_container
from fusefs.store.list_orphans import ListedContainer

_REAPABLE = (State.ORPHANS, State.REAPING)


@click.command("reap", short_help="Delete orphans for good.")
@click.argument("identifiers", nargs=-1, metavar="[ID…]", type=OrphanId())
@click.option("--all", "everything", is_flag=True, help="All of your own orphans but the pinned ones.")
@click.option("--pinned", is_flag=True, help="All of your own that are pinned (trashd keep); only with --now.")
@click.option("--now", is_flag=True, help="Don't wait for their retention to end.")
@click.option(
    "--free",
    "wanted_bytes",
    type=ParsedValue("size", parse_size),
    metavar="SIZE",
    help="As many as take so much: expired ones first, then it asks.",
)
@click.option("--one", is_flag=True, help="The first of them that no other process has, and no more.")
@click.option("-n", "--dry-run", "dry", is_flag=True, help="Only say which would go.")
@click.option("--yes", is_flag=True, help="Don't ask before several go before their time.")
@threads_option
@tempo_options
@click.option("--count", "counts", is_flag=True, help="Count first, so that the progress bar knows the end.")
@click.option("--wait", "waits", is_flag=True, help="Wait until the space has come back, or say what keeps it.")
@click.option("--with-stores", is_flag=True, help="With ID: trash stores in it go too, but for what is pinned there.")
@volume_option
@json_option
@mpi_option
def command(
    identifiers: tuple[str, ...],
    everything: bool,
    pinned: bool,
    now: bool,
    wanted_bytes: int | None,
    one: bool,
    dry: bool,
    yes: bool,
    n_workers: int | None,
    max_rate: int | None,
    max_bytes: int | None,
    paced: bool,
    counts: bool,
    waits: bool,
    with_stores: bool,
    volumes: tuple[bytes, ...],
    as_json: bool,
    job: Any,
) -> int:
    """Delete orphans whose retention has ended, in the foreground; what is reaped can't be restored.

    Without ID: all that have expired (as root: everybody's, each with its owner's authority). An orphan that is
    named, or --all, is reaped before its time only with --now. What is pinned goes only if it is named, or by
    --pinned, which --all doesn't imply. A user's own store that is not in his registry may be a copy: what is in it
    goes only if it is named. What can't be deleted goes to quarantine. After Ctrl-C, or however it ended,
    the next reap goes on where it was.

    Where a trash store in an orphan holds something, the reaper leaves that store and what it holds, and the rest of
    the orphan goes. --with-stores deletes it too; an orphan that is pinned in it stays all the same.

    On a terminal it asks before more than one goes before its time; --yes is the answer. Without a terminal, and with
    --json, it never asks. --dry-run says which would go, and deletes nothing.

    With --one it reaps the first that no other process has, and ends; where there is none it has done what it should.
    So an array of a scheduler's tasks shares a volume.

    With --mpi, started as `mpiexec -n N trashd reap --mpi ID` by the orphan's owner, N ranks on as many machines share
    one tree; each needs the volume at the same path. The first rank alone says something.

    With --free only as many go as take so much, counted first: of those that have expired the oldest; if that is not
    enough, it asks whether others may go that can still be restored, the soonest to expire first.

    With --paced it goes as trashd service run does: others on the disk should not notice. With --max-rate or
    --max-bytes never faster than that. Files are looked at before they go then, and large ones are cut in steps of
    64 MiB.

    \b
    Examples:
      trashd reap
      trashd reap --now 20261121T032253.555Z-job-2fe7e4cb8ba8
      trashd reap --dry-run
      trashd reap --free 200G --volume /scratch
      trashd reap --wait
      sbatch --array=1-64 --wrap 'trashd reap --one --volume /scratch'
      trashd reap --paced
      trashd reap --max-rate 5000/s --max-bytes 200M/s
    """
    _check(identifiers, everything=everything, pinned=pinned, now=now, with_stores=with_stores)
    if one and (identifiers or wanted_bytes is not None):
        raise UsageError(f"--one with {'ID' if identifiers else '--free'}", "it takes whichever is due and free")
    if job is not None and paced:
        raise UsageError(
            "--mpi with --paced", "that listens to one machine's disk; --max-rate is for all ranks together"
        )
    if wanted_bytes is not None and (identifiers or everything or pinned or now):
        raise UsageError("--free with what is to go", "it chooses by itself, and asks")
    kernel, clocks = tended(volumes), watched()
    lost: list[TrashdError] = []
    if identifiers:
        choice = _Choice([find_container(kernel, volumes, one, clocks) for one in identifiers])
    else:
        found = [entry for entry in all_entries(kernel, volumes, lost, clocks) if entry.state in _REAPABLE]
        choice = _choose(found, everything=everything, pinned=pinned, now=now)
    waiting, ended = _by_retention(choice.chosen)
    due, soon = choice.chosen if now else ended, list[ListedContainer]()
    if wanted_bytes is not None:
        due, soon = enough_to_free(kernel, volumes, ended, waiting, wanted_bytes, yes=yes or dry)
        due, waiting = [*due, *soon], []
    early = waiting if identifiers and not now else []
    if not now and not as_json:
        tell_kept_by_clock(waiting, time.time_ns())
    if not due and not early and not as_json:
        click.echo("no orphans to reap" if now else "no orphan has expired", err=True)
    for entry in early:
        output.warn(f"{entry.id} is still kept; --now reaps it all the same")
    if not (dry and as_json):
        _tell_choice(choice, as_json=as_json)
    refused = Incomplete.exit_code if early or lost else 0
    if dry:
        _tell_would_go(due[:1] if one else due, as_json=as_json)
        return refused
    if now and len(waiting) > 1 and not (yes or one or as_json) and can_be_asked():
        ask_about(waiting)
    expired = partial(has_expired, clocks=clocks)
    is_meant = is_named if now and (identifiers or pinned) else is_unpinned if now or soon else expired
    how = ReapOptions(n_workers, Speed(max_rate, max_bytes), counts, waits, paced, with_stores, is_meant, one, job)
    return reap_all(kernel, volumes, due, how, as_json=as_json) or refused


def _check(identifiers: Sequence[str], *, everything: bool, pinned: bool, now: bool, with_stores: bool) -> None:
    """Raises  UsageError for options that don't go together"""
    if identifiers and (everything or pinned):
        raise UsageError(f"ID with {'--all' if everything else '--pinned'}", "name orphans, or take all of them")
    if with_stores and not identifiers:
        raise UsageError("--with-stores without ID", "name the orphan whose stores are to go with it")
    if pinned and not now:
        raise UsageError("--pinned without --now", "what is pinned has no term that could end: say --now, too")
    if now and not (identifiers or everything or pinned):
        raise UsageError("--now alone", "name those that may go before their time (trashd list)")


class _Choice(NamedTuple):
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


def _choose(found: Sequence[ListedContainer], *, everything: bool, pinned: bool, now: bool) -> _Choice:
    """Choose among all that there are, none being named."""
    uid = os.geteuid()
    mine = [entry for entry in found if entry.is_served_by(uid)]
    # Of an unproven folder its user alone says by --all that all in it is meant.
    theirs = [] if everything else [entry for entry in found if not entry.is_served_by(uid)]
    unproven = [entry for entry in theirs if not _waits(entry)]
    unvouched = [entry for entry in mine if not entry.is_vouched and (now or not _waits(entry))]
    chosen = [entry for entry in mine if entry.is_vouched]
    if not (everything or pinned):
        return _Choice(chosen, (), unvouched, unproven)
    own = [entry for entry in chosen if entry.uid == uid]
    left = [] if pinned else [entry for entry in own if _is_pinned(entry)]
    return _Choice([entry for entry in own if (pinned if _is_pinned(entry) else everything)], left, unvouched, unproven)


def _by_retention(chosen: Sequence[ListedContainer]) -> tuple[list[ListedContainer], list[ListedContainer]]:
    """Those whose retention has not ended, and those whose has."""
    waiting: list[ListedContainer] = []
    ended: list[ListedContainer] = []
    for entry in chosen:
        (waiting if _waits(entry) else ended).append(entry)
    return waiting, ended


def _tell_choice(choice: _Choice, *, as_json: bool) -> None:
    """Say what is left, and how it would go."""
    _tell_left(choice.left, as_json=as_json)
    tell_unvouched(choice.unvouched, as_json=as_json)
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


def tell_unvouched(unvouched: Sequence[ListedContainer], *, as_json: bool) -> None:
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
    if entry.state is State.REAPING:
        return False
    return entry.expires_ns is None or entry.expires_ns > time.time_ns()


def _tell_would_go(due: Sequence[ListedContainer], *, as_json: bool) -> None:
    """Print what a reap would take, as `trashd list` has it."""
    now_ns = time.time_ns()
    for entry in due:
        if as_json:
            output.as_json(entry, RestorableFor(entry.left_s(now_ns)))
        else:
            print(f"would be reaped: {line_of(entry, now_ns)}")
