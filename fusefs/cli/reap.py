"""trashd reap: which orphans it takes, which it leaves, a progress bar, and the result."""

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
from fusefs.cli.output import can_be_asked, is_confirmed
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
from fusefs.linux.machine_identity import moment
from fusefs.store.container import ClaimLost
from fusefs.store.layout import UserFolder
from fusefs.store.orphans import (
    ListedContainer,
    act_on,
    all_entries,
    explain_failure,
    find_container,
    find_containers,
    opened_folder,
)
from fusefs.store.victim_rename import VisibleRename

_REDRAW_S = 0.1


class ProgressBar:
    """Drawn by the thread that removes: a forked child has no other. It draws nothing if stderr is no terminal.

    is_seen  whether it is drawn
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
            TextColumn("{task.fields[told]}  {task.description}", markup=False),  # a name may look like one
        ]
        self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self._task = self._bar.add_task(title, total=None, told="")

    def __enter__(self) -> Self:
        if self.is_seen:
            self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self.is_seen:
            self._bar.stop()

    def counting(self, n_entries: int, _n_bytes: int) -> None:
        """So much more is counted."""
        self._n_entries += n_entries
        self._draw(lambda _elapsed_s: f"{self._n_entries:,} counted")

    def counted(self, survey: Survey) -> None:
        """So much there is to do."""
        self._n_entries = 0
        self._of = survey.n_entries, survey.n_bytes
        self._began = time.monotonic()
        if self.is_seen:
            self._bar.update(self._task, total=survey.n_entries)

    def advance(self, n_entries: int, n_bytes: int) -> None:
        """So much more is gone."""
        self._n_entries += n_entries
        self._n_bytes += n_bytes
        self._draw(self._told)

    def _draw(self, tell: Callable[[float], str]) -> None:
        now = time.monotonic()
        if self.is_seen and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            told = tell(max(now - self._began, 0.001))
            self._bar.update(self._task, completed=self._n_entries, told=told)
            self._bar.refresh()

    def _told(self, elapsed_s: float) -> str:
        of = "" if self._of is None else f" of {self._of[0]:,}"
        parts = [f"{self._n_entries:,}{of} entries, {self._n_entries / elapsed_s:,.0f}/s"]
        if self._n_bytes:
            parts.append(f"{format_size(self._n_bytes)}, {format_size(int(self._n_bytes / elapsed_s))}/s")
        if self._of is not None:
            n_entries, n_bytes = self._of
            # Paced, the time goes by bytes or by entries, whichever of the two is further behind.
            done = min(_part(self._n_entries, n_entries), _part(self._n_bytes, n_bytes) if self._n_bytes else 1.0)
            left_s = elapsed_s / done - elapsed_s if done else 0.0
            parts.append(f"{format_duration(round(left_s))} left")
        return ", ".join(parts)


def _part(n: int, of: int) -> float:
    return min(n / of, 1.0) if of else 1.0


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
    """What a command line asks for, named as click's parameters.

    n_workers  None: what is best there
    max_rate, max_bytes  the most that it may be, with `paced` too
    paced      make way for others
    counts     count first
    waits      print, at the end, how much space came back, and what keeps it
    with_stores  trash stores in it that hold something go too
    force      what is in quarantine, with the caller's own right
    one        the first that no other process has
    job        whose ranks do it (engine.mpi_ranks.MpiJob), or None
    is_meant   asked about an orphan's record when it is claimed: its owner may have kept it since it was chosen
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
        """Raises  UsageError for options that don't go together"""
        if self.identifiers and (self.everything or self.pinned):
            raise UsageError(
                f"ID with {'--all' if self.everything else '--pinned'}", "name orphans, or take all of them"
            )
        if self.with_stores and not self.identifiers:
            raise UsageError("--with-stores without ID", "name the orphan whose stores are to go with it")
        if self.pinned and not self.now:
            raise UsageError("--pinned without --now", "what is pinned has no term that could end: say --now, too")
        if self.now and not (self.identifiers or self.everything or self.pinned):
            raise UsageError("--now alone", "name those that may go before their time (trashd list)")
        if self.wanted_bytes is not None and (self.identifiers or self.everything or self.pinned or self.now):
            raise UsageError("--free with what is to go", "it chooses by itself, and asks")
        if self.one and (self.identifiers or self.wanted_bytes is not None):
            raise UsageError(
                f"--one with {'ID' if self.identifiers else '--free'}", "it takes whichever is due and free"
            )
        if self.force:
            self._check_force()
        if self.job is not None and self.paced:
            raise UsageError(
                "--mpi with --paced", "that listens to one machine's disk; --max-rate is for all ranks together"
            )

    def _check_force(self) -> None:
        if not self.identifiers:
            raise UsageError("--force without ID", "name what is in quarantine: trashd list --state quarantine")
        others = {"--wait": self.waits, "--mpi": self.job is not None}
        for other in (option for option, is_given in others.items() if is_given):
            raise UsageError(f"--force with {other}", "leave one of them out")
        if not (self.yes or self.dry or can_be_asked()):
            raise UsageError("nobody is there to be asked", "say --yes, or run it on a terminal")


def reap_one(base: bytes, orphan: str, *, as_json: bool, waits: bool = False) -> int:
    """Reap what was just taken away, at once; the exit code. base: the directory that holds its store"""
    kernel, how = Kernel(), ReapOptions(volumes=(base,), as_json=as_json, waits=waits)
    return reap_all(kernel, [find_container(kernel, how.volumes, orphan)], how)


def reap_all(kernel: Kernel, due: Sequence[ListedContainer], how: ReapOptions) -> int:
    """Reap containers one after the other, or one of them; the exit code. Ctrl-C ends it between two slices.

    The caller has chosen them, and asked whoever is to be asked: `how` says only how they are reaped.
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
                        done = act_on(kernel, how.volumes, entry, act, Reaped, needs_proof=True)
                if how.one and done.lost:
                    continue
                reaped.append(done)
                codes.append(_tell(entry, done, force=how.force, as_json=how.as_json))
                if how.waits:
                    waits[entry.base_path()].add_reaped(done)
                if how.one:
                    break
            except (TrashdError, OSError) as error:
                is_away |= isinstance(error, ServerAway)  # it was waited for, once for all
                codes.append(output.failed(from_os(error, entry.id), as_json=how.as_json))
        if how.one:
            if due and not reaped and not how.as_json:
                print("no orphan is left to reap: others have them", file=sys.stderr)
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
    from fusefs.engine.pace import pacer_in
    from fusefs.reaper.not_removed import COMMAND_LIMIT_S, OutageWishes
    from fusefs.reaper.reap import RemovalWishes, reap

    if entry.state in (State.STAGE, State.RESTORING):
        raise Refused(f"{entry.id} is half done, in {entry.state.value}/", SETTLE)
    # A person who sees a slow reap go by wants to know how long it takes.
    tempo = Speed(how.max_rate, how.max_bytes)
    counts = how.counts or (tempo.is_limited() and shows.is_seen)
    counted = shows.counted if counts else None
    with pacer_in(folder.store.kernel, folder.fd, tempo, output.tell_why if how.paced else None) as pacer:
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
    entry: ListedContainer,
    how: ReapOptions,
    shows: ProgressBar,
    stop: StopSignals,
    is_away: bool,
) -> Reaped:
    """Reap it in the caller's own folder, to which root moves it first.

    Raises  Busy, NotFound, or as for `seize` and `_reap`
    """
    from fusefs.store.as_owner import seize
    from fusefs.store.swap import own_folder

    with opened_folder(kernel, how.volumes, entry) as folder, own_folder(folder.store) as own:
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


_REAPABLE = (State.ORPHANS, State.REAPING)
_SHOWN_MAX = 10


def _by_ranks(job: Any) -> Any:
    from fusefs.reaper.remove_by_ranks import RemovalByRanks  # with one machine nobody needs it

    return RemovalByRanks(job)


@click.command("reap", cls=Command, short_help="Delete orphans for good.")
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
@click.option(
    "--wait", "waits", is_flag=True, help="Wait for the space, and name each process that keeps deleted files open."
)
@click.option("--with-stores", is_flag=True, help="With ID: trash stores in it go too, but for what is pinned there.")
@click.option("--force", is_flag=True, help="With ID in quarantine: delete also what its owner may not. It asks.")
@volume_option
@json_option
@mpi_option(_by_ranks)
def command(**options: Any) -> int:
    """Delete orphans whose retention has ended, in the foreground; what is reaped can't be restored.

    Without ID: all that have expired (as root: everybody's, each with its owner's authority). An orphan that is
    named, or --all, is reaped before its time only with --now. What is pinned goes only if it is named, or by
    --pinned, which --all doesn't imply. A user's own store that is not in his registry may be a copy: what is in it
    goes only if it is named. After Ctrl-C, or however it ended, the next reap goes on where it was.

    What can't be deleted goes to quarantine; trashd list shows the reasons. There it stays until its ID is named: a
    reap tries it again, trashd restore takes back what remains. --force deletes it with the right of the caller: of
    your own also directories that came in, or were changed, after the swap; as root everything, whoever owns it.

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
      trashd list --state quarantine --json | jq -r .id | xargs trashd reap
      trashd reap --force 2fe7e4cb8ba8
      trashd reap --free 200G --volume /scratch
      trashd reap --wait
      sbatch --array=1-64 --wrap 'trashd reap --one --volume /scratch'
      trashd reap --paced
      trashd reap --max-rate 5000/s --max-bytes 200M/s
    """
    return _run(ReapOptions(**options))


def _run(told: ReapOptions) -> int:
    """Carry a command line out; the exit code."""
    told.check()
    kernel, clocks = tended(told.volumes), watched()
    lost: list[TrashdError] = []
    if told.identifiers:
        named = find_containers(kernel, told.volumes, told.identifiers, clocks)
        choice = Choice(list({entry.path: entry for entry in named}.values()))
        if told.force:
            check_quarantined(choice.chosen)
    else:
        found = [entry for entry in all_entries(kernel, told.volumes, lost, clocks) if entry.state in _REAPABLE]
        choice = choose(found, everything=told.everything, pinned=told.pinned, now=told.now)
    waiting, ended = by_retention(choice.chosen)
    due, soon = choice.chosen if told.now else ended, list[ListedContainer]()
    if told.wanted_bytes is not None:
        due, soon = enough_to_free(kernel, told.volumes, ended, waiting, told.wanted_bytes, yes=told.yes or told.dry)
        due, waiting = [*due, *soon], []
    broken = [output.failed(error, as_json=told.as_json) for error in lost if isinstance(error, BrokenStore)]
    early = waiting if told.identifiers and not told.now else []
    if not told.now and not told.as_json:
        _tell_kept_by_clock(waiting, time.time_ns())
    if not due and broken:
        return output.exit_code(broken)
    if not due and not early and not told.as_json:
        print("no orphans to reap" if told.now else "no orphan has expired", file=sys.stderr)
        if restorable := [one for one in waiting if one.expires_ns is not None and not (told.now or told.one)]:
            _tell_what_could_go(restorable)
    for entry in early:
        output.warn(f"{entry.id} is still kept; --now reaps it all the same")
    if not (told.dry and told.as_json):
        tell_choice(choice, as_json=told.as_json)
    refused = Incomplete.exit_code if early or lost else 0
    if told.dry:
        tell_would_go(due[:1] if told.one else due, as_json=told.as_json)
        return refused
    if told.force and not told.yes:
        ask_about_force(due)
    if told.now and len(waiting) > 1 and not (told.yes or told.one or told.as_json) and can_be_asked():
        ask_about(waiting)
    is_meant = is_due_as_chosen if told.now or told.force or soon else partial(has_expired, clocks=clocks)
    return reap_all(kernel, due, told._replace(is_meant=is_meant)) or refused


def _tell_kept_by_clock(entries: Sequence[ListedContainer], now_ns: int) -> None:
    """Say which are not reaped though the wall clock calls them expired."""
    kept = [one for one in entries if one.expires_ns is not None and one.expires_ns - one.clock_set_ns <= now_ns]
    if kept:
        ahead = format_duration(round(max(one.clock_set_ns for one in kept) / 1e9))
        what = output.counted(len(kept), "orphan")
        output.warn(f"the wall clock was set forward by {ahead}; for {what} that it calls expired it is too early")


def _tell_what_could_go(restorable: Sequence[ListedContainer]) -> None:
    """Print how space can be had of orphans whose retention has not ended: a full disk may not wait for that."""
    n_bytes = sum(one.size.n_bytes for one in restorable if one.size is not None)
    size = f"{format_size(n_bytes)} or more, " if n_bytes else ""
    count = output.counted(len(restorable), "orphan")
    print(
        f"  hint: {count}, {size}can still be restored; trashd reap --free SIZE deletes the first to expire",
        file=sys.stderr,
    )


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
    if as_json:
        staying = {"pinned": choice.left, "unregistered": choice.unvouched, "unproven": choice.unproven}
        for lost, entries in staying.items():
            for entry in entries:
                output.as_json(Reaped(entry.id, lost, Report(0, (), 0)))
        return
    if choice.left:
        stay = "1 pinned orphan stays" if len(choice.left) == 1 else f"{len(choice.left)} pinned orphans stay"
        output.warn(f"{stay} (trashd keep): --now with the ID reaps one, with --pinned all of them")
    copy = "which may be a copy: nobody has registered that store. Its owner does by: trashd init {}"
    _warn_of(choice.unvouched, f"{copy}; an ID reaps one of them")
    _warn_of(choice.unproven, "of which nobody can tell who put them there; trashd doctor {} says what helps")


def _warn_of(staying: Sequence[ListedContainer], why: str) -> None:
    """Say what stays, store by store. why: with a place for the volume"""
    for store, several in groupby(sorted(staying, key=ListedContainer.store_path), key=ListedContainer.store_path):
        n_left = len(list(several))
        stay = "1 orphan stays" if n_left == 1 else f"{n_left} orphans stay"
        output.warn(f"{stay} in {printable(store)}, {why.format(shell_word(os.path.dirname(store)))}")


def _is_pinned(entry: ListedContainer) -> bool:
    """Whether it has no term; one that a reaper has begun was named when it began."""
    return entry.state is State.ORPHANS and entry.expires_ns is None and not entry.problem


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
        if entry.problem:
            raise BadRecord(f"{entry.id}: {entry.problem}")
        if entry.state is not State.QUARANTINE:
            is_reaped = entry.state in (State.ORPHANS, State.REAPING)
            hint = "trashd reap without --force deletes it" if is_reaped else WAY_OUT
            raise Refused(f"{entry.id} is not in quarantine", hint)


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
