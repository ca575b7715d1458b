"""trashd umount."""

from __future__ import annotations

import click

from fusefs.cli import output
from fusefs.cli.json_objects import UnmountedPath
from fusefs.cli.options import PathBytes, json_option
from fusefs.core.errors import UsageError
from fusefs.core.printable_names import printable


@click.command("umount", short_help="Unmount what trashd mounted.", no_args_is_help=True)
@click.argument("mount_point", type=PathBytes(), metavar="MNT")
@click.option("--lazy", is_flag=True, help="At once, but whoever has something open there may go on with it.")
@click.option("--force", is_flag=True, help="At once; whoever has something open there gets errors.")
@json_option
def command(mount_point: bytes, lazy: bool, force: bool, as_json: bool) -> int:
    """Unmount MNT and wait until its daemon has ended, so that what is below can be unmounted too.

    Refused while somebody has something open there, or works there. A daemon that hangs is killed with
    --force. A mount whose daemon died is unmounted like any other.

    \b
    Examples:
      trashd umount /scratch
      trashd umount --force /scratch
    """
    if lazy and force:
        raise UsageError("--lazy with --force", "let them go on, or don't")
    from fusefs.mount.places.attach import UnmountMode, unmount
    from fusefs.mount.places.mount_points import real_path

    path = real_path(mount_point)
    done = unmount(path, UnmountMode.FORCE if force else UnmountMode.LAZY if lazy else UnmountMode.PLAIN)
    if as_json:
        output.as_json(UnmountedPath(path, done.is_ended, done.is_killed))
    where = printable(path)
    if done.is_killed:
        output.warn(f"{where}: its daemon did not end, and was killed")
    if not done.is_ended:
        output.warn(f"{where}: unmounted, but its daemon goes on: another mount namespace has it too, or it hangs")
    return 0
