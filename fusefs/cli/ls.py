"""trashd ls, cat and diff: a place in an orphan, told as `ID[:PATH]` or by the path that it came from."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence

import click

from fusefs.cli import output
from fusefs.cli.options import Command, OrphanIdOrPath, json_option, tended, volume_option, whose_option
from fusefs.cli.restore import chosen
from fusefs.core.errors import Refused, UsageError
from fusefs.core.glob import compile_glob
from fusefs.core.human_units import in_calendar
from fusefs.core.names import RelPath
from fusefs.core.printable_names import printable
from fusefs.core.record import Method
from fusefs.linux.children import user_name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import UserFolder
from fusefs.store.look_inside import EntryInside, content_of, differences, entries_inside, inside, there_now
from fusefs.store.orphans import CameFrom

_DIFFERENCES = {"gone": "in the orphan only", "new": "there now only", "changed": "changed", "unreadable": "unreadable"}
inside_argument = click.argument("word", metavar="ID[:PATH]|PATH", type=OrphanIdOrPath())


@click.command("ls", cls=Command, short_help="List what an orphan holds.", no_args_is_help=True)
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
    kernel, (entry, within) = _find_place(volumes, word, uid)

    def list_entries(fd: Fd, _folder: UserFolder, _within: RelPath) -> list[EntryInside]:
        return entries_inside(kernel, fd, is_meant, most)

    found = inside(kernel, volumes, entry, within, list_entries, list[EntryInside])
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


@click.command("cat", cls=Command, short_help="Print a file of an orphan.", no_args_is_help=True)
@inside_argument
@whose_option
@volume_option
def cat_command(word: bytes, uid: int | None, volumes: tuple[bytes, ...]) -> int:
    """Print a file of an orphan as it is; nothing is changed.

    \b
    Examples:
      trashd cat 2fe7e4cb8ba8:results/final.csv
      trashd cat /scratch/job/results/final.csv | diff - /scratch/job/results/final.csv
    """
    if sys.__stdout__ is None:
        raise UsageError("standard output is closed", "that is where it is printed")
    kernel, (entry, asked) = _find_place(volumes, word, uid)

    def write(fd: Fd, _folder: UserFolder, within: RelPath) -> None:
        """By the orphan's owner, who has our standard output."""
        for part in content_of(kernel, fd, within):
            while part:
                part = part[os.write(1, part) :]

    inside(kernel, volumes, entry, asked, write, None)
    return 0


@click.command(
    "diff", cls=Command, short_help="Tell what differs between an orphan and what is there now.", no_args_is_help=True
)
@inside_argument
@whose_option
@volume_option
@json_option
def diff_command(word: bytes, uid: int | None, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Tell what differs between an orphan, or a directory of it, and what is now where it came from.

    Files differ if their sizes do, or their contents, which are read where the times differ; links by where they lead.
    What is on one side alone is told once, whatever it holds. Of what a sweep took only that is compared.

    \b
    Examples:
      trashd diff 2fe7e4cb8ba8
      trashd diff /scratch/job
    """
    kernel, (entry, asked) = _find_place(volumes, word, uid)
    sys.stdout.flush()

    def compare(fd: Fd, folder: UserFolder, within: RelPath) -> int:
        """By the orphan's owner, who has our standard output."""
        tells_new = entry.method is not Method.SWEEP
        if not stat.S_ISDIR(kernel.fstat(fd).st_mode):
            raise Refused(within or entry.id, "it is no directory: trashd cat prints it, for diff -")
        count = 0
        with there_now(kernel, folder, entry, within) as now:
            if not stat.S_ISDIR(kernel.fstat(now).st_mode):
                raise Refused(within or entry.id, "what is there now is no directory")
            for one in differences(kernel, fd, now, within, tells_new=tells_new):
                count += 1
                if as_json:
                    output.as_json(one)
                else:
                    print(f"{_DIFFERENCES[one.how]}: {printable(one.path)}")
        sys.stdout.flush()
        return count

    if not inside(kernel, volumes, entry, asked, compare, int) and not as_json:
        click.echo("nothing differs", err=True)
    return 0


def _find_place(volumes: Sequence[bytes], word: bytes, uid: int | None) -> tuple[Kernel, CameFrom]:
    """The place that a word means, after what killed commands left is settled."""
    kernel = tended(volumes)
    before, colon, after = word.partition(b":")
    is_id = bool(colon) and b"/" not in before
    part = os.path.normpath(after.strip(b"/")) if is_id and after.strip(b"/") else None
    return kernel, chosen(kernel, volumes, before if is_id else word, part, uid, as_json=True)
