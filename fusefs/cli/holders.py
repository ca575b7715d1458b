"""trashd holders."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import click

from fusefs.cli import output
from fusefs.cli.options import Command, OrphanIdOrPath, json_option, volume_option
from fusefs.core.errors import IsMountPoint
from fusefs.core.names import is_container_id
from fusefs.core.printable_names import printable
from fusefs.linux.children import user_name
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import FilesystemPath, Mount, MountView, below, every_place, find_place, read_mounts, views
from fusefs.linux.tree_users import TreeHolder, find_holders, serves_fuse
from fusefs.store.backing_and_mount import patiently
from fusefs.store.layout import trusted_owners
from fusefs.store.orphans import find_container
from fusefs.store.victim import find_victim


class HeldTree(NamedTuple):
    """The holders of one tree."""

    path: bytes
    holders: tuple[TreeHolder, ...]


def holders_of(paths: list[bytes]) -> list[HeldTree]:
    """The holders of the trees at some paths, in one look at /proc.

    Without root only one's own processes can be seen.
    """
    mounts = read_mounts()
    ours = views(mounts, trusted_owners(os.geteuid()))
    places = {path: _places(path, mounts, ours) for path in paths}
    found: dict[FilesystemPath, list[TreeHolder]] = {place: [] for several in places.values() for place in several}
    for place, holder in find_holders(list(found)):
        found[place].append(holder)
    daemons = {pid for pid in {h.pid for several in found.values() for h in several} if ours and serves_fuse(pid)}
    return [
        HeldTree(path, tuple(h for place in several for h in found[place] if h.pid not in daemons))
        for path, several in places.items()
    ]


def _places(path: bytes, mounts: list[Mount], ours: list[MountView]) -> list[FilesystemPath]:
    """Where a path is on the backing filesystem and in the mounts of ours that show it."""
    place = find_place(path, mounts)
    if place is None:
        return []
    places = every_place(place, ours)
    [place, *_] = places
    for view in ours:
        # What the store moved behind a mount has its old path there, in /proc too, until the new one is looked at.
        if view.backing.holds(place):
            with suppress(OSError):
                patiently(partial(os.lstat, os.path.join(view.mount.point, below(place.path, view.backing.path))))
    return places


def holders_of_path(kernel: Kernel, path: bytes) -> HeldTree:
    """The holders of the directory or file that a person named, or of what is mounted there.

    Raises  TrashdError as `find_victim`
    """
    try:
        with find_victim(kernel, path) as victim:
            found = victim.path()
    except IsMountPoint:
        found = os.path.realpath(path)
    return holders_of([found])[0]


@click.command("holders", cls=Command, short_help="List the processes that work in a tree.", no_args_is_help=True)
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
