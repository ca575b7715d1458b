"""trashd restore."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import click

from fusefs.cli import output
from fusefs.cli.count_orphan import size_by
from fusefs.cli.options import Command, OrphanIdOrPath, PathBytes, json_option, tended, volume_option, whose_option
from fusefs.core.container_states import State
from fusefs.core.errors import Incomplete, NotFound, NotPermitted, Refused, TrashdError, UsageError
from fusefs.core.human_units import format_duration
from fusefs.core.names import join
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.record import Method
from fusefs.core.results import NOT_GIVEN
from fusefs.linux.children import user_name
from fusefs.linux.config_files import are_rules_in_force
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import session
from fusefs.store.orphans import (
    ID_LEAST_CHARS,
    CameFrom,
    ListedContainer,
    all_entries,
    came_from,
    not_looked_at,
    the_one_called,
)
from fusefs.store.restore import Restored, restore_by_id
from fusefs.store.victim import check_operand

_MOST_TOLD = 20
_PATIENCE_S = 0.5


@click.command("restore", cls=Command, short_help="Take an orphan, or a part of it, back.")
@click.argument("word", metavar="ID|PATH", type=OrphanIdOrPath(), required=False)
@click.argument("inside", type=PathBytes(), required=False, metavar="[PATH-INSIDE]")
@click.option("--last", is_flag=True, help="What your last command in this terminal took away (trashd undo).")
@click.option("--to", type=PathBytes(), metavar="PATH", help="Restore to PATH, which must not exist, instead.")
@whose_option
@volume_option
@json_option
def command(
    word: bytes | None,
    inside: bytes | None,
    last: bool,
    to: bytes | None,
    uid: int | None,
    volumes: tuple[bytes, ...],
    as_json: bool,
) -> int:
    """Put an orphan back where it was, or to another place on the same filesystem.

    It is named by its ID, as long a part of that as is unique, or by the PATH that it was taken from; a path below
    that restores this part alone. Of several that came from there you are asked which, on a terminal. By a path you
    restore your own; root says with --user whose is meant.

    The fresh directory makes way for it; if something was written there meanwhile, that becomes an orphan of its
    own, kept for a week. Files that you restored from the same orphan before go back into the tree as they are now,
    the newer copy; if the tree has the name again, both copies are kept and the command reports it.

    What a sweep took goes back into the directory that it came from; where a name is taken by now it stays an orphan,
    is told (exit code 13), and the same command brings it once the name is free. Root restores a user's orphan as
    that user; with --to as root. Without ID and PATH you choose from a list, on a terminal.

    \b
    Examples:
      trashd restore /scratch/job
      trashd restore /scratch/job/results/final.csv
      trashd restore 2fe7e4cb8ba8 --to /scratch/job.old
      trashd restore 2fe7e4cb8ba8 results/final.csv
    """
    if last and (word is not None or to is not None or uid is not None):
        raise UsageError("--last with what it is, whose, or where to", "it means all that the last command took away")
    if word is None and not last and (as_json or not output.can_be_asked()):
        raise UsageError("what is to come back?", "its ID, or the PATH that it was taken from; --last: see trashd undo")
    kernel = tended(volumes)
    if last:
        return restore_last(kernel, volumes, as_json=as_json)
    if word is None:
        meant = _asked_of_all(kernel, volumes, uid)
    else:
        part = None if inside is None else os.path.normpath(inside)
        meant = chosen(kernel, volumes, word, part, uid, as_json=as_json)
    done = restore_by_id(kernel, volumes, meant.entry, meant.inside, to)
    return tell_restored(done, as_json=as_json)


def restore_last(kernel: Kernel, volumes: Sequence[bytes], *, as_json: bool) -> int:
    """Take back all that the caller's last command in this session took away and is not back yet, the newest first.

    What can't be taken back is told too, and the rest comes all the same.
    Raises  NotFound
    """
    lost: list[TrashdError] = []
    silent: list[bytes] = []
    meant = _of_last(all_entries(kernel, volumes, lost, (), silent))
    if not meant:
        if lost:
            raise lost[0]
        hint = not_looked_at(silent) or "trashd list shows what there is; trashd restore PATH takes it back"
        raise NotFound("nothing that a command of yours took away in this terminal is there", hint)
    if not as_json:
        click.echo(f"taken away {format_duration(meant[0].age_s(time.time_ns()))} ago, comes back:", err=True)
        for entry in meant:
            origin = output.origin(entry.origin)
            click.echo(f"  what was taken out of {origin}" if entry.method is Method.SWEEP else f"  {origin}", err=True)
    codes, paths = [], []
    for entry in meant:
        try:
            done = restore_by_id(kernel, volumes, entry, None, None)
            codes.append(tell_restored(done, as_json=as_json))
            paths.append(done.path)
        except TrashdError as error:
            codes.append(output.failed(error, as_json=as_json))
    return output.exit_code(codes)


def _of_last(listed: Sequence[ListedContainer]) -> list[ListedContainer]:
    here, uid = session(), os.geteuid()
    own = [
        entry for entry in listed
        if here and entry.uid == uid and entry.state is State.ORPHANS
        and entry.invocation is not None and entry.invocation.session == here
    ]  # fmt: skip
    own.sort(key=lambda entry: entry.created_ns, reverse=True)
    return [entry for entry in own if entry.invocation == own[0].invocation]


def tell_restored(done: Restored, *, as_json: bool) -> int:
    """Print the result of a restore; the exit code."""
    code = Incomplete.exit_code if done.n_left else 0
    if as_json:
        output.as_json(done)
        return code
    print(f"{printable(done.path)}: restored" + (f", but {done.n_left:,} could not be" if done.n_left else ""))
    for failure in done.left:
        why = NOT_GIVEN if failure.call == NOT_GIVEN else os.strerror(failure.errno)
        print(f"  {printable(failure.name) or '.'}: {why}")
    if done.n_left > len(done.left):
        print(f"  and {done.n_left - len(done.left):,} more")
    if done.n_left:
        print(f"  what is left stays in {done.id}: restore it again, or --to another place")
    if done.rescued:
        print(f"  what had been written there meanwhile is kept for a week as {done.rescued}")
    if done.partial:
        print("  the reaper had begun on it: what it had removed by then is gone")
    if done.closed_uid is not None:
        now = "root's and closed (0700)" if done.closed_uid == 0 else "closed (0700)"
        find = f"find {shell_word(done.path)} -type d -user {done.closed_uid} -perm 0700"
        print(f"  directories that it had entered may be {now} now: {find}")
    if are_rules_in_force():
        if done.is_spared:
            print("  rules of trashd plan leave it alone for as long as their age, counted from now")
        else:
            why = "it could not be marked as restored, for want of permission or of extended attributes"
            output.warn(f"rules of trashd plan may take it again: {why}")
    for warning in done.warnings:
        output.warn(warning)
    return code


@click.command("undo", cls=Command, short_help="Take back what the last command took away.")
@volume_option
@json_option
def undo_command(volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Take back all that your last swap, rm or sweep in this terminal took away.

    It is said first what that is. What has been taken back already is not meant any more, so that another undo takes
    back what the command before took. The same as `trashd restore --last`.

    \b
    Examples:
      trashd rm results/ old.log
      trashd undo
    """
    return restore_last(tended(volumes), volumes, as_json=as_json)


def chosen(
    kernel: Kernel, volumes: Sequence[bytes], word: bytes, inside: bytes | None, uid: int | None, *, as_json: bool
) -> CameFrom:
    """What a word means, an id or a path; and which part of it is wanted.

    inside  a path in that
    uid     whose orphan; None: by its id anybody's that the caller may see, by a path the caller's own
    Raises  TrashdError; UsageError where it could be several, and nobody can be asked
    """
    whose = _whose(uid)
    check_operand(word)
    if not word:
        raise UsageError("an empty word is neither an id nor a path")
    lost: list[TrashdError] = []
    silent: list[bytes] = []
    listed = all_entries(kernel, volumes, lost, (), silent)
    may_be_id = b"/" not in word and len(word) >= ID_LEAST_CHARS
    by_id = the_one_called(volumes, os.fsdecode(word), listed) if may_be_id else None
    found = came_from(kernel, volumes, word, listed)
    if by_id is not None and uid in (None, by_id.uid):
        if found:
            raise UsageError(f"{printable(word)} is a part of an id, and a name here", "for the name: ./ before it")
        return CameFrom(by_id, inside)
    own = [one for one in found if one.entry.uid == whose]
    if not own:
        others = sorted({user_name(one.entry.uid) for one in found})
        if others:  # the origin in a record is its owner's word
            raise Refused(word, f"{' and '.join(others)} took something away there: --user NAME says whose is meant")
        if lost:
            raise lost[0]
        raise NotFound(word, not_looked_at(silent) or "trashd list shows what there is, and where it came from")
    one = own[0] if len(own) == 1 else _asked(kernel, volumes, word, own, as_json=as_json)
    if not as_json and len(own) == 1:
        click.echo(_lines(kernel, volumes, [one])[0], err=True)
    return one if inside is None else CameFrom(one.entry, join(one.inside or b"", inside))


def _asked_of_all(kernel: Kernel, volumes: Sequence[bytes], uid: int | None) -> CameFrom:
    """Which of a user's orphans, as a person at a terminal says. Raises  NotFound: there is none"""
    whose, silent = _whose(uid), list[bytes]()
    listed = all_entries(kernel, volumes, [], (), silent)
    found = [CameFrom(one, None) for one in listed if one.uid == whose and one.state is State.ORPHANS]
    if not found:
        raise NotFound(
            "there is no orphan to restore", not_looked_at(silent) or "trashd list --help says which are listed"
        )
    found.sort(key=lambda one: one.entry.created_ns, reverse=True)
    return _asked(kernel, volumes, b"", found, as_json=False)


def _whose(uid: int | None) -> int:
    """The user whose orphans are meant: the caller unless named. Raises  NotPermitted: only root may name others"""
    if uid not in (None, os.geteuid()) and os.geteuid():
        raise NotPermitted("--user of somebody else", "root alone restores another user's orphans")
    return os.geteuid() if uid is None else uid


def _asked(
    kernel: Kernel, volumes: Sequence[bytes], word: bytes, found: Sequence[CameFrom], *, as_json: bool
) -> CameFrom:
    """Which of several, as a person at a terminal says. Raises  UsageError: there is none"""
    shown = found[:_MOST_TOLD]
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        ids = ", ".join(one.entry.id for one in shown)
        more = f", and {len(found) - len(shown)} older ones" if len(found) > len(shown) else ""
        raise UsageError(f"{len(found)} orphans came from {printable(word)}", f"name one by its id: {ids}{more}")
    for number, line in enumerate(_lines(kernel, volumes, shown), 1):
        click.echo(f"{number:>3}  {line}", err=True)
    number = click.prompt("Which one", type=click.IntRange(1, len(shown)), default=1, err=True)
    return shown[number - 1]


def _lines(kernel: Kernel, volumes: Sequence[bytes], found: Sequence[CameFrom]) -> list[str]:
    """One for each; what they take is counted for a moment, and told as far as it is known by then."""
    now_ns, end_s, lines = time.time_ns(), time.monotonic() + _PATIENCE_S, []
    for entry, inside in found:
        part = f", {printable(inside)} of it" if inside is not None else ""
        size = size_by(kernel, volumes, entry, end_s)
        age = format_duration(entry.age_s(now_ns))
        lines.append(f"{entry.id}: {output.origin(entry.origin)}{part}, taken {age} ago, {size}")
    return lines
