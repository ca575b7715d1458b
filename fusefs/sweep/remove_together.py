"""Many paths removed by one command: one orphan for all that lie on one mount, in the form that a sweep makes.

So they have one record, few flushes, and come back together. What a sweep does not take, or not as a removal of its
own would, is left to that: what a link leads to, a mount point and what is above one, what can't be had.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from fusefs.core.removal_group import RemovalGroup, RemovalVictim
from fusefs.core.selection import KINDS, Selection
from fusefs.core.sweep_result import Swept
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.store.stage import SwapOptions
from fusefs.sweep.request import Request, SweepWishes, ToTrash
from fusefs.sweep.run import run


def in_groups(kernel: Kernel, paths: Iterable[bytes]) -> tuple[list[RemovalGroup], list[bytes]]:
    """Those of some paths that can be removed together, and the others."""
    look = _Look(kernel)
    by_mount: dict[int, list[RemovalVictim]] = {}
    alone = []
    for path in paths:
        found = look.at(path)
        if found is None:
            alone.append(path)
        else:
            by_mount.setdefault(found[0], []).append(found[1])
    groups = []
    for victims in by_mount.values():
        if len(victims) == 1:
            alone.append(victims[0].given)
        else:
            above = os.path.commonpath([os.path.dirname(victim.path) for victim in victims])
            groups.append(RemovalGroup(above, tuple(victims)))
    return groups, alone


def remove_group(
    kernel: Kernel, group: RemovalGroup, options: SwapOptions, wishes: SweepWishes
) -> tuple[Swept, list[RemovalVictim], list[bytes]]:
    """Remove a group.

    Returns  what was done; those that are gone, and the paths of those that are still there
    Raises   TrashdError; nothing was touched then
    """
    names = iter([victim.path for victim in group.victims])
    swept = run(
        kernel, Request(group.directory, Selection(types=frozenset(KINDS)), ToTrash(options), names=names), wishes
    )
    gone, left = [], []
    for victim in group.victims:
        if _inode(victim.path) == victim.inode:
            left.append(victim.given)
        else:
            gone.append(victim)
    return swept, gone, left


class _Look:
    """At paths, each directory once."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._here = os.getcwdb()
        self._directories: dict[bytes, tuple[int, bytes] | None] = {}
        self._above_mounts: set[bytes] = set()
        for mount in read_mounts():
            at = mount.point
            while at not in self._above_mounts:
                self._above_mounts.add(at)
                at = os.path.dirname(at)

    def at(self, given: bytes) -> tuple[int, RemovalVictim] | None:
        """The mount that something is on, and what it is; None: it is to be removed alone, or can't be."""
        above, name = os.path.split(given)
        if name in (b"", b".", b".."):
            return None
        if above not in self._directories:
            self._directories[above] = self._open(above)
        directory = self._directories[above]
        if directory is None:
            return None
        path = os.path.join(directory[1], name)
        inode = _inode(path)
        if inode is None or path in self._above_mounts:
            return None
        return directory[0], RemovalVictim(given, path, inode)

    def _open(self, path: bytes) -> tuple[int, bytes] | None:
        """The mount of a directory, and its path; None: a link is on the way, or it is none."""
        try:
            with self._kernel.open_plain(path or b".") as fd:
                return self._kernel.statx(fd).mnt_id, os.path.normpath(os.path.join(self._here, path))
        except OSError:
            return None


def _inode(path: bytes) -> tuple[int, int] | None:
    try:
        st = os.lstat(path)
    except OSError:
        return None
    return st.st_dev, st.st_ino
