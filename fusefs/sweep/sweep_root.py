"""The directory of a sweep, opened with the distrust that it needs, and what is mounted below it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fusefs.core.errors import NotFound
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import below, every_place, mounts_inside, place_of, views
from fusefs.store.backing_and_mount import Scope
from fusefs.store.layout import trusted_owners
from fusefs.store.locate import find_scope
from fusefs.sweep.open_directories import found_directory
from fusefs.sweep.request import Identified, SweepRoot, identify


@contextmanager
def open_top(kernel: Kernel, directory: bytes, inode: Identified | None) -> Iterator[SweepRoot]:
    """The directory.

    inode   that it must have, on the side that the path leads to; None: any
    Raises  what `find_scope` does; NotFound if it is another one; for root what `found_directory` does: a link that
            another user can change would lead root anywhere
    """
    with find_scope(kernel, directory) as scope:
        sides = scope.sides
        if inode is not None:
            is_it = inode == identify(kernel, sides.names())
        elif os.geteuid() == 0:
            with found_directory(kernel, directory, scope.mounts) as found:
                # The path may lead to what a mount of ours shows, or to what that is a view of.
                is_it = identify(kernel, found.fd) in [identify(kernel, one) for one in sides if one is not None]
        else:
            is_it = True
        if not is_it:
            raise NotFound(directory, "it was moved meanwhile")
        yield SweepRoot(scope.path(), sides, tuple(_mounts(scope)))


def _mounts(scope: Scope) -> Iterator[bytes]:
    by_id = {mount.mnt_id: mount for mount in scope.mounts}
    ours = views(scope.mounts, trusted_owners(os.geteuid()))
    for place in every_place(scope.place(), ours):
        for mount in mounts_inside(place, scope.mounts):
            inside = place_of(mount.point, by_id[mount.parent_id])
            yield below(inside.path, place.path)
