"""trashd quarantine: what could not be reaped, why, and what becomes of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial

import click

from fusefs.cli import output
from fusefs.cli.group import OrderedGroup
from fusefs.cli.id_completion import OrphanId
from fusefs.cli.json_objects import KeptAs
from fusefs.cli.options import PathBytes, json_option, volume_option
from fusefs.cli.progress_bar import ProgressSink, bar
from fusefs.cli.reap_choice import tell_unvouched
from fusefs.cli.reap_foreground import reap_all
from fusefs.cli.restore import tell_restored
from fusefs.cli.settle_first import tended
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.wall_clock import watched
from fusefs.core.durations import format_duration
from fusefs.core.errors import BadRecord, Busy, Incomplete, NotFound, Refused, TrashdError, UsageError, from_os
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId
from fusefs.core.record import MAX_FAILURES, NOTE_MAX_CHARS, Failure
from fusefs.core.report import Reaped, Report
from fusefs.linux.act_as_user import user_name
from fusefs.linux.kernel import Kernel
from fusefs.store.claim import ClaimLost
from fusefs.store.find_orphans import all_entries, find_container, opened_folder
from fusefs.store.list_orphans import ListedContainer, explain_failure
from fusefs.store.restore_by_id import restore_by_id
from fusefs.store.seize import seize
from fusefs.store.swap_path import own_folder

_FIRST = 3
"""Reasons that a list shows of each; --json has all."""
_LOST: dict[str, type[TrashdError]] = {ClaimLost.BUSY.value: Busy, ClaimLost.GONE.value: NotFound}


@click.group("quarantine", cls=OrderedGroup, short_help="See to what could not be deleted.")
def command() -> None:
    """See to what the reaper could not delete: it lies in quarantine, with the reasons, until somebody decides.

    \b
    Examples:
      trashd quarantine list
      trashd quarantine retry 2fe7e4cb8ba8      the cause is gone: reap it again
      trashd quarantine restore 2fe7e4cb8ba8    take back what is left of it
      trashd quarantine delete 2fe7e4cb8ba8     delete it, with what came in after the swap; root: whoever's it is
    """


@command.command("list", short_help="List what is there, and why.")
@volume_option
@json_option
def list_command(volumes: tuple[bytes, ...], as_json: bool) -> int:
    """List what is in quarantine: its age, owner and origin, and the first reasons why it could not be deleted.

    Everybody sees his own, root everybody's. A reason names the call, the path in the container, and what the
    kernel said. --json has all that were recorded, at most 50.

    \b
    Examples:
      trashd quarantine list
      trashd quarantine list --json | jq -r .id | xargs trashd quarantine retry
    """
    kernel = tended(volumes)
    lost: list[TrashdError] = []
    listed = all_entries(kernel, volumes, lost, watched(notes=False))
    found = [entry for entry in listed if entry.state is State.QUARANTINE]
    codes = [output.failed(error, as_json=as_json) for error in lost]
    if as_json:
        for entry in found:
            output.as_json(entry)
    elif found:
        _show(found)
    else:
        click.echo("nothing is in quarantine", err=True)
    return max(codes, default=0)


@command.command("retry", short_help="Reap it again.")
@click.argument("identifiers", nargs=-1, metavar="[ID…]")
@click.option("--all", "everything", is_flag=True, help="All of your own, not only those named.")
@volume_option
@json_option
def retry_command(identifiers: tuple[str, ...], everything: bool, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Reap what is in quarantine again, with its owner's authority as before; the report is that of `trashd reap`.

    What still can't be deleted goes back to quarantine, with the new reasons.

    \b
    Examples:
      trashd quarantine retry 2fe7e4cb8ba8
      trashd quarantine retry --all
    """
    if bool(identifiers) == everything:
        raise UsageError("ID with --all" if everything else "no ID", "name what to try again, or --all of your own")
    kernel = tended(volumes)
    lost: list[TrashdError] = []
    if everything:
        found = all_entries(kernel, volumes, lost)
        own = [entry for entry in found if entry.state is State.QUARANTINE and entry.uid == os.geteuid()]
        chosen = [entry for entry in own if entry.is_vouched and entry.is_served_by(os.geteuid())]
        tell_unvouched([entry for entry in own if not entry.is_vouched], as_json=as_json)
    else:
        chosen = _quarantined(kernel, volumes, identifiers)
    if not chosen and not as_json:
        click.echo("nothing is in quarantine", err=True)
    codes = [output.failed(error, as_json=as_json) for error in lost]
    code = reap_all(kernel, volumes, chosen, as_json=as_json)
    return code or (Incomplete.exit_code if codes else 0)


@command.command("restore", short_help="Take back what is left of it.", no_args_is_help=True)
@click.argument("identifier", metavar="ID", type=OrphanId())
@click.option("--to", type=PathBytes(), metavar="PATH", help="Restore to PATH, which must not exist, instead.")
@volume_option
@json_option
def restore_command(identifier: str, to: bytes | None, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Put what is left of it back where it was, as `trashd restore` does, or to another place.

    What the reaper had removed before it met what it could not is gone.

    \b
    Examples:
      trashd quarantine restore 2fe7e4cb8ba8
      trashd quarantine restore 2fe7e4cb8ba8 --to /scratch/job.left
    """
    kernel = tended(volumes)
    (entry,) = _quarantined(kernel, volumes, (identifier,))
    done = restore_by_id(kernel, volumes, entry, None, to)
    return tell_restored(done, as_json=as_json)


@command.command("delete", short_help="Delete it all the same; as root, whoever's it is.", no_args_is_help=True)
@click.argument("identifiers", nargs=-1, required=True, metavar="ID…", type=OrphanId())
@click.option("--yes", is_flag=True, help="Don't ask; needed where there is no terminal.")
@click.option("--with-stores", is_flag=True, help="Trash stores in it go too, but for what is pinned there.")
@volume_option
@json_option
def delete_command(
    identifiers: tuple[str, ...], yes: bool, with_stores: bool, volumes: tuple[bytes, ...], as_json: bool
) -> int:
    """Delete it all the same: of your own, also the directories that came in, or were changed, after the swap.

    A reap leaves those that somebody else can have moved there: look first whether they are yours to delete. You
    delete no more by this than rm -rf would at this moment.

    Root deletes it whoever's it is: other people's files and directories go too, and what is immutable or
    append-only. What even root can't delete, and what came in after the swap and can have been moved by a third, is
    in root's own quarantine afterwards, under a new id; of that, root deletes everything. If one of the IDs is wrong,
    nothing is deleted.

    \b
    Examples:
      trashd quarantine delete 2fe7e4cb8ba8
      trashd quarantine delete --yes 2fe7e4cb8ba8 3fc2b800eb1e
    """
    if not yes and not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked", "say --yes, or run it on a terminal")
    kernel = tended(volumes)
    chosen = _quarantined(kernel, volumes, identifiers)
    if not yes:
        _ask(chosen)
    with StopSignals() as stop:
        act = partial(_delete, kernel, volumes, stop=stop, with_stores=with_stores, as_json=as_json)
        codes = [act(entry) for entry in chosen if not stop()]
        if stop():
            return stop.exit_code()
    return output.exit_code(codes)


def _quarantined(kernel: Kernel, volumes: Sequence[bytes], identifiers: Sequence[str]) -> list[ListedContainer]:
    """What is named, each once.

    Raises  NotFound, UsageError; Refused if one of them is not in quarantine; BadRecord if it can't be told what it is
    """
    found = {entry.path: entry for entry in (find_container(kernel, volumes, one) for one in identifiers)}
    for entry in found.values():
        if entry.state is not State.QUARANTINE:
            raise Refused(f"{entry.id} is not in quarantine", "trashd list shows what it is; trashd reap deletes it")
        if entry.problem:
            raise BadRecord(f"{entry.id}: {entry.problem}")
    return list(found.values())


def _show(found: list[ListedContainer]) -> None:
    now_ns = time.time_ns()
    rows = [("ID", "AGE", "OWNER", "FAILED", "ORIGIN"), *(_row(entry, now_ns) for entry in found)]
    for line, entry in zip(output.aligned(rows), (None, *found), strict=True):
        print(line)
        if entry is not None and not entry.problem:
            for reason in _reasons(entry.failures):
                print(f"  {reason}")


def _row(entry: ListedContainer, now_ns: int) -> tuple[str, ...]:
    owner = user_name(entry.uid)
    if entry.problem:
        return (entry.id, "?", owner, "?", f"unreadable: {entry.problem}")
    age = format_duration(entry.age_s(now_ns))
    return (entry.id, age, owner, _count(entry.n_failed), output.origin(entry.origin))


def _count(n_failed: int) -> str:
    return f"{n_failed}+" if n_failed >= MAX_FAILURES else str(n_failed)


def _reasons(failures: Sequence[Failure]) -> list[str]:
    lines = [explain_failure(failure) for failure in failures[:_FIRST]]
    if not failures:
        lines = ["no reason was recorded: the volume was full, or somebody put it there"]
    elif len(failures) > _FIRST:
        lines.append(f"… and {_count(len(failures) - _FIRST)} more: --json shows them")
    return lines


def _ask(chosen: Sequence[ListedContainer]) -> None:
    for entry in chosen:
        click.echo(f"{entry.id}  {user_name(entry.uid)}  {output.origin(entry.origin)}", err=True)
    whose = "whoever's files are in it" if os.geteuid() == 0 else "with what came in after the swap"
    if not click.confirm(f"Delete this for good, {whose}?", err=True):
        raise Refused("nothing was deleted")


def _delete(
    kernel: Kernel,
    volumes: Sequence[bytes],
    entry: ListedContainer,
    *,
    stop: StopSignals,
    with_stores: bool,
    as_json: bool,
) -> int:
    try:
        with bar(entry.id, shown=not as_json) as shows:
            reaped = _by_force(kernel, volumes, entry, shows, stop, with_stores=with_stores)
    except (TrashdError, OSError) as error:
        return output.failed(from_os(error, entry.id), as_json=as_json)
    if reaped.lost is not None:
        return output.failed(_LOST[reaped.lost](entry.id), as_json=as_json)
    report = reaped.report
    if as_json:
        kept = reaped.id if report.n_failed or report.stopped else None
        output.as_json(reaped, KeptAs(entry.id, kept))
    elif report.stopped:
        whose = "it" if reaped.id == entry.id else "what is root's now"
        print(f"{entry.id}: {report.removed:,} removed, then stopped; trashd reap goes on with {whose}:")
        print(f"  {reaped.id}")
    elif report.n_failed:
        where = "quarantine" if reaped.id == entry.id else "root's quarantine"
        print(f"{entry.id}: {report.removed:,} removed, {report.n_failed:,} could not be; in {where} it is")
        print(f"  {reaped.id}")
        for line in _reasons(report.failures):
            print(f"  {line}")
    else:
        print(f"{entry.id}: {report.removed:,} removed")
    return Incomplete.exit_code if report.n_failed else 0


def _by_force(
    kernel: Kernel,
    volumes: Sequence[bytes],
    entry: ListedContainer,
    shows: ProgressSink,
    stop: StopSignals,
    *,
    with_stores: bool,
) -> Reaped:
    """Reap it as the caller's own; root makes it that first."""
    from fusefs.reaper.reap import reap
    from fusefs.reaper.remove_tree import RemovalWishes
    from fusefs.reaper.server_outage import COMMAND_LIMIT_S, OutageWishes

    with opened_folder(kernel, volumes, entry) as folder, own_folder(folder.store) as own:
        container: ContainerId = entry.id
        if folder.uid != own.uid:
            note = f"taken from {user_name(folder.uid)}'s quarantine to be deleted; was {output.origin(entry.origin)}"
            seized = seize(folder, entry.id, own, note[:NOTE_MAX_CHARS])
            if isinstance(seized, ClaimLost):
                return Reaped(entry.id, seized.value, Report(0, (), 0))
            for warning in seized.warnings:
                output.warn(warning)
            container = seized.id
        # Of one's own this is the word of a person, who looked: no command and no service says it for them.
        is_own = container == entry.id
        outage = OutageWishes(tells=lambda number: output.tell_outage(number, COMMAND_LIMIT_S))
        wishes = RemovalWishes(
            outage=outage,
            progress=shows.advance,
            stops=stop,
            by_force=own.uid == 0,
            with_stores=with_stores,
            without_doubt=is_own,
        )
        return reap(own, container, wishes)
