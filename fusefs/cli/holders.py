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
from fusefs.linux.mountinfo import (
    FilesystemPath,
    Mount,
    MountView,
    every_place,
    find_place,
    read_mounts,
    relative_to,
    trashd_views,
)
from fusefs.linux.tree_users import TreeHolder, find_holders, serves_fuse
from fusefs.store.backing_and_mount import retry_stale
from fusefs.store.layout import trusted_owners
from fusefs.store.orphans import find_container
from fusefs.store.victim import find_victim


class HeldTree(NamedTuple):
    """The processes that use one tree."""

    path: bytes
    holders: tuple[TreeHolder, ...]


def holders_of(paths: list[bytes]) -> list[HeldTree]:
    """Find the processes that use the trees at the given paths, in one scan of /proc.

    Without root, only the caller's own processes are visible.
    """
    mounts = read_mounts()
    ours = trashd_views(mounts, trusted_owners(os.geteuid()))
    places = {path: _places(path, mounts, ours) for path in paths}
    holders: dict[FilesystemPath, list[TreeHolder]] = {place: [] for several in places.values() for place in several}
    for place, holder in find_holders(list(holders)):
        holders[place].append(holder)
    daemons = {pid for pid in {h.pid for several in holders.values() for h in several} if ours and serves_fuse(pid)}
    return [
        HeldTree(path, tuple(h for place in several for h in holders[place] if h.pid not in daemons))
        for path, several in places.items()
    ]


def _places(path: bytes, mounts: list[Mount], ours: list[MountView]) -> list[FilesystemPath]:
    """Return every place where a path appears: on the backing filesystem, and in each trashd mount that shows it."""
    place = find_place(path, mounts)
    if place is None:
        return []
    places = every_place(place, ours)
    [place, *_] = places
    for view in ours:
        # After a tree was moved on the backing filesystem, the mount and /proc show its old path until the mount looks
        # up the new path.
        if view.backing.holds(place):
            with suppress(OSError):
                retry_stale(
                    partial(os.lstat, os.path.join(view.mount.point, relative_to(place.path, view.backing.path)))
                )
    return places


def holders_of_path(kernel: Kernel, path: bytes) -> HeldTree:
    """Find the processes that use a directory or file, or the filesystem that is mounted on it.

    Raises  TrashdError like `find_victim`
    """
    try:
        with find_victim(kernel, path) as victim:
            directory = victim.path()
    except IsMountPoint:
        directory = os.path.realpath(path)
    return holders_of([directory])[0]


@click.command("holders", cls=Command, short_help="List processes that use a directory or an orphan.")
@click.argument("what", type=OrphanIdOrPath(), metavar="ID|DIR")
@volume_option
@json_option
def command(what: bytes, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """List processes that have a file in a tree open or mapped, run a program from it, or have their working or root
    directory in it.

    Given an orphan's ID, holders lists processes that still use the old tree; reload or restart them so that they use
    the new one. Given a directory, it lists processes that would keep using the old tree after a swap. PID 0 stands for
    the kernel, which uses a file in the tree as a loop device (detach it with losetup -d) or as a swap file (disable it
    with swapoff).

    Without root, only your own processes are visible. Any unique prefix or suffix of an ID will do, unless the current
    directory contains a file of that name.

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
        print(f"no process uses {printable(held.path)}" + ("" if os.geteuid() == 0 else " (of those that you can see)"))
    return 0


def _is_path(what: bytes) -> bool:
    """Return whether an argument contains a slash or names an existing file, which may be a dead mount."""
    try:
        os.lstat(what)
    except FileNotFoundError:
        return b"/" in what
    except OSError:
        pass
    return True
