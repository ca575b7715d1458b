"""trashd rm, as click reads it; cli/rm_paths.py does it."""

from __future__ import annotations

from typing import Any

import click

from fusefs.cli.options import DURATION, NOTE, Command, json_option, null_option, paths_argument
from fusefs.cli.rm_paths import remove_paths
from fusefs.core.container_states import DEFAULT_RETENTION_S


@click.command("rm", cls=Command, short_help="Make files and directories disappear, restorably.", no_args_is_help=True)
@paths_argument
@null_option
@click.option("-f", "--force", is_flag=True, help="What is not there is no error; nothing is asked.")
@click.option("-i", "--interactive", "asks", is_flag=True, help="Ask before each.")
@click.option("-r", "-R", "--recursive", is_flag=True, help="Directories, too: they go as they are, even without -r.")
@click.option("-d", "--dir", "only_empty", is_flag=True, help="Directories only if they are empty, without -r.")
@click.option("-v", "--verbose", is_flag=True, help="Name each that is gone, however many.")
@click.option("--keep-for", type=DURATION, default=DEFAULT_RETENTION_S, help="Restorable that long (24h).")
@click.option("--note", type=NOTE, default="", help="A sentence kept with the orphan.")
@click.option("--now", is_flag=True, help="Don't keep it: reap it at once, in the foreground.")
@json_option
def command(**options: Any) -> int:
    """Make files and directories disappear by one rename each; restorable.

    What people type instead of rm -rf. A symbolic link is removed itself, never what it points to. What one command
    removes is one orphan on each filesystem, which comes back whole (trashd undo) or by name (trashd restore PATH).
    Don't call it rm by an alias: a script that counts on space being free at once, or another machine, has no trash.

    \b
    Examples:
      trashd rm core.* old-build/
      find . -name '*.tmp' -print0 | trashd rm -0 --keep-for 1h
    """
    return remove_paths(**options)
