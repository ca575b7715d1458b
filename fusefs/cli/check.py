"""trashd check."""

from __future__ import annotations

import click

from fusefs.cli import dry_run
from fusefs.cli.options import PathBytes, every_path, json_option


@click.command("check", short_help="Say what a swap would do, without doing it.", no_args_is_help=True)
@click.argument("paths", type=PathBytes(), nargs=-1, metavar="DIR…")
@json_option
def command(paths: tuple[bytes, ...], as_json: bool) -> int:
    """Say what a swap of each directory would do, without doing it; the exit code is the one that swap would have.

    What only trying tells is tried: empty directories are made beside DIR and where its store is or would be, and
    removed again. DIR stays where it is, and what is in it is not touched.

    \b
    Examples:
      trashd check /scratch/job
      trashd check --json /scratch/*/
    """
    return dry_run.tell(every_path(paths, null=False), as_json=as_json)
