"""Reaping as a person sees it: one orphan after the other, a bar, what became of each, and the sum."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from fusefs.cli import output
from fusefs.cli.progress_bar import ProgressBar
from fusefs.cli.stop_signals import StopSignals
from fusefs.core.durations import format_duration
from fusefs.core.errors import SETTLE, Busy, Incomplete, NotFound, Refused, ServerAway, TrashdError, from_os
from fusefs.core.lifecycle import State
from fusefs.core.orphan_age import Clock
from fusefs.core.printable_names import printable
from fusefs.core.record import NOTE_MAX_CHARS, Record
from fusefs.core.report import Reaped
from fusefs.core.sizes import format_size
from fusefs.core.slice_budget import Speed
from fusefs.linux.act_as_user import user_name
from fusefs.linux.clocks import moment
from fusefs.linux.kernel import Kernel
from fusefs.store.claim import ClaimLost
from fusefs.store.find_orphans import act_on, find_container, opened_folder
from fusefs.store.layout import UserFolder
from fusefs.store.list_orphans import ListedContainer, explain_failure
from fusefs.store.victim_rename import VisibleRename

_TOLD_FAILURES = 10
_WHY_LOST = {
    ClaimLost.BUSY: "somebody else has it",
    ClaimLost.GONE: "it is gone already",
    ClaimLost.CHANGED: "it is kept by now",
}
_LOST: dict[ClaimLost, type[TrashdError]] = {ClaimLost.BUSY: Busy, ClaimLost.GONE: NotFound, ClaimLost.CHANGED: Busy}


def is_due_as_chosen(entry: ListedContainer, record: Record) -> bool:
    """Whether its owner has not prolonged its term since it was chosen, which may be hours ago (I11)."""
    if entry.expires_ns is None:
        return True
    expires_ns = record.expires_ns()
    return expires_ns is not None and expires_ns <= entry.expires_ns - entry.clock_set_ns


def has_expired(_entry: ListedContainer, record: Record, clocks: tuple[Clock, ...] = ()) -> bool:
    """Whether its term has ended (I11). clocks: what is remembered of the wall clock"""
    now = moment(Kernel(), clocks)
    expires_ns = record.expires_ns(now)
    return expires_ns is not None and expires_ns <= now.wall_ns


class ReapOptions(NamedTuple):
    """What a person may say about the way.

    n_workers  None: what is best there
    counts     count first
    waits      print, at the end, how much space came back, and what keeps it
    paced      make way for others; the tempo is the most that it may be
    with_stores  trash stores in it that hold something go too
    is_meant   asked about an orphan's record when it is claimed: its owner may have kept it since it was chosen
    force      what is in quarantine, with the caller's own right
    only_one   the first that no other process has
    job        whose ranks do it (engine.mpi_ranks.MpiJob), or None
    """

    n_workers: int | None = None
    tempo: Speed = Speed()
    counts: bool = False
    waits: bool = False
    paced: bool = False
    with_stores: bool = False
    is_meant: Callable[[ListedContainer, Record], bool] = is_due_as_chosen
    force: bool = False
    only_one: bool = False
    job: Any = None


def reap_one(base: bytes, orphan: str, *, as_json: bool, waits: bool = False) -> int:
    """Reap what was just taken away, at once; the exit code. base: the directory that holds its store"""
    kernel, volumes = Kernel(), (base,)
    how = ReapOptions(waits=waits)
    return reap_all(kernel, volumes, [find_container(kernel, volumes, orphan)], how, as_json=as_json)


def reap_all(
    kernel: Kernel, volumes: Sequence[bytes], due: Sequence[ListedContainer], how: ReapOptions, *, as_json: bool
) -> int:
    """Reap containers one after the other, or one of them; the exit code. Ctrl-C ends it between two slices."""
    began = time.monotonic()
    codes, reaped, is_away = [], [], False
    with StopSignals() as stop, ExitStack() as owned:
        waits = {}
        if how.waits:
            from fusefs.waiting.wait_for_space import VolumeWait

            bases = dict.fromkeys(entry.base_path() for entry in due)
            waits = {base: VolumeWait(kernel, base, owned) for base in bases}
        for entry in due:
            if stop():
                break
            try:
                title = entry.id if entry.origin is None else printable(os.path.basename(entry.origin))
                with ProgressBar(title, shown=not as_json) as shows:
                    if how.force:
                        done = _reap_by_force(kernel, volumes, entry, how, shows, stop, is_away)
                    else:
                        act = partial(_reap, entry, how, shows, stop, is_away)
                        done = act_on(kernel, volumes, entry, act, Reaped, needs_proof=True)
                if how.only_one and done.lost:
                    continue
                reaped.append(done)
                codes.append(_tell(entry, done, force=how.force, as_json=as_json))
                if how.waits:
                    waits[entry.base_path()].add_reaped(done)
                if how.only_one:
                    break
            except (TrashdError, OSError) as error:
                is_away |= isinstance(error, ServerAway)  # it was waited for, once for all
                codes.append(output.failed(from_os(error, entry.id), as_json=as_json))
        if how.only_one:
            if due and not reaped and not as_json:
                print("no orphan is left to reap: others have them", file=sys.stderr)
        elif len(due) > 1 and not as_json:
            print(_sum(reaped, len(due) - len(reaped), time.monotonic() - began))
        if how.waits:
            from fusefs.cli.wait_report import print_waited

            awaited = (volume.conclude(stop) for volume in waits.values() if volume.ids and not stop())
            codes += [print_waited(one, as_json=as_json) for one in awaited]
        if stop():
            return stop.exit_code()
    return output.exit_code(codes)


def _reap(
    entry: ListedContainer,
    how: ReapOptions,
    shows: ProgressBar,
    stop: StopSignals,
    is_away: bool,
    folder: UserFolder,
    _visible: VisibleRename | None,
) -> Reaped:
    from fusefs.engine.pressure_pacer import pacer_in
    from fusefs.reaper.reap import RemovalWishes, reap
    from fusefs.reaper.server_outage import COMMAND_LIMIT_S, OutageWishes

    if entry.state in (State.STAGE, State.RESTORING):
        raise Refused(f"{entry.id} is half done, in {entry.state.value}/", SETTLE)
    # A person who sees a slow reap go by wants to know how long it takes.
    counts = how.counts or (how.tempo.is_limited() and shows.is_seen)
    counted = shows.counted if counts else None
    with pacer_in(folder.store.kernel, folder.fd, how.tempo, output.tell_why if how.paced else None) as pacer:
        wishes = RemovalWishes(how.n_workers, pacer, shows.advance, stop, counted=counted, counting=shows.counting)
        wishes = wishes._replace(with_stores=how.with_stores, job=how.job)
        limit_s = 0.0 if is_away else COMMAND_LIMIT_S
        outage = OutageWishes(limit_s, lambda number: output.tell_outage(number, limit_s))
        by_force, is_own = how.force and folder.uid == 0, folder.uid == entry.uid
        # Of one's own --force is the decision of a person who looked; no service makes it.
        wishes = wishes._replace(outage=outage, by_force=by_force, without_doubt=how.force and is_own)
        return reap(folder, entry.id, wishes, partial(how.is_meant, entry))


def _reap_by_force(
    kernel: Kernel,
    volumes: Sequence[bytes],
    entry: ListedContainer,
    how: ReapOptions,
    shows: ProgressBar,
    stop: StopSignals,
    is_away: bool,
) -> Reaped:
    """Reap it in the caller's own folder, to which root moves it first.

    Raises  Busy, NotFound, or as for `seize` and `_reap`
    """
    from fusefs.store.seize import seize
    from fusefs.store.swap_path import own_folder

    with opened_folder(kernel, volumes, entry) as folder, own_folder(folder.store) as own:
        if folder.uid != own.uid:
            note = f"taken from {user_name(folder.uid)}'s quarantine to be deleted; was {output.origin(entry.origin)}"
            seized = seize(folder, entry.id, own, note[:NOTE_MAX_CHARS])
            if isinstance(seized, ClaimLost):
                raise _LOST[seized](entry.id)
            for warning in seized.warnings:
                output.warn(warning)
            entry = entry._replace(id=seized.id, expires_ns=None)  # its term in root's folder is no owner's choice
        reaped = _reap(entry, how, shows, stop, is_away, own, None)
    if reaped.lost is not None:
        raise _LOST[ClaimLost(reaped.lost)](entry.id)
    return reaped


def _tell(entry: ListedContainer, reaped: Reaped, *, force: bool, as_json: bool) -> int:
    """Say what became of one; its exit code."""
    report = reaped.report
    where = "quarantine" if reaped.id == entry.id else f"root's quarantine as {reaped.id}"
    gone = f"{output.counted(report.removed, 'entry', 'entries')} removed"
    if report.n_bytes is not None:
        gone += f" ({format_size(report.n_bytes)})"
    if as_json and force:
        from fusefs.cli.json_objects import KeptAs

        output.as_json(reaped, KeptAs(entry.id, reaped.id if report.n_failed or report.stopped else None))
    elif as_json:
        output.as_json(reaped)
    elif reaped.lost:
        print(f"{entry.id}: skipped, {_WHY_LOST[ClaimLost(reaped.lost)]}")
    elif report.stopped:
        rest = "" if reaped.id == entry.id else f" with {reaped.id}"
        print(f"{entry.id}: {gone}, then stopped; the next reap goes on{rest}")
    elif report.n_failed:
        print(f"{entry.id}: {gone}, {report.n_failed} could not be; it is in {where}")
        for failure in report.failures[:_TOLD_FAILURES]:
            print(f"  {explain_failure(failure)}")
        if report.n_failed > _TOLD_FAILURES:
            print(f"  and {report.n_failed - _TOLD_FAILURES:,} more (trashd list --state quarantine --json)")
    else:
        print(f"{entry.id}: {gone}")
    return Incomplete.exit_code if report.n_failed else 0


def _sum(reaped: Sequence[Reaped], n_untried: int, elapsed_s: float) -> str:
    """One line for many: removed, failed, skipped."""
    n_entries = sum(one.report.removed for one in reaped)
    n_failed = sum(bool(one.report.n_failed) for one in reaped)
    n_skipped = sum(one.lost is not None or one.report.stopped for one in reaped) + n_untried
    took = f"{format_duration(round(elapsed_s))}, {n_entries / max(elapsed_s, 0.001):,.0f}/s"
    n_removed = len(reaped) + n_untried - n_failed - n_skipped
    what = output.counted(n_entries, "entry", "entries")
    return f"{n_removed} removed, {n_failed} failed (in quarantine), {n_skipped} skipped: {what} in {took}"
