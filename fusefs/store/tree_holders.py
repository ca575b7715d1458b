"""Processes that still work in a tree: by the orphan's id, or by a directory's path before a swap."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fusefs.core.errors import IsMountPoint
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import FilesystemPath, Mount, MountView, below, every_place, find_place, read_mounts, views
from fusefs.linux.tree_users import TreeHolder, find_holders, serves_fuse
from fusefs.store.backing_and_mount import patiently
from fusefs.store.layout import trusted_owners
from fusefs.store.locate import find_victim


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
