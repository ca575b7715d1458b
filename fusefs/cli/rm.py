"""trashd rm."""

from __future__ import annotations

import click

from fusefs.cli.options import DURATION, Note, every_path, json_option, null_option, paths_argument
from fusefs.cli.reap_foreground import reap_ids
from fusefs.cli.swap_fast_lane import SwapBatch, swap_all
from fusefs.core.lifecycle import DEFAULT_RETENTION_S
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped
from fusefs.store.swap_path import remove_path


@click.command("rm", short_help="Make files and directories disappear, restorably.", no_args_is_help=True)
@paths_argument
@null_option
@click.option("--keep-for", type=DURATION, default=DEFAULT_RETENTION_S, help="Restorable that long (24h).")
@click.option("--note", type=Note(), default="", help="A sentence kept with the orphan.")
@click.option("--no-fsync", is_flag=True, help="Don't flush after the rename; its record is flushed before it.")
@click.option("--now", is_flag=True, help="Don't keep it: reap it at once, in the foreground.")
@json_option
def command(
    paths: tuple[bytes, ...], null: bool, keep_for: int, note: str, no_fsync: bool, now: bool, as_json: bool
) -> int:
    """Make files and directories disappear by one rename each; restorable.

    What people type instead of rm -rf. A symbolic link is removed itself, never what it points to.

    \b
    Examples:
      trashd rm core.* old-build/
      find . -name '*.tmp' -print0 | trashd rm -0 --keep-for 1h
    """

    def after(swapped: Swapped) -> int:
        return reap_ids(Kernel(), (swapped.path,), (swapped.id,), as_json=as_json) if now else 0

    options = SwapOptions(keep_for, note, not no_fsync)
    return swap_all(SwapBatch(every_path(paths, null=null), options, remove_path, as_json, not now, after))
