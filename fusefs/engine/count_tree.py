"""Measure the space that a container's tree occupies: ask the filesystem, or walk the tree without changing it (I6).

The use of memory and fds is bounded for trees of every shape. The walk counts a directory's files in listing order. It
remembers only a limited number of subdirectories, in the order of their keys, which is also the order of the inodes on
disk. For the other subdirectories, it reads the listing again.

The walk opens every entry (O_PATH, never across a mount) and stats the fd. A stat by name would query any filesystem
that the owner has mounted on the entry, even on a file, and could wait for its reply without reacting to SIGKILL.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest

from fusefs.core.names import Name
from fusefs.core.orphan_sums import INLINE_MAX_BYTES, MeasuredSize, Survey, space_of_file
from fusefs.core.record import TreeSize
from fusefs.core.results import Progress, ShouldStop
from fusefs.linux.disk_usage import may_share, reported_size, reports_sharing, shared_bytes
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, Kernel
from fusefs.store.layout import HOISTED, TREE
from fusefs.store.walk import Descent

WINDOW = 32_768
"""Maximum number of subdirectories remembered for one directory; twice as many are remembered in total."""
_LEVELS_MAX = 100_000
_PATH_MAX_BYTES = 16 << 20
_LINKS_MAX = 100_000
_PROGRESS_EVERY = 1000

Key = tuple[int, bytes]
"""The d_ino and name of a subdirectory; sorting by these gives the same order for every listing."""


def survey(
    kernel: Kernel,
    container: Fd,
    progress: Progress = lambda _entries, _bytes: None,
    *,
    with_shared: bool = False,
    stops: ShouldStop = lambda: False,
    pauses: Callable[[], None] = lambda: None,
) -> Survey:
    """Count the contents of a container's `tree` and `hoisted`. Must be called as the container's owner.

    progress     called about every thousand entries, with the numbers of entries and bytes since the last call
    with_shared  query which blocks of each file are shared with snapshots or reflinks; this costs an open and an ioctl
                 per file, and is done only on filesystems that can share blocks
    stops        called as often as progress; once it returns True, the walk ends and returns the counts so far
    pauses       called before each entry is opened; may block
    An entry that can't be read causes no error, but is counted as failed.
    """
    with Descent(kernel, container) as descent:
        return _CountingWalk(
            kernel, descent, progress, stops, pauses, _TreeCount(kernel, container, with_shared)
        ).count()


@dataclass(slots=True)
class _WalkLevel:
    """A directory to which the walk must return.

    mark, dev, ino  its position, and its identity at the time it was read
    keys            subdirectories still to be entered, in reverse order
    last            the subdirectory entered most recently
    is_cut          whether there are, or may be, subdirectories that are not in `keys`
    """

    mark: int
    dev: int
    ino: int
    keys: list[Key]
    last: Key | None
    is_cut: bool


class _CountingWalk:
    """A single walk; it holds the unfinished directories on the current path."""

    def __init__(
        self,
        kernel: Kernel,
        descent: Descent,
        progress: Progress,
        stops: ShouldStop,
        pauses: Callable[[], None],
        tally: _TreeCount,
    ) -> None:
        self._kernel = kernel
        self._descent = descent
        self._progress = progress
        self._stops = stops
        self._pauses = pauses
        self._is_stopped = False
        self._tally = tally
        self._reported = (0, 0)
        self._lists_types = kernel.lists_types(descent.fd)
        self._levels: list[_WalkLevel] = []
        self._n_keys = 0

    def count(self) -> Survey:
        for top in (HOISTED, TREE):
            self._descent.go_back(0)
            if top is HOISTED or self._stat_entry(top, counts=True):
                self._remember([(0, top)], None, is_cut=False)
                self._walk()
        self._report()
        return self._tally.survey()

    def _walk(self) -> None:
        while self._levels and not self._is_stopped:
            level = self._levels[-1]
            if not self._is_back(level):
                self._levels.pop()
                self._n_keys -= len(level.keys)
            elif level.keys:
                self._enter(level)
            else:
                self._levels.pop()
                self._read(after=level.last)

    def _is_back(self, level: _WalkLevel) -> bool:
        """Move back to a directory, and return whether it is still there."""
        if self._descent.mark == level.mark:
            return True
        try:
            self._descent.go_back(level.mark)
            st = self._kernel.fstat(self._descent.fd)
        except OSError:
            pass
        else:
            if (st.st_dev, st.st_ino) == (level.dev, level.ino):
                return True
        self._tally.n_failed += 1
        return False

    def _enter(self, level: _WalkLevel) -> None:
        """Enter the next subdirectory of a level, and drop the level if no other subdirectory remains."""
        level.last = level.keys.pop()
        self._n_keys -= 1
        if not level.keys and not level.is_cut:
            self._levels.pop()
        if level.mark > _PATH_MAX_BYTES:
            self._tally.n_failed += 1
            return
        try:
            self._descent.descend(Name(level.last[1]))
        except FileNotFoundError:
            return
        except OSError:
            self._tally.n_failed += 1
            return
        self._read(after=None)

    def _read(self, after: Key | None) -> None:
        """Read the current directory: find the subdirectories after a key or, without a key, count all entries, too."""
        keys = nsmallest(WINDOW + 1, self._subdirectories(after))
        if keys:
            is_cut = len(keys) > WINDOW
            self._remember(keys[WINDOW - 1 :: -1], after, is_cut=is_cut)

    def _subdirectories(self, after: Key | None) -> Iterator[Key]:
        """Yield the subdirectories after a key, in any order. Without a key, yield them all, and count all entries."""
        try:
            with self._kernel.scan(self._descent.fd) as entries:
                for entry in entries:
                    if self._is_stopped:
                        return
                    key = entry.inode(), os.fsencode(entry.name)
                    if after is None:
                        is_subdirectory = self._stat_entry(Name(key[1]), counts=True)
                    elif self._lists_types:
                        is_subdirectory = key > after and entry.is_dir(follow_symlinks=False)
                    else:
                        is_subdirectory = key > after and self._stat_entry(Name(key[1]), counts=False)
                    if is_subdirectory:
                        yield key
        except OSError:
            self._tally.n_failed += 1

    def _stat_entry(self, name: Name, *, counts: bool) -> bool:
        self._pauses()
        is_directory = self._tally.stat_entry(self._descent.fd, name, counts=counts)
        if counts and self._tally.n_entries - self._reported[0] >= _PROGRESS_EVERY:
            self._report()
        return is_directory

    def _remember(self, keys: list[Key], last: Key | None, *, is_cut: bool) -> None:
        try:
            st = self._kernel.fstat(self._descent.fd)
        except OSError:
            self._tally.n_failed += 1
            return
        if len(self._levels) >= _LEVELS_MAX:
            self._tally.n_failed += len(keys)
            return
        self._levels.append(_WalkLevel(self._descent.mark, st.st_dev, st.st_ino, keys, last, is_cut))
        self._n_keys += len(keys)
        if self._n_keys > 2 * WINDOW:
            self._forget()

    def _forget(self) -> None:
        """Free memory: drop the keys of directories high up on the path; their listings will be read again."""
        for level in self._levels[:-1]:
            if self._n_keys <= WINDOW:
                return
            if level.keys:
                self._n_keys -= len(level.keys)
                level.keys = []
                level.is_cut = True

    def _report(self) -> None:
        n_entries, n_bytes = self._reported
        self._reported = self._tally.n_entries, self._tally.n_bytes
        self._progress(self._reported[0] - n_entries, self._reported[1] - n_bytes)
        self._is_stopped = self._stops()


class _TreeCount:
    """The totals of the entries counted so far."""

    def __init__(self, kernel: Kernel, container: Fd, with_shared: bool) -> None:
        magic = kernel.filesystem(container)
        self._kernel = kernel
        self._with_shared = with_shared and may_share(magic)
        self._inline_max = INLINE_MAX_BYTES if magic == BTRFS_MAGIC else 0
        self._links: dict[int, tuple[int, int]] = {}  # inode → number of names not yet encountered, bytes
        self._shared = 0
        self._n_spare_names = 0
        self._is_at_least = False
        self.n_entries = 0
        self.n_bytes = 0
        self.n_failed = 0

    def survey(self) -> Survey:
        linked = sum(n_bytes for _n_names, n_bytes in self._links.values())
        n_spare_names = self._n_spare_names + len(self._links)
        return Survey(
            self.n_entries, self.n_bytes, linked, self._shared, self.n_failed, self._is_at_least, n_spare_names
        )

    def stat_entry(self, parent: Fd, name: Name, *, counts: bool) -> bool:
        """Stat an entry, count it if requested, and return whether it is a directory."""
        try:
            st = self._kernel.stat(parent, name)
        except FileNotFoundError:
            return False
        except OSError:
            self.n_entries += counts
            self.n_failed += counts
            return False
        if counts and self._count(st) and self._with_shared and stat.S_ISREG(st.st_mode) and st.st_blocks:
            self._count_shared(parent, name, st)
        return stat.S_ISDIR(st.st_mode)

    def _count_shared(self, parent: Fd, name: Name, st: os.stat_result) -> None:
        try:
            with self._kernel.open_beneath(parent, name) as fd:
                # Open only regular files for reading: opening a tape device would rewind it.
                if os.path.samestat(self._kernel.fstat(fd), st):
                    self._shared += min(shared_bytes(self._kernel, fd), self._bytes_of(st))
        except OSError:
            self._shared += self._bytes_of(st)  # it is not known how much is shared: assume all of it

    def _bytes_of(self, st: os.stat_result) -> int:
        inline_max = self._inline_max if stat.S_ISREG(st.st_mode) else 0
        return space_of_file(st.st_size, st.st_blocks, st.st_blksize, inline_max)

    def _count(self, st: os.stat_result) -> bool:
        """Count an entry, and return whether its inode is new."""
        self.n_entries += 1
        n_bytes = self._bytes_of(st)
        if st.st_nlink <= 1 or stat.S_ISDIR(st.st_mode):
            self.n_bytes += n_bytes
            return True
        inode = st.st_dev << 64 | st.st_ino
        if inode in self._links:
            n_names, _ = self._links.pop(inode)
            if n_names > 1:
                self._links[inode] = n_names - 1, n_bytes
            self._n_spare_names += 1
            return False
        if len(self._links) >= _LINKS_MAX:
            self._is_at_least = True
            self._n_spare_names += 1
            self.n_bytes += n_bytes // st.st_nlink
            return True
        self._links[inode] = st.st_nlink - 1, n_bytes
        self.n_bytes += n_bytes
        return True


_READABLE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK


def measure_tree(
    kernel: Kernel,
    container: Fd,
    *,
    walks: bool,
    pauses: Callable[[], None] = lambda: None,
    stops: ShouldStop = lambda: False,
) -> MeasuredSize:
    """Measure a container's tree: ask the filesystem, or else walk the tree. Must be called as its owner.

    container  open for reading
    walks   whether to walk the tree if the filesystem does not record its size
    pauses, stops  called during the walk, see `survey`
    Raises  OSError if the container itself can't be read
    """
    with suppress(OSError), kernel.open_beneath(container, TREE, _READABLE) as tree:
        fs_size = None if HOISTED in kernel.list(container) else reported_size(kernel, tree)
        if fs_size is not None:
            return MeasuredSize(fs_size)
    if not walks:
        return MeasuredSize(None)
    counts = survey(kernel, container, with_shared=True, stops=stops, pauses=pauses)
    is_stopped = stops()
    return MeasuredSize(size_of(kernel, container, counts, is_stopped=is_stopped), counts.n_failed, is_stopped)


def size_of(kernel: Kernel, container: Fd, counts: Survey, *, is_stopped: bool = False) -> TreeSize:
    """Convert counts, with the shared blocks, to the size stored in a record."""
    shared = counts.shared_bytes if reports_sharing(kernel.filesystem(container)) else None
    is_at_least = counts.is_at_least or counts.n_failed > 0 or is_stopped
    return TreeSize(
        counts.n_entries, counts.n_bytes, counts.linked_bytes, shared, is_at_least, "count", kernel.now_ns()
    )  # fmt: skip
