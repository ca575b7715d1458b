"""trashd ls."""

from __future__ import annotations

import stat

import click

from fusefs.cli import output
from fusefs.cli.options import json_option, volume_option, whose_option
from fusefs.cli.restore_choice import inside_argument, look_at_inside
from fusefs.core.errors import UsageError
from fusefs.core.glob import compile_glob
from fusefs.core.printable_names import printable
from fusefs.core.timestamps import in_calendar
from fusefs.linux.act_as_user import user_name
from fusefs.store.look_inside import EntryInside, entries_inside


@click.command("ls", short_help="List what an orphan holds.", no_args_is_help=True)
@inside_argument
@click.option("--iname", "glob", default="*", metavar="GLOB", help="Of such a name, large letters or small.")
@click.option(
    "--first", "most", type=click.IntRange(1), metavar="N", help="The first N names; no others are looked at."
)
@whose_option
@volume_option
@json_option
def command(
    word: bytes, glob: str, most: int | None, uid: int | None, volumes: tuple[bytes, ...], as_json: bool
) -> int:
    """List a directory of an orphan, as ls -l does; nothing is changed.

    The orphan is named by its ID, with a PATH in it after a colon, or by the PATH that it was taken from. What can be
    restored at all is told by trashd list.

    \b
    Examples:
      trashd ls 2fe7e4cb8ba8
      trashd ls 2fe7e4cb8ba8:results
      trashd ls /scratch/job/results
      trashd ls 2fe7e4cb8ba8 --iname '*.csv' --first 100
    """
    try:
        is_meant = compile_glob(glob, ignores_case=True)
    except ValueError as error:
        raise UsageError(f"--iname: {error}") from error
    found = look_at_inside(
        volumes,
        word,
        uid,
        lambda kernel, fd, _folder, _entry, _within: entries_inside(kernel, fd, is_meant, most),
        list[EntryInside],
    )
    if as_json:
        for one in found:
            output.as_json(one)
        return 0
    for line in output.aligned([_row(one, word) for one in found]) if found else ():
        print(line)
    return 0


def _row(one: EntryInside, word: bytes) -> tuple[str, ...]:
    """As ls -l has it."""
    name = printable(one.name or word)
    if one.target is not None:
        name += f" -> {printable(one.target)}"
    day = in_calendar(one.mtime_ns, "%Y-%m-%d %H:%M", "after 9999")
    return (stat.filemode(one.mode), str(one.n_links), user_name(one.uid), f"{one.n_bytes:>12}", day, name)
