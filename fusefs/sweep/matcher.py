"""Match entries: read directories in windows, and match entries by name, then by stat, emptiness and place."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import compress
from typing import NamedTuple

from fusefs.core.glob import ANY_ENDS, NameEnds, NameTest
from fusefs.core.names import STORE, join_path
from fusefs.core.orphan_sums import STAT_BLOCK_BYTES
from fusefs.core.results import OTHER_INODE, SweepSums
from fusefs.core.selection import FORMATS, Matcher, StatBounds
from fusefs.engine.strategy import in_order
from fusefs.linux.batched_calls import (
    FileSizes,
    StatxResult,
    UnlinkedMatches,
    lstat_all,
    match_by_stat,
    read_more,
    unlink_matching,
)
from fusefs.linux.fd import Fd
from fusefs.linux.getdents import DirentBlock
from fusefs.linux.kernel import Kernel, RefusedNames
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.layout import is_store_name
from fusefs.sweep.agenda import SliceCounts
from fusefs.sweep.request import Action, Identified, identify

_OWN = STORE.decode()
_LEAST = 8192
"""Number of entries that are listed regardless of time: on ext4, it is useless to sort a small window by inode."""


def kind_of(mode: int) -> int:
    """Return the file type of a mode as listings contain it (d_type)."""
    return stat.S_IFMT(mode) >> 12


def kinds_of(matcher: Matcher) -> frozenset[int]:
    """Return the file types of a selection as listings contain them (d_type)."""
    return frozenset(kind_of(FORMATS[kind]) for kind in matcher.types)


DIRECTORY_KIND = kind_of(stat.S_IFDIR)
ALL_KINDS = frozenset(map(kind_of, FORMATS.values()))


def is_own(name: str) -> bool:
    """Whether a name belongs to a trash store; fast for other names."""
    return _OWN in name and is_store_name(os.fsencode(name))


class EntryFilter(NamedTuple):
    """The entries to find in a directory.

    is_chosen  whether a name is chosen; None: all names are
    is_pruned  whether a name is neither chosen nor entered; None: no name is pruned
    kinds      types of chosen entries
    enters     whether to find directories to enter, too
    ends       the beginning and end of every name that is_chosen accepts
    """

    is_chosen: NameTest | None
    is_pruned: NameTest | None
    kinds: frozenset[int]
    enters: bool
    ends: NameEnds = ANY_ENDS


class MatchedEntries(NamedTuple):
    """Entries found in a directory.

    names   chosen entries that are not directories, in the order of the work; the first one is at the end
    dirs    directories that may be entered
    chosen  directories that are chosen
    is_all  whether the listing has ended
    untyped  candidates whose type is unknown because the stat failed, each with the errno
    """

    names: list[str]
    dirs: list[str]
    chosen: list[str]
    n_entries: int
    is_all: bool
    untyped: RefusedNames


def depth_in(upper: bytes) -> int:
    """Return the depth of a directory's entries."""
    return upper.count(b"/") + 2 if upper else 1


def filter_in(matcher: Matcher, upper: bytes) -> EntryFilter:
    """Return the filter for the entries that a selection finds in a directory."""
    depth = depth_in(upper)
    path = os.fsdecode(upper)
    kinds = kinds_of(matcher) if matcher.selects_depth(depth) else frozenset()
    return EntryFilter(
        matcher.names_in(path), matcher.pruned_in(path), kinds, matcher.selects_below(depth), matcher.ends
    )


def strip_filter_in(matcher: Matcher, upper: bytes) -> EntryFilter:
    """Return the filter for the entries to delete in a chosen directory: all that are not excluded."""
    return EntryFilter(None, matcher.pruned_in(os.fsdecode(upper)), ALL_KINDS, enters=True)


def read_window(
    kernel: Kernel, fd: Fd, entry_filter: EntryFilter, window: int | None, ends_at: float, *, by_inode: bool
) -> MatchedEntries:
    """Read the next entries of a directory.

    window   number of entries after which to stop; None: read all entries, even after `ends_at`
    ends_at  when to stop, by the monotonic clock
    Raises   OSError
    """
    names: list[str] = []
    inos: list[int] = []
    dirs: list[str] = []
    chosen: list[str] = []
    untyped: RefusedNames = []
    is_chosen = entry_filter.is_chosen
    n_entries = 0
    while (block := read_more(kernel, fd, *entry_filter.ends)) is not None:
        n_entries += block.n_seen
        if _OWN in block.text or entry_filter.is_pruned is not None:
            block = _without(block, entry_filter)
        if 0 in block.kinds:
            block, refused = _add_types(kernel, fd, block)
            untyped += (one for one in refused if entry_filter.enters or is_chosen is None or is_chosen(one[0]))
        files = _of_kinds(block, entry_filter.kinds)
        if is_chosen is not None:
            files = _filtered(files, [*map(is_chosen, files.names)])
        names += files.names
        if by_inode:
            inos += files.inos
        if DIRECTORY_KIND in block.kinds:
            dir_names = [name for name, kind in zip(block.names, block.kinds, strict=True) if kind == DIRECTORY_KIND]
            if entry_filter.enters:
                dirs += dir_names
            if DIRECTORY_KIND in entry_filter.kinds:
                chosen += dir_names if is_chosen is None else filter(is_chosen, dir_names)
        is_much = window is not None and len(names) + len(dirs) + len(chosen) >= window
        is_late = window is not None and n_entries >= _LEAST and time.monotonic() >= ends_at
        if is_much or is_late:
            break
    return MatchedEntries(in_order(names, inos, by_inode=by_inode), dirs, chosen, n_entries, block is None, untyped)


def _add_types(kernel: Kernel, fd: Fd, block: DirentBlock) -> tuple[DirentBlock, RefusedNames]:
    """Add missing types to a block by stat, and return the entries whose stat failed, except those that vanished."""
    unknown = [name for name, kind in zip(block.names, block.kinds, strict=True) if not kind]
    stats, refused = lstat_all(kernel, fd, unknown)
    kinds = {one.name: kind_of(one.st_mode) for one in stats}
    filled_kinds = [kind or kinds.get(name, 0) for name, kind in zip(block.names, block.kinds, strict=True)]
    failed = [one for one in refused if one[1] != errno.ENOENT]
    return _filtered(block._replace(kinds=filled_kinds), [kind != 0 for kind in filled_kinds]), failed


def _without(block: DirentBlock, entry_filter: EntryFilter) -> DirentBlock:
    """Return a block without the names of stores and pruned names."""
    is_pruned = entry_filter.is_pruned or (lambda _name: False)
    keeps = [not (is_pruned(name) or is_own(name)) for name in block.names]
    return _filtered(block, keeps)


def _of_kinds(block: DirentBlock, kinds: frozenset[int]) -> DirentBlock:
    """Return the entries of a block that have chosen types and are not directories."""
    if block.kinds.count(stat.S_IFREG >> 12) == len(block.kinds) and stat.S_IFREG >> 12 in kinds:
        return block
    return _filtered(block, [kind in kinds and kind != DIRECTORY_KIND for kind in block.kinds])


def _filtered(block: DirentBlock, keeps: list[bool]) -> DirentBlock:
    """Return a block with only the selected entries; its text is unchanged."""
    names, inos, kinds = compress(block.names, keeps), compress(block.inos, keeps), compress(block.kinds, keeps)
    return block._replace(names=list(names), inos=list(inos), kinds=list(kinds))


_FILES = ALL_KINDS - {DIRECTORY_KIND}
_NONE = SweepSums()
_ANY_INO: Mapping[str, int] = {}
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""The listed object is no longer a directory; links are not followed."""


def missing_counts(n: int, are_again: bool) -> SweepSums:
    """Return the counts for listed names that are missing. are_again: a worker was lost while it acted on them"""
    return SweepSums(n_vanished=n) if are_again else SweepSums(n_missing=n)


class Dirs(Enum):
    """The treatment of directories that are chosen themselves."""

    WHOLE = "taken with everything in them, and not entered"
    FIRST = "reported, then entered"
    LAST = "entered, then taken"
    STRIPPED = "everything in them is taken, and then they are taken"


class SweepStrategy(NamedTuple):
    """The settings of a sweep that depend on its filesystem and its action.

    window      number of directory entries that are read together; this limits the use of memory
    by_inode    act in the order of inode numbers
    is_at_once  a stat needs no request to a server
    mounts      mount points, as paths relative to the sweep's directory
    """

    dirs: Dirs
    window: int
    by_inode: bool
    is_at_once: bool
    mounts: tuple[bytes, ...]

    def is_hidden(self, upper: bytes) -> bool:
        """Whether a directory is a mount point, on the backing or the mounted side, or lies below one."""
        return any(upper == mount or upper.startswith(mount + b"/") for mount in self.mounts)

    def ends_at_limit(self) -> bool:
        """Whether the sweep may end at the limit of matches; if not, chosen directories must still be emptied."""
        return self.dirs is not Dirs.STRIPPED


class ChosenFiles(NamedTuple):
    """The names chosen now, their sizes if these were read, and chosen names that are left for later."""

    names: list[str]
    sizes: FileSizes
    later: list[str]


class Chooser:
    """Selects entries by stat, and counts those that can't be read."""

    def __init__(
        self,
        kernel: Kernel,
        root: BackingAndMount,
        matcher: Matcher,
        action: Action,
        strategy: SweepStrategy,
        tally: SliceCounts,
    ) -> None:
        self._kernel = kernel
        self._root = root
        self._matcher = matcher
        self._avoided: frozenset[Identified] = action.avoided
        self._kinds = kinds_of(matcher) & _FILES
        self._bounds = matcher.bounds.packed(self._kinds)
        self._every = StatBounds().packed(_FILES)
        self._strategy = strategy
        self._tally = tally

    def choose_files(
        self, upper: bytes, sides: BackingAndMount, names: list[str], n_bytes: int | None, *, strips: bool
    ) -> ChosenFiles:
        """Choose the files that match among names in a directory.

        n_bytes  limit on the total size of the files chosen now, but at least one is chosen; None: no limit
        strips   choose all files
        """
        names = self._without_mounts(upper, names)
        if n_bytes is None and (strips or not self._matcher.needs_stat):
            return ChosenFiles(names, FileSizes([], []), [])
        bounds, at_once = self._every if strips else self._bounds, self._strategy.is_at_once
        names, sizes, unsure = match_by_stat(self._kernel, sides.fd, names, bounds, needs_no_server=at_once)
        kinds, takes = (_FILES, lambda _st, _btime_ns: True) if strips else (self._kinds, self._matcher.matches_stat)
        stats = self._stat_names(upper, sides, unsure)
        stats = [one for one in stats if one.st_mode >> 12 in kinds and takes(one, one.btime_ns)]
        names += _names(stats)
        sizes.lengths.extend(one.st_size for one in stats)
        sizes.spaces.extend(map(_freed_bytes, stats))
        n = len(names) if n_bytes is None else _fitting(sizes.lengths, n_bytes)
        return ChosenFiles(names[:n], sizes.first(n), names[n:])

    def chooses_at_once(self) -> bool:
        """Whether files are chosen by stat, without requests to a server and without Python code."""
        return self._bounds is not None and self._matcher.needs_stat and self._strategy.is_at_once

    def unlink_files(self, upper: bytes, sides: BackingAndMount, names: list[str]) -> UnlinkedMatches:
        """Unlink those names whose stat matches. Requires that `chooses_at_once` returns True."""
        assert self._bounds is not None
        names = self._without_mounts(upper, names)
        return unlink_matching(self._kernel, sides.fd, sides.names_fd(), names, self._bounds)

    def choose_dirs(
        self, upper: bytes, sides: BackingAndMount, names: list[str], *, are_listed: bool = False
    ) -> list[str]:
        """Return the names of those subdirectories that match."""
        is_last = are_listed or not self._matcher.selects_below(depth_in(upper))
        if self._matcher.needs_stat or self._avoided:
            stats = self._stat_names(upper, sides, names, counts_mounts=is_last)
            dir_stats = self._matching(one for one in stats if stat.S_ISDIR(one.st_mode))
            names = _names(one for one in dir_stats if (one.st_dev, one.st_ino) not in self._avoided)
        if self._strategy.mounts:
            names = [name for name in names if not self._is_mounted(join_path(upper, os.fsencode(name)), is_last)]
        if self._matcher.needs_emptiness:
            names = [name for name in names if self._is_empty(upper, sides, name, is_last)]
        return names

    def is_chosen_still(self, fd: Fd) -> bool:
        """Whether an open directory would still be chosen, according to its stat."""
        born_ns = self._kernel.statx(fd, asks_server=self._matcher.needs_birth).btime_ns
        return self._matcher.matches_stat(self._kernel.fstat(fd), born_ns)

    def chosen_still(self, sides: BackingAndMount, names: list[str]) -> list[str]:
        """Return those of the directories chosen earlier that still match or can't be read."""
        if not self._matcher.needs_stat:
            return names
        stats, _refused = self._stat_all(sides, names)
        others = {one.name for one in stats if not self._matcher.matches_stat(one, one.btime_ns)}
        return [name for name in names if name not in others]

    def _stat_all(self, sides: BackingAndMount, names: Iterable[str]) -> tuple[list[StatxResult], RefusedNames]:
        asks_birth, at_once = self._matcher.needs_birth, self._strategy.is_at_once
        return lstat_all(self._kernel, sides.fd, names, needs_birth=asks_birth, needs_no_server=at_once)

    def choose(
        self,
        upper: bytes,
        sides: BackingAndMount,
        names: Sequence[str],
        inos: Mapping[str, int] = _ANY_INO,
        directories: frozenset[str] = frozenset(),
        *,
        are_again: bool,
    ) -> tuple[list[str], list[str]]:
        """Return the files and the directories that match among listed names, and count the other names.

        inos         the inode number that each name must have; names that are missing here may have any number
        directories  the names that were listed with a trailing slash
        are_again    see `missing_counts`
        """
        before, n_listed = self._tally.sums.n_not_chosen(), len(names)
        entry_filter = filter_in(self._matcher, upper)
        is_chosen, is_pruned = entry_filter.is_chosen, entry_filter.is_pruned
        names = [name for name in names if not is_own(name)]
        if is_chosen is not None:
            names = [name for name in names if is_chosen(name)]
        if is_pruned is not None:
            names = [name for name in names if not is_pruned(name)]
        chosen, others = list[str](), names
        if entry_filter.kinds and not inos:
            at_once = self._strategy.is_at_once
            chosen, _sizes, others = match_by_stat(self._kernel, sides.fd, names, self._bounds, needs_no_server=at_once)
            if DIRECTORY_KIND in entry_filter.kinds and len(chosen) + len(others) < len(names):
                chosen_set = frozenset(chosen)
                others = [name for name in names if name not in chosen_set]
        stats = self._stat_names(upper, sides, others, absent=missing_counts(1, are_again))
        self._tally.count(SweepSums(n_seen=len(names) - len(others) + len(stats)))
        if inos:
            stats = list(self._as_listed(upper, stats, inos))
        kinds = entry_filter.kinds - {DIRECTORY_KIND}
        files = [one for one in stats if one.st_mode >> 12 in kinds]
        dirs = (
            [one.name for one in stats if one.st_mode >> 12 == DIRECTORY_KIND]
            if DIRECTORY_KIND in entry_filter.kinds
            else []
        )
        if self._matcher.needs_stat:
            files = self._matching(files)
        chosen += _names(files)
        for name in filter(directories.__contains__, chosen):
            self._tally.fail(join_path(upper, os.fsencode(name) + b"/"), errno.ENOTDIR, "open")
        chosen = [name for name in chosen if name not in directories]
        dirs = self.choose_dirs(upper, sides, dirs, are_listed=True)
        n_counted = self._tally.sums.n_not_chosen() - before
        self._tally.count(SweepSums(n_unmatched=n_listed - len(chosen) - len(dirs) - n_counted))
        return chosen, dirs

    def _as_listed(self, upper: bytes, stats: Iterable[StatxResult], inos: Mapping[str, int]) -> Iterator[StatxResult]:
        """Yield entries that have the listed inode number; report the others."""
        for one in stats:
            if inos.get(one.name, one.st_ino) == one.st_ino:
                yield one
            else:
                self._tally.spare(join_path(upper, os.fsencode(one.name)), OTHER_INODE)

    def may_enter_path(self, upper: bytes) -> bool:
        """Whether the selection permits entering a directory that was not reached by a walk. Raises  OSError"""
        parts = upper.split(b"/") if upper else []
        for at, part in enumerate(parts):
            above, path = b"/".join(parts[:at]), b"/".join(parts[: at + 1])
            is_pruned = self._matcher.pruned_in(os.fsdecode(above))
            if is_store_name(part) or (is_pruned is not None and is_pruned(os.fsdecode(part))):
                return False
            if self._avoided:
                with self._kernel.open_beneath(self._root.fd, path) as fd:
                    identity = identify(self._kernel, fd)
                if identity in self._avoided:
                    return False
        return True

    def refuse(self, upper: bytes, refused: RefusedNames, *, counts_mounts: bool = True) -> None:
        """Count and report names that can't be read. counts_mounts: count mounts now, and not when they are entered"""
        for name, number in refused:
            if number == errno.EXDEV:
                self._tally.count(SweepSums(n_mounts=int(counts_mounts)))
            else:
                self._tally.fail(join_path(upper, os.fsencode(name)), number, "stat")

    def _matching(self, stats: Iterable[StatxResult]) -> list[StatxResult]:
        takes = self._matcher.matches_stat
        return [one for one in stats if takes(one, one.btime_ns)]

    def _stat_names(
        self,
        upper: bytes,
        sides: BackingAndMount,
        names: Sequence[str],
        *,
        absent: SweepSums = _NONE,
        counts_mounts: bool = True,
    ) -> list[StatxResult]:
        """Stat names, and return the existing ones.

        absent         the counts to add for each missing name
        counts_mounts  see `refuse`
        """
        if not names:
            return []
        stats, refused = self._stat_all(sides, names)
        failed = [one for one in refused if one[1] != errno.ENOENT]
        for _name in range(len(refused) - len(failed)):
            self._tally.count(absent)
        self.refuse(upper, failed, counts_mounts=counts_mounts)
        return stats

    def _without_mounts(self, upper: bytes, names: list[str]) -> list[str]:
        """Return the names that are not mount points, and count the others."""
        if not self._strategy.mounts:
            return names
        free = [name for name in names if join_path(upper, os.fsencode(name)) not in self._strategy.mounts]
        self._tally.count(SweepSums(n_mounts=len(names) - len(free)))
        return free

    def _is_mounted(self, path: bytes, is_last: bool) -> bool:
        """Whether a directory is a mount point, or would be taken with one inside. is_last: count it now"""
        if path in self._strategy.mounts:
            self._tally.count(SweepSums(n_mounts=int(is_last)))
            return True
        holds = self._strategy.dirs is Dirs.WHOLE and any(
            mount.startswith(path + b"/") for mount in self._strategy.mounts
        )
        if holds:
            self._tally.spare(path, "it contains a mount point")
        return holds

    def _is_empty(self, upper: bytes, sides: BackingAndMount, name: str, is_last: bool) -> bool:
        """Whether a directory is empty. is_last: it will not be entered, so report errors now"""
        try:
            with self._kernel.open_dir(sides.fd, os.fsencode(name)) as fd:
                return self._kernel.is_empty(fd)
        except OSError as error:
            if error.errno == errno.EXDEV:
                self._tally.count(SweepSums(n_mounts=int(is_last)))
            elif error.errno not in GONE and (is_last or error.errno != errno.EACCES):
                self._tally.fail(join_path(upper, os.fsencode(name)), error.errno, "open")
            return False


def _names(stats: Iterable[StatxResult]) -> list[str]:
    return [one.name for one in stats]


def _freed_bytes(one: StatxResult) -> int:
    return one.st_blocks * STAT_BLOCK_BYTES if one.st_nlink == 1 else 0


def _fitting(lengths: Sequence[int], n_bytes: int) -> int:
    """Return how many of the first lengths fit into n_bytes; the result is at least 1."""
    for at, length in enumerate(lengths):
        n_bytes -= length
        if n_bytes <= 0:
            return at + 1
    return len(lengths)
