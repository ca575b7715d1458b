"""trashd ls, cat and diff, which find a file or directory in an orphan by `ID[:PATH]` or by its original path."""

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
from fusefs.core.human_units import format_utc
from fusefs.core.names import RelPath
from fusefs.core.printable_names import printable
from fusefs.core.record import Method
from fusefs.linux.children import user_name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import UserFolder
from fusefs.store.orphan_contents import (
    EntryInside,
    call_inside,
    content_of,
    entries_inside,
    find_differences,
    open_at_origin,
)
from fusefs.store.orphans import ListedContainer, OrphanFromPath

_DIFFERENCES = {
    "gone": "only in the orphan",
    "new": "not in the orphan",
    "changed": "changed",
    "unreadable": "unreadable",
}
inside_argument = click.argument("word", metavar="ID[:PATH]|PATH", type=OrphanIdOrPath())


@click.command("ls", cls=Command, short_help="List files in an orphan.")
@inside_argument
@click.option("--iname", "glob", default="*", metavar="GLOB", help="List only names that match GLOB, ignoring case.")
@click.option("--first", "most", type=click.IntRange(1), metavar="N", help="List and stat only the first N names.")
@whose_option
@volume_option
@json_option
def command(
    word: bytes, glob: str, most: int | None, uid: int | None, volumes: tuple[bytes, ...], as_json: bool
) -> int:
    """List a directory in an orphan (a trashed tree), as ls -l does, without changing it.

    Name the orphan by its ID, optionally followed by a colon and a PATH inside the orphan, or by its original PATH.
    trashd list shows all orphans.

    \b
    Examples:
      trashd ls 2fe7e4cb8ba8
      trashd ls 2fe7e4cb8ba8:results
      trashd ls /scratch/job/results
      trashd ls 2fe7e4cb8ba8 --iname '*.csv' --first 100
    """
    try:
        matches = compile_glob(glob, ignores_case=True)
    except ValueError as error:
        raise UsageError(f"--iname: {error}") from error
    kernel, (entry, within) = _find_place(volumes, word, uid)

    def list_entries(fd: Fd, _folder: UserFolder, _within: RelPath) -> list[EntryInside]:
        return entries_inside(kernel, fd, matches, most)

    entries = call_inside(kernel, volumes, entry, within, list_entries, list[EntryInside])
    if as_json:
        for one in entries:
            output.as_json(one)
        return 0
    for line in output.aligned([_row(one, word) for one in entries]) if entries else ():
        print(line)
    return 0


def _row(one: EntryInside, word: bytes) -> tuple[str, ...]:
    """Format an entry as ls -l does."""
    name = printable(one.name or word)
    if one.target is not None:
        name += f" -> {printable(one.target)}"
    day = format_utc(one.mtime_ns, "%Y-%m-%d %H:%M", "after 9999")
    return (stat.filemode(one.mode), str(one.n_links), user_name(one.uid), f"{one.n_bytes:>12}", day, name)


@click.command("cat", cls=Command, short_help="Print a file in an orphan.")
@inside_argument
@whose_option
@volume_option
def cat_command(word: bytes, uid: int | None, volumes: tuple[bytes, ...]) -> int:
    """Print a file in an orphan (a trashed tree) to standard output, without changing it.

    \b
    Examples:
      trashd cat 2fe7e4cb8ba8:results/final.csv
      trashd cat /scratch/job/results/final.csv | diff - /scratch/job/results/final.csv
    """
    if sys.__stdout__ is None:
        raise UsageError("standard output is closed")
    kernel, (entry, place) = _find_place(volumes, word, uid)

    def write(fd: Fd, _folder: UserFolder, within: RelPath) -> None:
        """Write the file to standard output; runs in a process of the orphan's owner."""
        for part in content_of(kernel, fd, within):
            while part:
                part = part[os.write(1, part) :]

    call_inside(kernel, volumes, entry, place, write, None)
    return 0


@click.command("diff", cls=Command, short_help="Compare an orphan with its original path.")
@inside_argument
@whose_option
@volume_option
@json_option
def diff_command(word: bytes, uid: int | None, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Compare an orphan (a trashed tree), or a directory in it, with what is now at its original path.

    Files differ if their sizes or their contents do; contents are read only if the modification times differ. Symbolic
    links differ if their targets do. A directory that exists on only one side is reported once, without its contents.
    For an orphan of a sweep, only the swept files are compared.

    \b
    Examples:
      trashd diff 2fe7e4cb8ba8
      trashd diff /scratch/job
    """
    kernel, (entry, place) = _find_place(volumes, word, uid)
    sys.stdout.flush()

    def compare(fd: Fd, folder: UserFolder, within: RelPath) -> int:
        """Print the differences; runs in a process of the orphan's owner."""
        tells_new = entry.method is not Method.SWEEP
        if not stat.S_ISDIR(kernel.fstat(fd).st_mode):
            raise Refused(f"{_name(entry, within)}: not a directory", "to compare a file, pipe trashd cat to diff")
        count = 0
        with open_at_origin(kernel, folder, entry, within) as now:
            if not stat.S_ISDIR(kernel.fstat(now).st_mode):
                raise Refused(f"{_name(entry, within)}: its original path is no longer a directory")
            for one in find_differences(kernel, fd, now, within, includes_new=tells_new):
                count += 1
                if as_json:
                    output.as_json(one)
                else:
                    print(f"{_DIFFERENCES[one.how]}: {printable(one.path)}")
        sys.stdout.flush()
        return count

    if not call_inside(kernel, volumes, entry, place, compare, int) and not as_json:
        click.echo("no differences", err=True)
    return 0


def _find_place(volumes: Sequence[bytes], word: bytes, uid: int | None) -> tuple[Kernel, OrphanFromPath]:
    """Complete unfinished operations, then find the orphan, and the path in it, that an argument names."""
    kernel = tended(volumes)
    before, colon, after = word.partition(b":")
    is_id = bool(colon) and b"/" not in before
    part = os.path.normpath(after.strip(b"/")) if is_id and after.strip(b"/") else None
    return kernel, chosen(kernel, volumes, before if is_id else word, part, uid, as_json=True)


def _name(entry: ListedContainer, within: RelPath) -> str:
    """Format a path in an orphan as a user types it."""
    return f"{entry.id}:{printable(within)}" if within else entry.id
