"""trashd holders."""

from __future__ import annotations

import os

import click

from fusefs.cli import output
from fusefs.cli.options import OrphanIdOrPath, json_option, volume_option
from fusefs.core.names import is_container_id
from fusefs.core.printable_names import printable
from fusefs.linux.children import user_name
from fusefs.linux.kernel import Kernel
from fusefs.store.check_swap import holders_of, holders_of_path
from fusefs.store.orphans import find_container


@click.command("holders", short_help="List the processes that work in a tree.", no_args_is_help=True)
@click.argument("what", type=OrphanIdOrPath(), metavar="ID|DIR")
@volume_option
@json_option
def command(what: bytes, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """List the processes that have something in a tree open: fd, cwd, root, executable or mapping.

    With pid 0: the kernel, for a loop device (losetup -d detaches it) or an active swap file (swapoff ends it).

    For an orphan's id: who still works in the old tree (reload or restart them). For a directory: who would.
    Without root only your own processes can be seen. ID may be cut short as long as it is unique, and no name of a
    file here.

    \b
    Examples:
      trashd holders /var/log/app
      trashd holders 2fe7e4cb8ba8
    """
    text = what.decode("ascii", "replace")
    if not is_container_id(text) and _is_path(what):
        held = holders_of_path(Kernel(), what)
    else:
        held = holders_of([os.path.join(find_container(Kernel(), volumes, text).path, b"tree")])[0]
    if as_json:
        output.as_json(held)
        return 0
    for h in sorted(held.holders):
        path = printable(h.path) or "."
        print(f"{h.pid:>8}  {user_name(h.uid):<12}  {printable(h.command.encode()):<16}  {h.kind:<5}  {path}")
    if not held.holders:
        print(f"nobody holds {printable(held.path)}" + ("" if os.geteuid() == 0 else " (as far as you may see)"))
    return 0


def _is_path(what: bytes) -> bool:
    """Whether it is no end of an id: it has a slash, or something here has that name, be it a mount that is dead."""
    try:
        os.lstat(what)
    except FileNotFoundError:
        return b"/" in what
    except OSError:
        pass
    return True
