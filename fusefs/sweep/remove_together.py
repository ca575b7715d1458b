"""Removal of many paths by one command: one orphan for all paths on one mount, in the form of a sweep's orphan.

So they share one record and few flushes, and one restore brings all of them back. Paths that a sweep would skip or
treat differently are removed individually: links' targets, mount points and directories above them, and inaccessible
paths.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

from fusefs.core.results import ListedDirectory, RemovalGroup, SweepSums, Swept
from fusefs.core.selection import KINDS, NO_NAMES, ListedTogether, Selection
from fusefs.linux.batched_calls import look_at_all
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import below, read_mounts
from fusefs.store.backing_and_mount import DIRECTORY
from fusefs.store.stage import SwapOptions
from fusefs.sweep.request import Request, SweepWishes, ToTrash
from fusefs.sweep.run import run

_AT_ONCE = 1024


def in_groups(kernel: Kernel, paths: Iterable[bytes]) -> tuple[list[RemovalGroup], list[bytes]]:
    """Divide paths into groups that can be removed together, and the others.

    For each directory this only checks whether one or two of its names exist. Missing names are detected during the
    removal.
    """
    look, alone = _Look(kernel), list[bytes]()
    for path in paths:
        at = path.rfind(b"/") + 1
        name, directory = path[at:], look.at(path[:at])
        if directory is None or name in directory.others:
            alone.append(path)
        else:
            directory.listed.packed.extend(name + b"\0")
    groups = []
    for directories in look.by_mount():
        seen = [(directory, len([*islice(filter(os.path.lexists, directory.paths()), 2)])) for directory in directories]
        found = tuple(directory for directory, n in seen if n)
        left = [directory for directory, n in seen if not n]
        if sum(n for _directory, n in seen) > 1:
            groups.append(RemovalGroup(os.path.commonpath([directory.path for directory in found]), found))
        else:
            left = directories
        alone += chain.from_iterable(directory.all_given() for directory in left)
    return groups, alone


def remove_group(
    kernel: Kernel, group: RemovalGroup, options: SwapOptions, wishes: SweepWishes
) -> tuple[Swept, list[bytes]]:
    """Remove a group.

    Returns  the result; the paths, as given, of entries that were not removed
    Raises   TrashdError; then nothing was changed
    """
    left: list[bytes] = []

    def see(tree: Fd, sums: SweepSums) -> None:
        if sums.n_done < group.n():
            for listed in group.directories:
                left.extend(_left(kernel, tree, below(listed.path, group.directory), listed, sums))

    chosen, act = Selection(types=frozenset(KINDS)), ToTrash(options, see)
    return run(kernel, Request(group.directory, chosen, act, names=_together(group)), wishes), left


def _together(group: RemovalGroup) -> Iterator[ListedTogether]:
    for listed in group.directories:
        names = listed.names()
        while some := [*islice(names, _AT_ONCE)]:
            yield ListedTogether(listed.path, os.fsdecode(b"\0".join(some)).split("\0"))


def _left(kernel: Kernel, tree: Fd, upper: bytes, listed: ListedDirectory, sums: SweepSums) -> Iterator[bytes]:
    """The names of a directory that are not in the orphan's tree: they, or a directory above them, were not moved.

    upper  the directory's path in the tree
    """
    try:
        here = kernel.open_beneath(tree, upper or b".", DIRECTORY)
    except OSError:
        yield from listed.all_given()
        return
    with here:
        names = listed.names()
        while some := [*islice(names, _AT_ONCE)]:
            looked, _refused = look_at_all(kernel, here, map(os.fsdecode, some))
            came = {os.fsencode(one.name): one.st_mode for one in looked}
            for name in some:
                # A directory that was merged with parts moved earlier may remain in part.
                is_part = sums.n_failed > 0 and stat.S_ISDIR(came.get(name, 0)) and _is_there(listed, name)
                if name not in came or is_part:
                    yield listed.given + name


def _is_there(directory: ListedDirectory, name: bytes) -> bool:
    return os.path.lexists(os.path.join(directory.path, name))


class _Directory(NamedTuple):
    """A directory of names. others: names in it to be removed individually"""

    listed: ListedDirectory
    others: frozenset[bytes]


class _Look:
    """Opens each directory of the given paths once."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._here = os.getcwdb()
        self._directories: dict[bytes, _Directory | None] = {}
        self._by_mount: dict[int, list[ListedDirectory]] = {}
        self._above_mounts: dict[bytes, set[bytes]] = {}
        for mount in read_mounts():
            at = mount.point
            while at != b"/":
                above, name = os.path.split(at)
                self._above_mounts.setdefault(above, set()).add(name)
                at = above

    def at(self, given: bytes) -> _Directory | None:
        """The directory for the part of a path before its name; None: remove its names individually."""
        try:
            return self._directories[given]
        except KeyError:
            return self._directories.setdefault(given, self._open(given))

    def by_mount(self) -> Iterator[list[ListedDirectory]]:
        """The directories that have names to remove, grouped by mount."""
        for directories in self._by_mount.values():
            named = [directory for directory in directories if directory.packed]
            if named:
                yield named

    def _open(self, given: bytes) -> _Directory | None:
        """None if the path has a link, or is no directory."""
        try:
            with self._kernel.open_plain(given or b".") as fd:
                mnt_id = self._kernel.statx(fd).mnt_id
        except OSError:
            return None
        listed = ListedDirectory(given, os.path.normpath(os.path.join(self._here, given)), bytearray())
        self._by_mount.setdefault(mnt_id, []).append(listed)
        return _Directory(listed, NO_NAMES.union(self._above_mounts.get(listed.path, ())))
