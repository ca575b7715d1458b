"""trashd holders."""

from __future__ import annotations

import os

import click

from fusefs.cli import output
from fusefs.cli.options import PathBytes, json_option, volume_option
from fusefs.core.names import is_container_id, printable
from fusefs.linux.credentials import user_name
from fusefs.linux.kernel import Kernel
from fusefs.store.find import find_container
from fusefs.store.holders import HeldTree, holders_of, holders_of_path


@click.command("holders", short_help="List the processes that work in a tree.", no_args_is_help=True)
@click.argument("what", type=PathBytes(), metavar="ID|DIR")
@volume_option
@json_option
def command(what: bytes, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """List the processes that have something in a tree open: fd, cwd, root, executable or mapping.

    For an orphan's id: who still works in the old tree (reload or restart them). For a directory: who would.
    Without root only your own processes can be seen.

    \b
    Examples:
      trashd holders /var/log/app
      trashd holders 20261121T032253.555Z-app-2fe7e4cb8ba8
    """
    held = _held(what, volumes)
    if as_json:
        output.as_json(held)
        return 0
    for h in sorted(held.holders):
        path = printable(h.path) or "."
        print(f"{h.pid:>8}  {user_name(h.uid):<12}  {printable(h.command.encode()):<16}  {h.kind:<5}  {path}")
    if not held.holders:
        print(f"nobody holds {printable(held.path)}" + ("" if os.geteuid() == 0 else " (as far as you may see)"))
    return 0


def _held(what: bytes, volumes: tuple[bytes, ...]) -> HeldTree:
    text = what.decode("ascii", "replace")
    if not is_container_id(text):
        return holders_of_path(Kernel(), what)
    entry = find_container(Kernel(), volumes, text)
    return holders_of([os.path.join(entry.path, b"tree")])[0]
