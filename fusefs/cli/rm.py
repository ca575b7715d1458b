"""The command line of trashd rm, which cli/rm_paths.py carries out."""

from __future__ import annotations

from typing import Any

import click

from fusefs.cli.options import DURATION, NOTE, Command, json_option, null_option, paths_argument
from fusefs.cli.rm_paths import remove_paths
from fusefs.core.container_states import DEFAULT_RETENTION_S


@click.command(
    "rm",
    cls=Command,
    short_help="Move files and directories to the trash instead of deleting them.",
    headings={
        "Select": "--force --interactive --recursive --dir --null",
        "Act": "--keep-for --note --now",
        "Output": "--verbose --json",
    },
)
@paths_argument
@null_option
@click.option("-f", "--force", is_flag=True, help="Ignore paths that do not exist; never ask.")
@click.option("-i", "--interactive", "asks", is_flag=True, help="Ask before each removal.")
@click.option("-r", "-R", "--recursive", is_flag=True, help="Remove directories with their contents (the default).")
@click.option(
    "-d", "--dir", "only_empty", is_flag=True, help="Remove directories only if they are empty, unless -r is given."
)
@click.option("-v", "--verbose", is_flag=True, help="Print every removed path, however many there are.")
@click.option(
    "--keep-for",
    type=DURATION,
    default=DEFAULT_RETENTION_S,
    help="Keep removed files restorable for DURATION. [default: 24h]",
)
@click.option("--note", type=NOTE, default="", help="Store TEXT as a note with the orphan.")
@click.option("--now", is_flag=True, help="Delete at once, in the foreground, instead of keeping an orphan.")
@json_option
def command(**options: Any) -> int:
    """Move files and directories to the trash, with a single rename for each.

    The paths that one command removes become one orphan (a trashed tree) on each filesystem. Restore all of them with
    trashd undo, or one with trashd restore PATH. If a path is a symbolic link, the link itself is removed; its target
    is not touched.

    Do not alias rm to this command: scripts may expect rm to free space at once, and on machines without the alias, rm
    would delete files permanently.

    \b
    Examples:
      trashd rm core.* old-build/
      find . -name '*.tmp' -print0 | trashd rm -0 --keep-for 1h
    """
    return remove_paths(**options)
