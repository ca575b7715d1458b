"""trashd reap."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any, NamedTuple

import click

from fusefs.cli import output
from fusefs.cli.confirm import can_be_asked
from fusefs.cli.id_completion import OrphanId
from fusefs.cli.mpi_option import mpi_option
from fusefs.cli.options import ParsedValue, json_option, tempo_options, threads_option, volume_option
from fusefs.cli.reap_choice import (
    Choice,
    ask_about,
    ask_about_force,
    by_retention,
    check_quarantined,
    choose,
    enough_to_free,
    tell_choice,
    tell_would_go,
)
from fusefs.cli.reap_foreground import ReapOptions, has_expired, is_named, is_unpinned, reap_all
from fusefs.cli.settle_first import tended
from fusefs.cli.wall_clock import tell_kept_by_clock, watched
from fusefs.core.errors import BrokenStore, Incomplete, TrashdError, UsageError
from fusefs.core.lifecycle import State
from fusefs.core.sizes import parse_size
from fusefs.core.slice_budget import Speed
from fusefs.store.find_orphans import all_entries, find_container
from fusefs.store.list_orphans import ListedContainer

_REAPABLE = (State.ORPHANS, State.REAPING)


class _ReapLine(NamedTuple):
    """The values of a command line, named as click's parameters."""

    identifiers: tuple[str, ...]
    everything: bool
    pinned: bool
    now: bool
    wanted_bytes: int | None
    one: bool
    dry: bool
    yes: bool
    n_workers: int | None
    max_rate: int | None
    max_bytes: int | None
    paced: bool
    counts: bool
    waits: bool
    with_stores: bool
    force: bool
    volumes: tuple[bytes, ...]
    as_json: bool
    job: Any

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


def _by_ranks(job: Any) -> Any:
    from fusefs.reaper.remove_by_ranks import RemovalByRanks  # with one machine nobody needs it

    return RemovalByRanks(job)


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
    return _run(_ReapLine(**options))


def _run(told: _ReapLine) -> int:
    """Carry a command line out; the exit code."""
    told.check()
    kernel, clocks = tended(told.volumes), watched()
    lost: list[TrashdError] = []
    if told.identifiers:
        named = [find_container(kernel, told.volumes, one, clocks) for one in told.identifiers]
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
        tell_kept_by_clock(waiting, time.time_ns())
    if not due and broken:
        return output.exit_code(broken)
    if not due and not early and not told.as_json:
        print("no orphans to reap" if told.now else "no orphan has expired", file=sys.stderr)
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
    expired, is_told = partial(has_expired, clocks=clocks), told.now and (told.identifiers or told.pinned)
    is_meant = is_named if is_told or told.force else is_unpinned if told.now or soon else expired
    tempo = Speed(told.max_rate, told.max_bytes)
    how = ReapOptions(told.n_workers, tempo, told.counts, told.waits, told.paced, told.with_stores, is_meant)
    how = how._replace(only_one=told.one, job=told.job, force=told.force)
    return reap_all(kernel, told.volumes, due, how, as_json=told.as_json) or refused
