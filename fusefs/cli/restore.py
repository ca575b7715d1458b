"""trashd restore."""

from __future__ import annotations

import os
from functools import partial

import click

from fusefs.cli import output
from fusefs.cli.id_completion import OrphanIdOrPath
from fusefs.cli.options import PathBytes, json_option, volume_option, whose_option
from fusefs.cli.restore_choice import chosen
from fusefs.cli.restore_last import restore_last
from fusefs.cli.settle_first import tended
from fusefs.core.errors import Incomplete, UsageError
from fusefs.core.printable_names import printable, shell_word
from fusefs.store.restore import Restored
from fusefs.store.restore_by_id import restore_by_id


@click.command("restore", short_help="Take an orphan, or a part of it, back.", no_args_is_help=True)
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
    own, kept for a week. What a sweep took goes back into the directory that it came from; where a name is taken
    by now it stays an orphan, is told (exit code 13), and the same command brings it once the name is free. Root
    restores a user's orphan as that user; with --to as root.

    \b
    Examples:
      trashd restore /scratch/job
      trashd restore /scratch/job/results/final.csv
      trashd restore 2fe7e4cb8ba8 --to /scratch/job.old
      trashd restore 2fe7e4cb8ba8 results/final.csv
    """
    if last and (word is not None or to is not None or uid is not None):
        raise UsageError("--last with what it is, whose, or where to", "it means all that the last command took away")
    if word is None and not last:
        raise UsageError("what is to come back?", "its ID, or the PATH that it was taken from; --last: see trashd undo")
    kernel = tended(volumes)
    if word is None:
        return restore_last(kernel, volumes, partial(tell_restored, as_json=as_json), as_json=as_json)
    part = None if inside is None else os.path.normpath(inside)
    meant = chosen(kernel, volumes, word, part, uid, as_json=as_json)
    done = restore_by_id(kernel, volumes, meant.entry, meant.inside, to)
    return tell_restored(done, as_json=as_json)


def tell_restored(done: Restored, *, as_json: bool) -> int:
    """Print the result of a restore; the exit code."""
    code = Incomplete.exit_code if done.n_left else 0
    if as_json:
        output.as_json(done)
        return code
    print(f"{printable(done.path)}: restored" + (f", but {done.n_left:,} could not be" if done.n_left else ""))
    for failure in done.left:
        print(f"  {printable(failure.name)}: {os.strerror(failure.errno)}")
    if done.n_left > len(done.left):
        print(f"  and {done.n_left - len(done.left):,} more")
    if done.n_left:
        print(f"  what is left stays in {done.id}: restore it again, or --to another place")
    if done.rescued:
        print(f"  what had been written there meanwhile is kept for a week as {done.rescued}")
    if done.partial:
        print("  the reaper had begun on it: what it had removed by then is gone")
    if done.closed_uid is not None:
        print(f"  {_closed(done.path, done.closed_uid)}")
    for warning in done.warnings:
        output.warn(warning)
    return code


def _closed(path: bytes, uid: int) -> str:
    """What became of directories that the reaper had entered, and how to find them."""
    now = "root's and closed (0700)" if uid == 0 else "closed (0700)"
    return f"directories that it had entered may be {now} now: find {shell_word(path)} -type d -user {uid} -perm 0700"
