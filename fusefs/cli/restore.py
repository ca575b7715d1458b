"""trashd restore and undo, and the choice of an orphan by ID or path, which other commands also use."""

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
from fusefs.core.names import join_path
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.record import Method
from fusefs.core.results import NOT_GIVEN
from fusefs.linux.children import user_name
from fusefs.linux.config_files import are_rules_in_force
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import session
from fusefs.store.orphans import (
    ID_LEAST_CHARS,
    ListedContainer,
    OrphanFromPath,
    find_by_origin,
    hint_for_silent,
    list_all_containers,
    match_id,
)
from fusefs.store.restore import Restored, restore_by_id
from fusefs.store.victim import check_operand

_SHOWN_MAX = 20
_PATIENCE_S = 0.5


@click.command("restore", cls=Command, short_help="Restore an orphan, or a part of it, to its original path.")
@click.argument("word", metavar="[ID|PATH]", type=OrphanIdOrPath(), required=False)
@click.argument("inside", type=PathBytes(), required=False, metavar="[PATH-INSIDE]")
@click.option(
    "--last", is_flag=True, help="Restore what your last command in this terminal removed, as trashd undo does."
)
@click.option(
    "--to", type=PathBytes(), metavar="PATH", help="Restore to PATH on the same filesystem; PATH must not exist."
)
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
    """Restore an orphan (a trashed tree) to its original path, or elsewhere with --to.

    Name the orphan by its ID (any unique prefix or suffix) or by its original PATH. A path below the original path, or
    PATH-INSIDE, restores only that file or directory. If several orphans match, or if you name none, restore lets you
    choose from a list; this needs a terminal.

    The restored tree replaces the new, empty directory. Files written there since the swap become an orphan of their
    own, which is kept for a week. If a sweep trashed files whose names are in use again, the trashed files stay in the
    trash and are reported (exit code 13); run the command again once the names are free.

    \b
    Examples:
      trashd restore /scratch/job
      trashd restore /scratch/job/results/final.csv
      trashd restore 2fe7e4cb8ba8 --to /scratch/job.old
      trashd restore 2fe7e4cb8ba8 results/final.csv
    """
    if last and (word is not None or to is not None or uid is not None):
        raise UsageError("--last can't be combined with ID, PATH, --to or --user")
    if word is None and not last and (as_json or not output.can_confirm()):
        raise UsageError("missing ID or PATH", "trashd list shows the IDs and paths of all orphans")
    kernel = tended(volumes)
    if last:
        return restore_last(kernel, volumes, as_json=as_json)
    if word is None:
        choice = _choose_of_all(kernel, volumes, uid)
    else:
        part = None if inside is None else os.path.normpath(inside)
        choice = chosen(kernel, volumes, word, part, uid, as_json=as_json)
    done = restore_by_id(kernel, volumes, choice.entry, choice.inside, to)
    return print_restored(done, as_json=as_json)


def restore_last(kernel: Kernel, volumes: Sequence[bytes], *, as_json: bool) -> int:
    """Restore those orphans of the caller's last command in this session that still exist, newest first.

    An orphan that can't be restored is reported, and the others are restored.
    Raises  NotFound if no such orphan exists
    """
    lost: list[TrashdError] = []
    silent: list[bytes] = []
    entries = _of_last_command(list_all_containers(kernel, volumes, lost, (), silent))
    if not entries:
        if lost:
            raise lost[0]
        hint = hint_for_silent(silent) or "trashd list shows all orphans; trashd restore PATH restores one"
        raise NotFound("orphans of commands that you ran in this terminal", hint)
    if not as_json:
        age = format_duration(entries[0].age_s(time.time_ns()))
        click.echo(f"restoring what you removed {age} ago:", err=True)
        for entry in entries:
            part = "files in " if entry.method is Method.SWEEP else ""
            click.echo(f"  {part}{output.origin(entry.origin)}", err=True)
    codes, paths = [], []
    for entry in entries:
        try:
            done = restore_by_id(kernel, volumes, entry, None, None)
            codes.append(print_restored(done, as_json=as_json))
            paths.append(done.path)
        except TrashdError as error:
            codes.append(output.print_error(error, as_json=as_json))
    return output.exit_code(codes)


def _of_last_command(listed: Sequence[ListedContainer]) -> list[ListedContainer]:
    here, uid = session(), os.geteuid()
    own = [
        entry for entry in listed
        if here and entry.uid == uid and entry.state is State.ORPHANS
        and entry.invocation is not None and entry.invocation.session == here
    ]  # fmt: skip
    own.sort(key=lambda entry: entry.created_ns, reverse=True)
    return [entry for entry in own if entry.invocation == own[0].invocation]


def print_restored(done: Restored, *, as_json: bool) -> int:
    code = Incomplete.exit_code if done.n_left else 0
    if as_json:
        output.as_json(done)
        return code
    except_for = f", except {output.counted(done.n_left, 'entry', 'entries')}" if done.n_left else ""
    print(f"{printable(done.path)}: restored{except_for}")
    for failure in done.left:
        why = NOT_GIVEN if failure.call == NOT_GIVEN else os.strerror(failure.errno)
        print(f"  {printable(failure.name) or '.'}: {why}")
    if done.n_left > len(done.left):
        print(f"  and {done.n_left - len(done.left):,} more")
    if done.n_left:
        print(f"  the rest is still in the orphan {done.id}; restore the orphan again, or elsewhere with --to PATH")
    if done.rescued:
        print(f"  files written there since the swap are kept for a week as orphan {done.rescued}")
    if done.partial:
        print("  incomplete: the reaper had already deleted part of the tree")
    if done.closed_uid is not None:
        change = "belong to root and have mode 0700" if done.closed_uid == 0 else "have mode 0700"
        find = f"find {shell_word(done.path)} -type d -user {done.closed_uid} -perm 0700"
        print(f"  directories that the reaper had entered may now {change}; to list them, run: {find}")
    if are_rules_in_force():
        if done.is_spared:
            print("  rules (trashd plan) count the age of these files from this restore")
        else:
            why = "no permission, no extended attributes, or other users can write in the directory"
            output.warn(f"rules (trashd plan) may remove these files again, as no mark could be set: {why}")
    for warning in done.warnings:
        output.warn(warning)
    return code


@click.command("undo", cls=Command, short_help="Undo your last swap, rm or sweep.")
@volume_option
@json_option
def undo_command(volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Restore everything that your last swap, rm or sweep in this terminal removed.

    undo first prints what it will restore. Run undo again to undo the command before that one, and so on. undo is
    equivalent to trashd restore --last.

    \b
    Examples:
      trashd rm results/ old.log
      trashd undo
    """
    return restore_last(tended(volumes), volumes, as_json=as_json)


def chosen(
    kernel: Kernel, volumes: Sequence[bytes], word: bytes, inside: bytes | None, uid: int | None, *, as_json: bool
) -> OrphanFromPath:
    """Find the orphan, or the part of an orphan, that an ID or a path names.

    inside  a path inside the orphan
    uid     the owner of the orphan; None: any user if an ID is given, the caller if a path is given
    Raises  TrashdError; UsageError if several orphans match and there is no terminal to ask on
    """
    whose = _whose(uid)
    check_operand(word)
    if not word:
        raise UsageError("the ID or PATH is empty")
    lost: list[TrashdError] = []
    silent: list[bytes] = []
    listed = list_all_containers(kernel, volumes, lost, (), silent)
    may_be_id = b"/" not in word and len(word) >= ID_LEAST_CHARS
    by_id = match_id(volumes, os.fsdecode(word), listed) if may_be_id else None
    try:
        matches = find_by_origin(kernel, volumes, word, listed)
    except FileNotFoundError:  # the working directory was removed, so a word without a slash names no path
        if by_id is None:
            raise
        matches = []
    if by_id is not None and uid in (None, by_id.uid):
        if matches:
            raise UsageError(
                f"{printable(word)}: matches both an ID and a path", f"write the path as ./{shell_word(word)}"
            )
        return OrphanFromPath(by_id, inside)
    own = [one for one in matches if one.entry.uid == whose]
    if not own:
        others = sorted({user_name(one.entry.uid) for one in matches})
        if others:  # the owner of a record can write any original path into it
            names = " and ".join(others)
            raise Refused(
                f"{printable(word)}: the orphans from this path belong to {names}", "choose a user with --user NAME"
            )
        if lost:
            raise lost[0]
        raise NotFound(word, hint_for_silent(silent) or "trashd list shows all orphans with their original paths")
    one = own[0] if len(own) == 1 else _choose(kernel, volumes, word, own, as_json=as_json)
    if not as_json and len(own) == 1:
        click.echo(_lines(kernel, volumes, [one])[0], err=True)
    return one if inside is None else OrphanFromPath(one.entry, join_path(one.inside or b"", inside))


def _choose_of_all(kernel: Kernel, volumes: Sequence[bytes], uid: int | None) -> OrphanFromPath:
    """Ask on the terminal for one of a user's orphans. Raises  NotFound if the user has none"""
    whose, silent = _whose(uid), list[bytes]()
    listed = list_all_containers(kernel, volumes, [], (), silent)
    own = [OrphanFromPath(one, None) for one in listed if one.uid == whose and one.state is State.ORPHANS]
    if not own:
        hint = hint_for_silent(silent) or "as root, use --user NAME to restore an orphan of another user"
        raise NotFound(f"orphans of {user_name(whose)}", hint)
    own.sort(key=lambda one: one.entry.created_ns, reverse=True)
    return _choose(kernel, volumes, b"", own, as_json=False)


def _whose(uid: int | None) -> int:
    """Return the user whose orphans are requested. Raises  NotPermitted if a user other than root names another user"""
    if uid not in (None, os.geteuid()) and os.geteuid():
        raise NotPermitted("--user", "only root can restore orphans of other users")
    return os.geteuid() if uid is None else uid


def _choose(
    kernel: Kernel, volumes: Sequence[bytes], word: bytes, matches: Sequence[OrphanFromPath], *, as_json: bool
) -> OrphanFromPath:
    """Ask on the terminal for one of several orphans. Raises  UsageError if there is no terminal"""
    shown = matches[:_SHOWN_MAX]
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        ids = ", ".join(one.entry.id for one in shown)
        more = f", and {len(matches) - len(shown)} older ones" if len(matches) > len(shown) else ""
        raise UsageError(f"{printable(word)}: {len(matches)} orphans match", f"choose one by its ID: {ids}{more}")
    for number, line in enumerate(_lines(kernel, volumes, shown), 1):
        click.echo(f"{number:>3}  {line}", err=True)
    number = click.prompt("Which one", type=click.IntRange(1, len(shown)), default=1, err=True)
    return shown[number - 1]


def _lines(kernel: Kernel, volumes: Sequence[bytes], orphans: Sequence[OrphanFromPath]) -> list[str]:
    """Format a line for each orphan. Unknown sizes are measured for half a second; an incomplete size is a minimum."""
    now_ns, end_s, lines = time.time_ns(), time.monotonic() + _PATIENCE_S, []
    for entry, inside in orphans:
        part = f" (only {printable(inside)})" if inside is not None else ""
        size = size_by(kernel, volumes, entry, end_s)
        age = format_duration(entry.age_s(now_ns))
        lines.append(f"{entry.id}: {output.origin(entry.origin)}{part}, removed {age} ago, {size}")
    return lines
