"""trashd swap."""

from __future__ import annotations

import os

import click

from fusefs.cli import dry_run, output
from fusefs.cli.fast import Batch, swap_all
from fusefs.cli.options import Duration, Note, PathBytes, every_path, json_option, null_option
from fusefs.core.durations import DEFAULT_RETENTION_S
from fusefs.core.errors import NotPermitted, UsageError
from fusefs.core.names import printable
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import Options
from fusefs.store.swap import Swapped
from fusefs.store.verbs import swap_path


@click.command("swap", short_help="Put a fresh, empty directory in the place of each.", no_args_is_help=True)
@click.argument("directories", type=PathBytes(), nargs=-1, metavar="DIR…")
@null_option
@click.option("--dry-run", "dry", is_flag=True, help="Only say what would be done, and what stands against it.")
@click.option("--keep-for", type=Duration(), default=DEFAULT_RETENTION_S, help="Restorable that long (24h).")
@click.option("--note", type=Note(), default="", help="A sentence kept with the orphan.")
@click.option("--no-fsync", is_flag=True, help="Don't flush after the exchange; its record is flushed before it.")
@click.option("--unlike", is_flag=True, help="Accept a fresh directory with another owner, group, ACL or label.")
@click.option("--for-owner", is_flag=True, help="As root: give the orphan to the directory's owner to restore.")
@click.option("--now", is_flag=True, help="Don't keep it: reap it at once, in the foreground.")
@click.option("--holders", is_flag=True, help="Afterwards say which processes still work in the old tree.")
@json_option
def command(
    directories: tuple[bytes, ...],
    null: bool,
    dry: bool,
    keep_for: int,
    note: str,
    no_fsync: bool,
    unlike: bool,
    for_owner: bool,
    now: bool,
    holders: bool,
    as_json: bool,
) -> int:
    """Put a fresh, empty directory in each DIR's place by one atomic exchange.

    It has the same owner, mode, ACLs, xattrs and project id. DIR's name never disappears. Who has files of the
    old tree open keeps them, and space comes back when the reaper frees them.

    \b
    Examples:
      trashd swap /scratch/job
      trashd swap --keep-for 3d --note "before the upgrade" build/
      find /scratch -maxdepth 1 -name 'tmp.*' -print0 | trashd swap -0
      trashd swap --now --no-fsync cache/
    """
    paths = every_path(directories, null=null)
    if dry:
        return dry_run.tell(paths, as_json=as_json)
    verb = swap_path
    if for_owner:
        if os.geteuid() != 0:
            raise NotPermitted("--for-owner", "only root can give an orphan to somebody else")
        if now:
            raise UsageError("--now with --for-owner", "leave one of them out")
        from fusefs.store.for_owner import swap_for_owner

        verb = swap_for_owner

    def after(swapped: Swapped) -> int:
        if holders:
            _tell_holders(swapped, as_json=as_json)
        if not now:
            return 0
        from fusefs.cli.reaping import reap_ids

        return reap_ids(Kernel(), (swapped.path,), (swapped.id,), as_json=as_json)

    options = Options(keep_for, note, not no_fsync, unlike)
    return swap_all(Batch(paths, options, verb, as_json, not now, after))


def _tell_holders(swapped: Swapped, *, as_json: bool) -> None:
    from fusefs.store.holders import holders_of

    tree = os.path.join(swapped.store, b"orphans", swapped.id.encode(), b"tree")
    for held in holders_of([tree]):
        if as_json:
            output.as_json(held)
            continue
        for holder in held.holders:
            what = f"{holder.kind} {printable(holder.path) or '.'}"
            print(f"  held  pid {holder.pid} ({printable(holder.command.encode())}): {what}")
