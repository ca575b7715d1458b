"""Remove many paths with one command: all paths on one mount become one orphan, like the matches of a sweep.

The paths share one record and few flushes, and one restore brings all of them back. Paths that a sweep would skip or
treat differently are removed individually: paths through symbolic links, mount points and directories above them, and
inaccessible paths.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

from fusefs.core.results import ListedDirectory, RemovalGroup, SweepSums, Swept
from fusefs.core.selection import KINDS, NOT_NAMES, ListedNames, Selection
from fusefs.linux.batched_calls import lstat_all
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts, relative_to
from fusefs.store.backing_and_mount import DIRECTORY
from fusefs.store.stage import SwapOptions
from fusefs.sweep.request import Request, SweepOptions, ToTrash
from fusefs.sweep.run_sweep import run_request

_AT_ONCE = 1024


def group_paths(kernel: Kernel, paths: Iterable[bytes]) -> tuple[list[RemovalGroup], list[bytes]]:
    """Divide paths into groups that can be removed together, and paths that can't.

    For each directory, this only checks whether one or two of its names exist. Missing names are detected when the
    group is removed.
    """
    cache, individual = _DirectoryCache(kernel), list[bytes]()
    for path in paths:
        at = path.rfind(b"/") + 1
        name, directory = path[at:], cache.at(path[:at])
        if directory is None or name in directory.others:
            individual.append(path)
        else:
            directory.listed.packed.extend(name + b"\0")
    groups = []
    for directories in cache.by_mount():
        counted = [
            (directory, len([*islice(filter(os.path.lexists, directory.paths()), 2)])) for directory in directories
        ]
        present = tuple(directory for directory, n in counted if n)
        absent = [directory for directory, n in counted if not n]
        if sum(n for _directory, n in counted) > 1:
            groups.append(RemovalGroup(os.path.commonpath([directory.path for directory in present]), present))
        else:
            absent = directories
        individual += chain.from_iterable(directory.paths_as_given() for directory in absent)
    return groups, individual


def remove_group(
    kernel: Kernel, group: RemovalGroup, options: SwapOptions, sweep_options: SweepOptions
) -> tuple[Swept, list[bytes]]:
    """Remove a group.

    Returns  the result, and the paths, as given, of the entries that were not removed
    Raises   TrashdError; then nothing was changed
    """
    remaining: list[bytes] = []

    def collect_remaining(tree: Fd, sums: SweepSums) -> None:
        if sums.n_done < group.n_names():
            for listed in group.directories:
                remaining.extend(_find_remaining(kernel, tree, relative_to(listed.path, group.directory), listed, sums))

    chosen, action = Selection(types=frozenset(KINDS)), ToTrash(options, collect_remaining)
    return run_request(
        kernel, Request(group.directory, chosen, action, names=_together(group)), sweep_options
    ), remaining


def _together(group: RemovalGroup) -> Iterator[ListedNames]:
    for listed in group.directories:
        names = listed.names()
        while some := [*islice(names, _AT_ONCE)]:
            yield ListedNames(listed.path, os.fsdecode(b"\0".join(some)).split("\0"))


def _find_remaining(
    kernel: Kernel, tree: Fd, upper: bytes, listed: ListedDirectory, sums: SweepSums
) -> Iterator[bytes]:
    """Yield the paths in a directory that are not in the orphan's tree, because they, or a parent, were not moved.

    upper  the directory's path in the tree
    """
    try:
        tree_dir = kernel.open_beneath(tree, upper or b".", DIRECTORY)
    except OSError:
        yield from listed.paths_as_given()
        return
    with tree_dir:
        names = listed.names()
        while some := [*islice(names, _AT_ONCE)]:
            stats, _refused = lstat_all(kernel, tree_dir, map(os.fsdecode, some))
            moved = {os.fsencode(one.name): one.st_mode for one in stats}
            for name in some:
                # A directory that was merged with parts moved earlier may partly remain.
                is_part = sums.n_failed > 0 and stat.S_ISDIR(moved.get(name, 0)) and _is_there(listed, name)
                if name not in moved or is_part:
                    yield listed.given + name


def _is_there(directory: ListedDirectory, name: bytes) -> bool:
    return os.path.lexists(os.path.join(directory.path, name))


class _Directory(NamedTuple):
    """A directory that contains given names. others: names in it that must be removed individually"""

    listed: ListedDirectory
    others: frozenset[bytes]


class _DirectoryCache:
    """Opens each directory of the given paths once."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._cwd = os.getcwdb()
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
        """Return the directory that precedes a name in a path, or None if its names must be removed individually."""
        try:
            return self._directories[given]
        except KeyError:
            return self._directories.setdefault(given, self._open(given))

    def by_mount(self) -> Iterator[list[ListedDirectory]]:
        """Yield the directories with names to remove, grouped by mount."""
        for directories in self._by_mount.values():
            named = [directory for directory in directories if directory.packed]
            if named:
                yield named

    def _open(self, given: bytes) -> _Directory | None:
        """Open a directory, or return None if the path has a link, or is not a directory."""
        try:
            with self._kernel.open_plain(given or b".") as fd:
                mnt_id = self._kernel.statx(fd).mnt_id
        except OSError:
            return None
        listed = ListedDirectory(given, os.path.normpath(os.path.join(self._cwd, given)), bytearray())
        self._by_mount.setdefault(mnt_id, []).append(listed)
        return _Directory(listed, NOT_NAMES.union(self._above_mounts.get(listed.path, ())))
