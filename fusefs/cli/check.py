"""trashd check, and trashd swap --dry-run: a swap's preflight, printed."""

from __future__ import annotations

from collections.abc import Iterable

import click

from fusefs.cli import output
from fusefs.cli.options import PathBytes, json_option
from fusefs.cli.swap_paths import every_path
from fusefs.core.errors import TrashdError
from fusefs.core.printable_names import printable, shell_word
from fusefs.linux.kernel import Kernel
from fusefs.store.preflight import Preflight, preflight


@click.command("check", short_help="Say what a swap would do, without doing it.", no_args_is_help=True)
@click.argument("paths", type=PathBytes(), nargs=-1, metavar="DIR…")
@json_option
def command(paths: tuple[bytes, ...], as_json: bool) -> int:
    """Say what a swap of each directory would do, without doing it; the exit code is the one that swap would have.

    What only trying tells is tried: empty directories are made beside DIR and where its store is or would be, and
    removed again. DIR stays where it is, and what is in it is not touched.
    System calls that this kernel or container lacks are named, and what that costs; where there is no exchange, or
    other machines may have the filesystem mounted, what follows from that.

    \b
    Examples:
      trashd check /scratch/job
      trashd check --json /scratch/*/
    """
    return tell_preflight(every_path(paths, null=False), as_json=as_json)


def tell_preflight(paths: Iterable[bytes], *, as_json: bool, keep: tuple[str, ...] = (), unlike: bool = False) -> int:
    """Look at each directory and print it; the exit code that a swap of them would have."""
    kernel = Kernel()
    codes = []
    for path in paths:
        try:
            found = preflight(kernel, path, keep, unlike=unlike)
        except TrashdError as error:
            codes.append(output.failed(error, as_json=as_json))
            continue
        if as_json:
            output.as_json(found)
        else:
            _tell(found)
        codes.append(found.exit_code)
    return output.exit_code(codes)


def _tell(found: Preflight) -> None:
    print(f"{printable(found.path)}: {'can NOT be swapped' if found.refusals else 'can be swapped'}")
    print(f"  volume   {printable(found.mount_point)} ({found.filesystem})")
    if found.store is not None:
        print(f"  store    {printable(found.store)}{'' if found.exists else ' (would be made)'}")
    gap = "" if found.gap_ns is None else f" ({found.gap_ns / 1e6:.2f} ms just now)"
    how = {"exchange": "one atomic exchange", "two-rename": f"two renames: the name is missing for a moment{gap}"}
    if found.method in how:
        print(f"  method   {how[found.method]}")
    if found.takeover_s is not None:
        print(f"  nodes    a killed command of another node is taken over after {found.takeover_s:g} s of silence")
    if found.project:
        print(f"  project  {found.project}: its quota counts the orphan until it is reaped")
    if found.unlike:
        print(f"  unlike   the fresh directory would have {', '.join(found.unlike)}")
    if found.kept:
        print(f"  keep     {output.names(found.kept)}")
    if found.n_holders:
        holders = output.counted(found.n_holders, "process", "processes")
        print(f"  holders  {holders} (trashd holders {shell_word(found.path)})")
    for missing in found.missing:
        print(f"  missing  {missing.call} ({missing.errno}): {missing.cost}")
    for message, hint in found.refusals:
        print(f"  against  {message}\n           {hint}")
