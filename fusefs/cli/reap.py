"""trashd reap: choose orphans, delete them with a progress bar, and print the result."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Self

import click

from fusefs.cli import output
from fusefs.cli.options import (
    Command,
    OrphanId,
    ParsedValue,
    json_option,
    mpi_option,
    tempo_options,
    tended,
    threads_option,
    volume_option,
    watched,
)
from fusefs.cli.output import can_confirm, is_confirmed
from fusefs.cli.stop_signals import StopSignals
from fusefs.core.container_states import State
from fusefs.core.errors import (
    SETTLE,
    WAY_OUT,
    BadRecord,
    BrokenStore,
    Busy,
    Incomplete,
    NotFound,
    Refused,
    ServerAway,
    TrashdError,
    UsageError,
    from_os,
)
from fusefs.core.human_units import format_duration, format_size, parse_size
from fusefs.core.orphan_age import Clock
from fusefs.core.orphan_sums import Survey
from fusefs.core.pacing import Speed
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.record import NOTE_MAX_CHARS, Record
from fusefs.core.results import Reaped, Report
from fusefs.linux.children import user_name
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import read_now
from fusefs.store.container import ClaimLost
from fusefs.store.layout import UserFolder
from fusefs.store.orphans import (
    ListedContainer,
    call_in_folder,
    explain_failure,
    find_container,
    find_containers,
    list_all_containers,
    opened_folder,
)
from fusefs.store.victim_rename import VisibleRename

_REDRAW_S = 0.1


class ProgressBar:
    """A progress bar on stderr, which is drawn only if stderr is a terminal.

    The thread that removes entries also draws the bar, since a forked child has no other thread.
    """

    def __init__(self, title: str, *, shown: bool) -> None:
        self.is_seen = shown and sys.stderr.isatty()
        self._began = time.monotonic()
        self._drawn = 0.0
        self._n_entries = 0
        self._n_bytes = 0
        self._of: tuple[int, int] | None = None
        if not self.is_seen:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        columns: list[Any] = [
            SpinnerColumn(),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[text]}  {task.description}", markup=False),  # a name may look like markup
        ]
        self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self._task = self._bar.add_task(title, total=None, text="")

    def __enter__(self) -> Self:
        if self.is_seen:
            self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self.is_seen:
            self._bar.stop()

    def counting(self, n_entries: int, _n_bytes: int) -> None:
        """Add entries that were counted."""
        self._n_entries += n_entries
        self._draw(lambda _elapsed_s: f"{self._n_entries:,} counted")

    def counted(self, survey: Survey) -> None:
        """Set the total, after counting."""
        self._n_entries = 0
        self._of = survey.n_entries, survey.n_bytes
        self._began = time.monotonic()
        if self.is_seen:
            self._bar.update(self._task, total=survey.n_entries)

    def advance(self, n_entries: int, n_bytes: int) -> None:
        self._n_entries += n_entries
        self._n_bytes += n_bytes
        self._draw(self._format)

    def _draw(self, format_: Callable[[float], str]) -> None:
        now = time.monotonic()
        if self.is_seen and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            text = format_(max(now - self._began, 0.001))
            self._bar.update(self._task, completed=self._n_entries, text=text)
            self._bar.refresh()

    def _format(self, elapsed_s: float) -> str:
        of = "" if self._of is None else f" of {self._of[0]:,}"
        parts = [f"{self._n_entries:,}{of} entries, {self._n_entries / elapsed_s:,.0f}/s"]
        if self._n_bytes:
            parts.append(f"{format_size(self._n_bytes)}, {format_size(int(self._n_bytes / elapsed_s))}/s")
        if self._of is not None:
            n_entries, n_bytes = self._of
            # At a limited rate, either the bytes or the entries determine the time, whichever are further behind.
            done = min(_part(self._n_entries, n_entries), _part(self._n_bytes, n_bytes) if self._n_bytes else 1.0)
            remaining_s = elapsed_s / done - elapsed_s if done else 0.0
            parts.append(f"{format_duration(round(remaining_s))} remaining")
        return ", ".join(parts)


def _part(n: int, of: int) -> float:
    return min(n / of, 1.0) if of else 1.0


_SHOWN_FAILURES = 10
_WHY_LOST = {
    ClaimLost.BUSY: "in use by another trashd process",
    ClaimLost.GONE: "already deleted or restored",
    ClaimLost.CHANGED: "pinned, or its retention was extended",
}
_LOST: dict[ClaimLost, type[TrashdError]] = {ClaimLost.BUSY: Busy, ClaimLost.GONE: NotFound, ClaimLost.CHANGED: Busy}


def is_due_as_chosen(entry: ListedContainer, record: Record) -> bool:
    """Return False if the owner has extended the retention since the orphan was chosen, perhaps hours ago (I11)."""
    if entry.expires_ns is None:
        return True
    expires_ns = record.expires_ns()
    return expires_ns is not None and expires_ns <= entry.expires_ns - entry.clock_set_ns


def has_expired(_entry: ListedContainer, record: Record, clocks: tuple[Clock, ...] = ()) -> bool:
    """Return whether the retention has ended (I11). clocks: earlier readings of the wall clock"""
    now = read_now(Kernel(), clocks)
    expires_ns = record.expires_ns(now)
    return expires_ns is not None and expires_ns <= now.wall_ns


class ReapOptions(NamedTuple):
    """The options of a command line, with the names of click's parameters.

    wanted_bytes  the size that `--free` requests
    one        reap only the first orphan that no other process has claimed
    n_workers  None: the best number for the filesystem
    max_rate, max_bytes  upper limits, which also apply with `paced`
    paced      yield to other users of the disk
    counts     count the entries before removing them
    waits      wait until the space is free; then print how much became free, and which processes hold the rest
    with_stores  also remove trash stores inside the orphan that are not empty
    force      reap from quarantine, with the caller's own rights
    job        the MPI job that shares the work (engine.mpi_ranks.MpiJob), or None
    is_meant   called with the record after an orphan is claimed; returns whether to reap the orphan, because its owner
               may have pinned it in the meantime
    """

    identifiers: tuple[str, ...] = ()
    everything: bool = False
    pinned: bool = False
    now: bool = False
    wanted_bytes: int | None = None
    one: bool = False
    dry: bool = False
    yes: bool = False
    n_workers: int | None = None
    max_rate: int | None = None
    max_bytes: int | None = None
    paced: bool = False
    counts: bool = False
    waits: bool = False
    with_stores: bool = False
    force: bool = False
    volumes: tuple[bytes, ...] = ()
    as_json: bool = False
    job: Any = None
    is_meant: Callable[[ListedContainer, Record], bool] = is_due_as_chosen

    def check(self) -> None:
        """Raise UsageError if the options can't be combined."""
        if self.identifiers and (self.everything or self.pinned):
            raise UsageError(f"ID can't be combined with {'--all' if self.everything else '--pinned'}")
        if self.with_stores and not self.identifiers:
            raise UsageError("--with-stores needs an ID")
        if self.pinned and not self.now:
            raise UsageError("--pinned needs --now: a pinned orphan never expires")
        if self.now and not (self.identifiers or self.everything or self.pinned):
            raise UsageError("--now needs an ID, --all or --pinned", "trashd list shows the IDs")
        if self.wanted_bytes is not None and (self.identifiers or self.everything or self.pinned or self.now):
            raise UsageError("--free chooses orphans itself, so it can't be combined with ID, --all, --pinned or --now")
        if self.one and (self.identifiers or self.wanted_bytes is not None):
            raise UsageError(f"--one can't be combined with {'ID' if self.identifiers else '--free'}")
        if self.force:
            self._check_force()
        if self.job is not None and self.paced:
            raise UsageError("--mpi can't be combined with --paced", "use --max-rate, the limit for all ranks together")

    def _check_force(self) -> None:
        if not self.identifiers:
            raise UsageError("--force needs the ID of an orphan in quarantine", "trashd list --state quarantine")
        others = {"--wait": self.waits, "--mpi": self.job is not None}
        for other in (option for option, is_given in others.items() if is_given):
            raise UsageError(f"--force can't be combined with {other}")
        if not (self.yes or self.dry or can_confirm()):
            raise UsageError("there is no terminal to ask on; confirm with --yes")


def reap_one(base: bytes, orphan: str, *, as_json: bool, waits: bool = False) -> int:
    """Reap an orphan that was just created; return the exit code. base: the directory that holds its store"""
    kernel, how = Kernel(), ReapOptions(volumes=(base,), as_json=as_json, waits=waits)
    return reap_all(kernel, [find_container(kernel, how.volumes, orphan)], how)


def reap_all(kernel: Kernel, due: Sequence[ListedContainer], how: ReapOptions) -> int:
    """Reap orphans one after the other, or only one of them; return the exit code. Ctrl-C stops between two slices.

    The caller has chosen the orphans and asked the user, so only those options in `how` that concern the removal apply.
    """
    began = time.monotonic()
    codes, reaped, is_away = [], [], False
    with StopSignals() as stop, ExitStack() as owned:
        waits = {}
        if how.waits:
            from fusefs.cli.wait import VolumeWait

            bases = dict.fromkeys(entry.base_path() for entry in due)
            waits = {base: VolumeWait(kernel, base, owned) for base in bases}
        for entry in due:
            if stop():
                break
            try:
                title = entry.id if entry.origin is None else printable(os.path.basename(entry.origin))
                with ProgressBar(title, shown=not how.as_json) as shows:
                    if how.force:
                        done = _reap_by_force(kernel, entry, how, shows, stop, is_away)
                    else:
                        act = partial(_reap, entry, how, shows, stop, is_away)
                        done = call_in_folder(kernel, how.volumes, entry, act, Reaped, needs_proof=True)
                if how.one and done.lost:
                    continue
                reaped.append(done)
                codes.append(_print_result(entry, done, force=how.force, as_json=how.as_json))
                if how.waits:
                    waits[entry.base_path()].add_reaped(done)
                if how.one:
                    break
            except (TrashdError, OSError) as error:
                is_away |= isinstance(error, ServerAway)  # the reap waits for a server only once, not for every orphan
                codes.append(output.print_error(from_os(error, entry.id), as_json=how.as_json))
        if how.one:
            if due and not reaped and not how.as_json:
                print("no orphan reaped: other trashd processes are working on all of them", file=sys.stderr)
        elif len(due) > 1 and not how.as_json:
            print(_sum(reaped, len(due) - len(reaped), time.monotonic() - began))
        if how.waits:
            from fusefs.cli.wait import print_waited

            awaited = (volume.conclude(stop) for volume in waits.values() if volume.ids and not stop())
            codes += [print_waited(one, as_json=how.as_json) for one in awaited]
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
    from fusefs.engine.pace import open_pacer
    from fusefs.reaper.reap import RemovalOptions, reap
    from fusefs.reaper.server_outage import COMMAND_LIMIT_S, OutageOptions

    if entry.state in (State.STAGE, State.RESTORING):
        raise Refused(f"{entry.id}: an operation on this orphan is unfinished (it is in {entry.state.value}/)", SETTLE)
    # A user who watches a slow reap wants to know how long it will take.
    tempo = Speed(how.max_rate, how.max_bytes)
    counts = how.counts or (tempo.is_limited() and shows.is_seen)
    counted = shows.counted if counts else None
    with open_pacer(folder.store.kernel, folder.fd, tempo, output.print_pace if how.paced else None) as pacer:
        wishes = RemovalOptions(how.n_workers, pacer, shows.advance, stop, counted=counted, counting=shows.counting)
        wishes = wishes._replace(with_stores=how.with_stores, job=how.job)
        limit_s = 0.0 if is_away else COMMAND_LIMIT_S
        outage = OutageOptions(limit_s, lambda number: output.print_outage(number, limit_s))
        by_force, is_own = how.force and folder.uid == 0, folder.uid == entry.uid
        # With --force, the owner has inspected the orphan and decided to delete it; the service never uses --force.
        wishes = wishes._replace(outage=outage, by_force=by_force, without_doubt=how.force and is_own)
        return reap(folder, entry.id, wishes, partial(how.is_meant, entry))


def _reap_by_force(
    kernel: Kernel,
    entry: ListedContainer,
    how: ReapOptions,
    shows: ProgressBar,
    stop: StopSignals,
    is_away: bool,
) -> Reaped:
    """Reap an orphan in the caller's own folder; root first moves another user's orphan to root's folder.

    Raises  Busy, NotFound, and the errors of `seize` and `_reap`
    """
    from fusefs.store.as_owner import seize
    from fusefs.store.swap import open_own_folder

    with opened_folder(kernel, how.volumes, entry) as folder, open_own_folder(folder.store) as own:
        if folder.uid != own.uid:
            note = (
                f"moved from {user_name(folder.uid)}'s quarantine to be deleted; origin: {output.origin(entry.origin)}"
            )
            seized = seize(folder, entry.id, own, note[:NOTE_MAX_CHARS])
            if isinstance(seized, ClaimLost):
                raise _LOST[seized](entry.id)
            for warning in seized.warnings:
                output.warn(warning)
            entry = entry._replace(
                id=seized.id, expires_ns=None
            )  # in root's folder, an orphan has no retention that an owner chose
        reaped = _reap(entry, how, shows, stop, is_away, own, None)
    if reaped.lost is not None:
        raise _LOST[ClaimLost(reaped.lost)](entry.id)
    return reaped


def _print_result(entry: ListedContainer, reaped: Reaped, *, force: bool, as_json: bool) -> int:
    report = reaped.report
    where = "quarantine" if reaped.id == entry.id else f"root's quarantine as {reaped.id}"
    removed = f"{output.counted(report.removed, 'entry', 'entries')} removed"
    if report.n_bytes is not None:
        removed += f" ({format_size(report.n_bytes)})"
    if as_json and force:
        from fusefs.cli.json_objects import KeptAs

        output.as_json(reaped, KeptAs(entry.id, reaped.id if report.n_failed or report.stopped else None))
    elif as_json:
        output.as_json(reaped)
    elif reaped.lost:
        print(f"{entry.id}: skipped: {_WHY_LOST[ClaimLost(reaped.lost)]}")
    elif report.stopped:
        rest = "" if reaped.id == entry.id else f" with {reaped.id}"
        print(f"{entry.id}: {removed}, then stopped; the next reap continues{rest}")
    elif report.n_failed:
        print(f"{entry.id}: {removed}, {report.n_failed} could not be removed; the rest is in {where}")
        for failure in report.failures[:_SHOWN_FAILURES]:
            print(f"  {explain_failure(failure)}")
        if report.n_failed > _SHOWN_FAILURES:
            print(f"  and {report.n_failed - _SHOWN_FAILURES:,} more (trashd list --state quarantine --json)")
    else:
        print(f"{entry.id}: {removed}")
    return Incomplete.exit_code if report.n_failed else 0


def _sum(reaped: Sequence[Reaped], n_untried: int, elapsed_s: float) -> str:
    """Format the summary of several orphans: how many were removed, failed or were skipped."""
    n_entries = sum(one.report.removed for one in reaped)
    n_failed = sum(bool(one.report.n_failed) for one in reaped)
    n_skipped = sum(one.lost is not None or one.report.stopped for one in reaped) + n_untried
    took = f"{format_duration(round(elapsed_s))}, {n_entries / max(elapsed_s, 0.001):,.0f}/s"
    n_removed = len(reaped) + n_untried - n_failed - n_skipped
    what = output.counted(n_entries, "entry", "entries")
    return f"{n_removed} removed, {n_failed} failed (in quarantine), {n_skipped} skipped: {what} in {took}"


_REAPABLE = (State.ORPHANS, State.REAPING)
_SHOWN_MAX = 10


def _by_ranks(job: Any) -> Any:
    from fusefs.reaper.remove_by_ranks import RemovalByRanks  # imported late: needed only with --mpi

    return RemovalByRanks(job)


@click.command(
    "reap",
    cls=Command,
    short_help="Delete orphans permanently, to free their space.",
    headings={
        "Select": "--all --pinned --free --one --volume",
        "Act": "--now --with-stores --force --dry-run --yes --wait",
        "Pace": "--threads --max-rate --max-bytes --paced --mpi",
        "Output": "--count --json",
    },
)
@click.argument("identifiers", nargs=-1, metavar="[ID…]", type=OrphanId())
@click.option("--all", "everything", is_flag=True, help="Select all your own orphans except pinned ones.")
@click.option("--pinned", is_flag=True, help="Select all your own pinned orphans (trashd keep); needs --now.")
@click.option("--now", is_flag=True, help="Delete the selected orphans even if they have not expired.")
@click.option(
    "--free",
    "wanted_bytes",
    type=ParsedValue("size", parse_size),
    metavar="SIZE",
    help="Delete just enough orphans to free SIZE: expired ones first, then others after asking.",
)
@click.option("--one", is_flag=True, help="Delete only the first orphan that no other process is working on.")
@click.option("-n", "--dry-run", "dry", is_flag=True, help="Only print which orphans would be deleted.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@threads_option
@tempo_options
@click.option(
    "--count", "counts", is_flag=True, help="Count entries first, so that the progress bar shows the remaining time."
)
@click.option(
    "--wait", "waits", is_flag=True, help="Wait until the space is free; list processes that keep deleted files open."
)
@click.option("--with-stores", is_flag=True, help="With ID, also delete trash stores inside the orphan.")
@click.option(
    "--force",
    is_flag=True,
    help="Ask, then delete the quarantined orphan ID with your own rights, as rm -rf would.",
)
@volume_option
@json_option
@mpi_option(_by_ranks)
def command(**options: Any) -> int:
    """Delete orphans permanently. Without ID, delete those that have expired.

    An orphan is an old tree in the trash store. Root deletes the expired orphans of all users, each with its owner's
    rights. An orphan that has not expired is deleted only with --now or --free. A pinned orphan is deleted only with
    --now and its ID, or with --now --pinned.

    Anything that can't be deleted is moved to quarantine; to try again, name the orphan by its ID. If a reap is
    interrupted, the next one continues it.

    \b
    Examples:
      trashd reap
      trashd reap --now 20261121T032253.555Z-job-2fe7e4cb8ba8
      trashd reap --dry-run
      trashd list --state quarantine --json | jq -r .id | xargs -r trashd reap
      trashd reap --force 2fe7e4cb8ba8
      trashd reap --free 200G --volume /scratch
      trashd reap --wait
      sbatch --array=1-64 --wrap 'trashd reap --one --volume /scratch'
      trashd reap --paced
      trashd reap --max-rate 5000/s --max-bytes 200M/s
    """
    return _reap_selected(ReapOptions(**options))


def _reap_selected(how: ReapOptions) -> int:
    how.check()
    kernel, clocks = tended(how.volumes), watched()
    lost: list[TrashdError] = []
    if how.identifiers:
        named = find_containers(kernel, how.volumes, how.identifiers, clocks)
        choice = Choice(list({entry.path: entry for entry in named}.values()))
        if how.force:
            check_quarantined(choice.chosen)
    else:
        reapable = [
            entry for entry in list_all_containers(kernel, how.volumes, lost, clocks) if entry.state in _REAPABLE
        ]
        choice = choose(reapable, everything=how.everything, pinned=how.pinned, now=how.now)
    waiting, ended = by_retention(choice.chosen)
    due, soon = choice.chosen if how.now else ended, list[ListedContainer]()
    if how.wanted_bytes is not None:
        due, soon = enough_to_free(kernel, how.volumes, ended, waiting, how.wanted_bytes, yes=how.yes or how.dry)
        due, waiting = [*due, *soon], []
    broken = [output.print_error(error, as_json=how.as_json) for error in lost if isinstance(error, BrokenStore)]
    early = waiting if how.identifiers and not how.now else []
    if not how.now and not how.as_json:
        _warn_of_clock(waiting, time.time_ns())
    if not due and broken:
        return output.exit_code(broken)
    if not due and not early and not how.as_json:
        print("no orphans to reap" if how.now else "no orphan has expired", file=sys.stderr)
        if restorable := [one for one in waiting if one.expires_ns is not None and not (how.now or how.one)]:
            _print_restorable(restorable)
    for entry in early:
        output.warn(f"{entry.id}: has not expired; --now deletes it anyway")
    if not (how.dry and how.as_json):
        print_kept(choice, as_json=how.as_json)
    refused = Incomplete.exit_code if early or lost else 0
    if how.dry:
        print_due(due[:1] if how.one else due, as_json=how.as_json)
        return refused
    if how.force and not how.yes:
        ask_about_force(due)
    if how.now and len(waiting) > 1 and not (how.yes or how.one or how.as_json) and can_confirm():
        ask_about(waiting)
    is_meant = is_due_as_chosen if how.now or how.force or soon else partial(has_expired, clocks=clocks)
    return reap_all(kernel, due, how._replace(is_meant=is_meant)) or refused


def _warn_of_clock(entries: Sequence[ListedContainer], now_ns: int) -> None:
    """Warn of orphans that are not reaped, although they have expired according to the wall clock."""
    kept = [one for one in entries if one.expires_ns is not None and one.expires_ns - one.clock_set_ns <= now_ns]
    if kept:
        ahead = format_duration(round(max(one.clock_set_ns for one in kept) / 1e9))
        have = "orphan that has" if len(kept) == 1 else "orphans that have"
        output.warn(f"the wall clock was set forward by {ahead}: keeping {len(kept):,} {have} not really expired")


def _print_restorable(restorable: Sequence[ListedContainer]) -> None:
    """Print how to free space before orphans expire, since a full disk can't wait."""
    n_bytes = sum(one.size.n_bytes for one in restorable if one.size is not None)
    size = f", at least {format_size(n_bytes)}" if n_bytes else ""
    count = output.counted(len(restorable), "orphan")
    print(
        f"  hint: trashd reap --free SIZE also deletes orphans that have not expired ({count}{size})", file=sys.stderr
    )


class Choice(NamedTuple):
    """Orphans that a reap may delete, and those that it keeps.

    chosen     orphans that are deleted if they have expired, or even before that with --now
    pinned     orphans that are kept because they are pinned
    unvouched  orphans that are kept because their store may be a copy
    unproven   orphans that are kept because other users may have put them into the folder
    """

    chosen: list[ListedContainer]
    pinned: Sequence[ListedContainer] = ()
    unvouched: Sequence[ListedContainer] = ()
    unproven: Sequence[ListedContainer] = ()


def choose(reapable: Sequence[ListedContainer], *, everything: bool, pinned: bool, now: bool) -> Choice:
    """Choose the orphans to reap for a command line without IDs."""
    uid = os.geteuid()
    mine = [entry for entry in reapable if entry.may_be_reaped_by(uid)]
    # In an unproven folder, only its user may select everything, with --all.
    theirs = [] if everything else [entry for entry in reapable if not entry.may_be_reaped_by(uid)]
    unproven = [entry for entry in theirs if not _waits(entry)]
    unvouched = [entry for entry in mine if not entry.is_vouched and (now or not _waits(entry))]
    chosen = [entry for entry in mine if entry.is_vouched]
    if not (everything or pinned):
        return Choice(chosen, (), unvouched, unproven)
    own = [entry for entry in chosen if entry.uid == uid]
    kept = [] if pinned else [entry for entry in own if _is_pinned(entry)]
    return Choice([entry for entry in own if (pinned if _is_pinned(entry) else everything)], kept, unvouched, unproven)


def by_retention(chosen: Sequence[ListedContainer]) -> tuple[list[ListedContainer], list[ListedContainer]]:
    """Split the chosen orphans into those that have not expired and those that have."""
    waiting: list[ListedContainer] = []
    ended: list[ListedContainer] = []
    for entry in chosen:
        (waiting if _waits(entry) else ended).append(entry)
    return waiting, ended


def print_kept(choice: Choice, *, as_json: bool) -> None:
    """Print which orphans are kept, and how to delete them."""
    if as_json:
        staying = {"pinned": choice.pinned, "unregistered": choice.unvouched, "unproven": choice.unproven}
        for lost, entries in staying.items():
            for entry in entries:
                output.as_json(Reaped(entry.id, lost, Report(0, (), 0)))
        return
    if choice.pinned:
        count = output.counted(len(choice.pinned), "pinned orphan")
        output.warn(f"{count} not deleted; --now --pinned deletes all of them, and --now ID deletes one")
    copy = "the store is not registered and may be a copy; its owner can register it with trashd init {}"
    _warn_of(choice.unvouched, f"{copy}, or delete an orphan by naming its ID")
    _warn_of(choice.unproven, "other users may have put them there; for details, run: trashd doctor {}")


def _warn_of(kept: Sequence[ListedContainer], why: str) -> None:
    """Warn of orphans that are kept, in one line for each store. why: the reason, with {} for the volume"""
    for store, several in groupby(sorted(kept, key=ListedContainer.store_path), key=ListedContainer.store_path):
        count = output.counted(len(list(several)), "orphan")
        output.warn(f"{printable(store)}: {count} not deleted: {why.format(shell_word(os.path.dirname(store)))}")


def _is_pinned(entry: ListedContainer) -> bool:
    """Return whether an orphan is pinned, and no reaper has begun to delete it."""
    return entry.state is State.ORPHANS and entry.expires_ns is None and not entry.problem


def _waits(entry: ListedContainer) -> bool:
    """Return whether an orphan has not expired; false once a reaper has begun to delete it."""
    if entry.state in (State.REAPING, State.QUARANTINE):
        return False
    return entry.expires_ns is None or entry.expires_ns > time.time_ns()


def print_due(due: Sequence[ListedContainer], *, as_json: bool) -> None:
    """Print what a reap would delete; as JSON, with the keys of `trashd list`."""
    from fusefs.cli.json_objects import RestorableFor

    now_ns = time.time_ns()
    for entry in due:
        if as_json:
            output.as_json(entry, RestorableFor(entry.remaining_s(now_ns)))
        else:
            print(f"would be deleted: {line_of(entry, now_ns)}")


def ask_about(early: Sequence[ListedContainer]) -> None:
    """Ask whether to delete orphans before they expire. Raises  Refused if the answer is no"""
    print_early(early)
    is_one = len(early) == 1
    which = "this orphan before it expires" if is_one else f"these {len(early):,} orphans before they expire"
    if not is_confirmed(f"Permanently delete {which}?"):
        raise Refused("not confirmed, so nothing was deleted")


def check_quarantined(entries: Sequence[ListedContainer]) -> None:
    """Raise Refused if an orphan is not in quarantine, or BadRecord if its record can't be read."""
    for entry in entries:
        if entry.problem:
            raise BadRecord(f"{entry.id}: {entry.problem}")
        if entry.state is not State.QUARANTINE:
            is_reaped = entry.state in (State.ORPHANS, State.REAPING)
            hint = "trashd reap without --force deletes it" if is_reaped else WAY_OUT
            raise Refused(f"{entry.id}: not in quarantine", hint)


def ask_about_force(entries: Sequence[ListedContainer]) -> None:
    """Ask whether to delete orphans with the caller's rights. Raises  Refused if the answer is no"""
    for entry in entries:
        print(f"{entry.id}  {user_name(entry.uid)}  {output.origin(entry.origin)}", file=sys.stderr)
    extent = "files of other users" if os.geteuid() == 0 else "directories that were added or changed after the swap"
    if not is_confirmed(f"Permanently delete this, including {extent}?"):
        raise Refused("not confirmed, so nothing was deleted")


def print_early(early: Sequence[ListedContainer]) -> None:
    """Print on stderr the orphans that the next question is about."""
    now_ns = time.time_ns()
    for entry in early[:_SHOWN_MAX]:
        print(line_of(entry, now_ns), file=sys.stderr)
    if len(early) > _SHOWN_MAX:
        print(f"and {len(early) - _SHOWN_MAX:,} more (--dry-run lists all)", file=sys.stderr)


def line_of(entry: ListedContainer, now_ns: int) -> str:
    """Format an orphan: its ID, owner and origin, and when it expires."""
    seconds = entry.remaining_s(now_ns)
    expiry = "pinned" if seconds is None else f"expires in {format_duration(seconds)}" if seconds > 0 else "expired"
    return f"{entry.id}  {user_name(entry.uid)}  {output.origin(entry.origin)}  ({expiry})"


def enough_to_free(
    kernel: Kernel,
    volumes: Sequence[bytes],
    ended: Sequence[ListedContainer],
    waiting: Sequence[ListedContainer],
    wanted_bytes: int,
    *,
    yes: bool,
) -> tuple[list[ListedContainer], list[ListedContainer]]:
    """Choose orphans whose deletion frees `wanted_bytes`; return the expired ones and the others. Pinned orphans are
    never chosen. Expired orphans come first, the oldest first, then those that expire next.

    Unknown sizes are measured. Space that other hard links keep, or that may be shared, is not included.
    yes     choose unexpired orphans without asking
    Raises  Refused if the answer is no, or there is no terminal; Incomplete if all orphans together would free less
    """
    with StopSignals() as stop:
        chosen, freed_bytes = _until(kernel, volumes, ended, wanted_bytes, stop)
        early: list[ListedContainer] = []
        if freed_bytes < wanted_bytes:
            soonest = sorted(
                (entry for entry in waiting if entry.expires_ns is not None), key=lambda entry: entry.expires_ns or 0
            )
            early, more_bytes = _until(kernel, volumes, soonest, wanted_bytes - freed_bytes, stop)
            freed_bytes += more_bytes
        if stop():
            raise Refused("stopped while counting; nothing was deleted")
    if freed_bytes < wanted_bytes:
        only = f"can free only {format_size(freed_bytes)} of the {format_size(wanted_bytes)} requested"
        raise Incomplete(f"{only}; nothing was deleted", "trashd du shows the size of each orphan")
    if early and not yes:
        if not can_confirm():
            print_early(early)
            count = output.counted(len(early), "orphan")
            needs = f"freeing {format_size(wanted_bytes)} requires deleting {count} that can still be restored"
            raise Refused(needs, "confirm with --yes")
        ask_about(early)
    return chosen, early


def _until(
    kernel: Kernel, volumes: Sequence[bytes], entries: Sequence[ListedContainer], wanted_bytes: int, stop: StopSignals
) -> tuple[list[ListedContainer], int]:
    """Return the first entries that together free `wanted_bytes` (or all entries), and the space that they free."""
    from fusefs.cli.count_orphan import CountOptions, count_orphan  # imported late: only --free counts

    chosen, freed_bytes = [], 0
    for entry in entries:
        if freed_bytes >= wanted_bytes or stop():
            break
        try:
            # The size in another user's record may be wrong.
            how = CountOptions(anew=entry.uid != os.geteuid(), far=True, paced=True)
            size = count_orphan(kernel, volumes, entry, stop, how).size
        except TrashdError as error:
            output.warn(f"{entry.id}: {error.message()}")
            continue
        chosen.append(entry)
        freed_bytes += 0 if size is None else size.surely_freed()
    return chosen, freed_bytes
