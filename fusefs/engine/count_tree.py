"""What a container's tree takes: by its filesystem's word, else counted, by a walk that changes nothing (I6).

Whatever the shape, memory and fds are bounded. A directory's files are looked at as the listing tells them; of its
subdirectories only so many are remembered as have room, in the order of their keys, and the listing is read again
for those beyond. The order is also the one in which inodes lie on the disk.

Every entry is opened (O_PATH, never across a mount) before it is asked: a stat by name would ask a filesystem that
the owner has mounted on it, also on a file, and wait for its answer beyond SIGKILL.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest

from fusefs.core.names import Name
from fusefs.core.orphan_sums import INLINE_MAX_BYTES, AskedSize, Survey, taken_bytes
from fusefs.core.record import TreeSize
from fusefs.core.results import Progress, Stops
from fusefs.linux.disk_usage import known_size, may_share, never_shares, shared_bytes, tells_sharing
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, Kernel
from fusefs.store.layout import HOISTED, TREE
from fusefs.store.walk import Descent

WINDOW = 32_768
"""Subdirectories of one directory that are remembered at a time; twice as many in all."""
_LEVELS_MAX = 100_000
_PATH_MAX_BYTES = 16 << 20
_LINKS_MAX = 100_000
_PROGRESS_EVERY = 1000

Key = tuple[int, bytes]
"""d_ino and name of a subdirectory: an order that lasts from one listing to the next."""


def survey(
    kernel: Kernel,
    container: Fd,
    progress: Progress = lambda _entries, _bytes: None,
    *,
    with_shared: bool = False,
    stops: Stops = lambda: False,
    pauses: Callable[[], None] = lambda: None,
) -> Survey:
    """Count what `tree` and `hoisted` of a container hold; to be run as its owner.

    progress     told the entries and bytes found, about every thousand
    with_shared  ask each file which of its blocks snapshots or reflinks share: an open and an ioctl a file, only on
                 filesystems that can share
    stops        asked as often: after a yes it returns what was counted by then
    pauses       called before each entry is looked at: it may wait
    Raises       nothing for an entry: what can't be looked at is counted
    """
    with Descent(kernel, container) as way:
        return _CountingWalk(kernel, way, progress, stops, pauses, _TreeCount(kernel, container, with_shared)).run()


@dataclass(slots=True)
class _WalkLevel:
    """A directory that we must come back to.

    mark, dev, ino  where it is, and what it was
    keys            subdirectories to go into, the first one last
    last            the one that we went into last
    is_cut          there are, or may be, more than `keys`
    """

    mark: int
    dev: int
    ino: int
    keys: list[Key]
    last: Key | None
    is_cut: bool


class _CountingWalk:
    """One walk: the directories on our way that we are not done with."""

    def __init__(
        self,
        kernel: Kernel,
        way: Descent,
        progress: Progress,
        stops: Stops,
        pauses: Callable[[], None],
        tally: _TreeCount,
    ) -> None:
        self._kernel = kernel
        self._way = way
        self._progress = progress
        self._stops = stops
        self._pauses = pauses
        self._is_stopped = False
        self._tally = tally
        self._told = (0, 0)
        self._tells_types = kernel.tells_types(way.fd)
        self._levels: list[_WalkLevel] = []
        self._n_keys = 0

    def run(self) -> Survey:
        for top in (HOISTED, TREE):
            self._way.go_back(0)
            if top is HOISTED or self._look(top, counts=True):
                self._remember([(0, top)], None, is_cut=False)
                self._walk()
        self._tell()
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
        """Go back to a directory, if it still is where it was."""
        if self._way.mark == level.mark:
            return True
        try:
            self._way.go_back(level.mark)
            st = self._kernel.fstat(self._way.fd)
        except OSError:
            pass
        else:
            if (st.st_dev, st.st_ino) == (level.dev, level.ino):
                return True
        self._tally.n_failed += 1
        return False

    def _enter(self, level: _WalkLevel) -> None:
        """Go into the next subdirectory; a directory whose last one this is needs no coming back to."""
        level.last = level.keys.pop()
        self._n_keys -= 1
        if not level.keys and not level.is_cut:
            self._levels.pop()
        if level.mark > _PATH_MAX_BYTES:
            self._tally.n_failed += 1
            return
        try:
            self._way.descend(Name(level.last[1]))
        except FileNotFoundError:
            return
        except OSError:
            self._tally.n_failed += 1
            return
        self._read(after=None)

    def _read(self, after: Key | None) -> None:
        """Look at all entries of the directory where we are, or only for the subdirectories after one."""
        keys = nsmallest(WINDOW + 1, self._subdirectories(after))
        if keys:
            is_cut = len(keys) > WINDOW
            self._remember(keys[WINDOW - 1 :: -1], after, is_cut=is_cut)

    def _subdirectories(self, after: Key | None) -> Iterator[Key]:
        """The subdirectories after one, in any order; the first time (after none) everything is counted."""
        try:
            with self._kernel.scan(self._way.fd) as entries:
                for entry in entries:
                    if self._is_stopped:
                        return
                    key = entry.inode(), os.fsencode(entry.name)
                    if after is None:
                        is_wanted = self._look(Name(key[1]), counts=True)
                    elif self._tells_types:
                        is_wanted = key > after and entry.is_dir(follow_symlinks=False)
                    else:
                        is_wanted = key > after and self._look(Name(key[1]), counts=False)
                    if is_wanted:
                        yield key
        except OSError:
            self._tally.n_failed += 1

    def _look(self, name: Name, *, counts: bool) -> bool:
        """Look at an entry; whether it is a directory."""
        self._pauses()
        is_directory = self._tally.look(self._way.fd, name, counts=counts)
        if counts and self._tally.n_entries - self._told[0] >= _PROGRESS_EVERY:
            self._tell()
        return is_directory

    def _remember(self, keys: list[Key], last: Key | None, *, is_cut: bool) -> None:
        try:
            st = self._kernel.fstat(self._way.fd)
        except OSError:
            self._tally.n_failed += 1
            return
        if len(self._levels) >= _LEVELS_MAX:
            self._tally.n_failed += len(keys)
            return
        self._levels.append(_WalkLevel(self._way.mark, st.st_dev, st.st_ino, keys, last, is_cut))
        self._n_keys += len(keys)
        if self._n_keys > 2 * WINDOW:
            self._forget()

    def _forget(self) -> None:
        """Make room: drop the keys of directories far up; they will be read again."""
        for level in self._levels[:-1]:
            if self._n_keys <= WINDOW:
                return
            if level.keys:
                self._n_keys -= len(level.keys)
                level.keys = []
                level.is_cut = True

    def _tell(self) -> None:
        n_entries, n_bytes = self._told
        self._told = self._tally.n_entries, self._tally.n_bytes
        self._progress(self._told[0] - n_entries, self._told[1] - n_bytes)
        self._is_stopped = self._stops()


class _TreeCount:
    """What was found so far."""

    def __init__(self, kernel: Kernel, container: Fd, with_shared: bool) -> None:
        magic = kernel.filesystem(container)
        self._kernel = kernel
        self._with_shared = with_shared and may_share(magic)
        self._inline_max = INLINE_MAX_BYTES if magic == BTRFS_MAGIC else 0
        self._links: dict[int, tuple[int, int]] = {}  # inode → names not seen yet, bytes
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

    def look(self, parent: Fd, name: Name, *, counts: bool) -> bool:
        """Look at an entry, and count it or not; whether it is a directory."""
        try:
            st = self._kernel.stat(parent, name)
        except FileNotFoundError:
            return False
        except OSError:
            self.n_entries += counts
            self.n_failed += counts
            return False
        if counts and self._count(st) and self._with_shared and stat.S_ISREG(st.st_mode) and st.st_blocks:
            self._look_for_shared(parent, name, st)
        return stat.S_ISDIR(st.st_mode)

    def _look_for_shared(self, parent: Fd, name: Name, st: os.stat_result) -> None:
        try:
            with self._kernel.open_beneath(parent, name) as fd:
                # Only a regular file may be opened for reading: a tape would rewind.
                if os.path.samestat(self._kernel.fstat(fd), st):
                    self._shared += min(shared_bytes(self._kernel, fd), self._bytes_of(st))
        except OSError:
            self._shared += self._bytes_of(st)  # it can't be asked: at most all of it

    def _bytes_of(self, st: os.stat_result) -> int:
        inline_max = self._inline_max if stat.S_ISREG(st.st_mode) else 0
        return taken_bytes(st.st_size, st.st_blocks, st.st_blksize, inline_max)

    def _count(self, st: os.stat_result) -> bool:
        """Count an entry; whether its inode is new."""
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


def ask_size(
    kernel: Kernel,
    container: Fd,
    *,
    walks: bool,
    pauses: Callable[[], None] = lambda: None,
    stops: Stops = lambda: False,
) -> AskedSize:
    """Ask for it; to be run as the container's owner.

    container  open for reading
    walks   whether it is counted where the filesystem doesn't know it
    pauses, stops  of that, as for `survey`
    Raises  OSError of the container itself
    """
    with suppress(OSError), kernel.open_beneath(container, TREE, _READABLE) as tree:
        known = None if HOISTED in kernel.list(container) else known_size(kernel, tree)
        if known is not None:
            return AskedSize(known)
    if not walks:
        return AskedSize(None)
    seen = survey(kernel, container, with_shared=True, stops=stops, pauses=pauses)
    is_stopped = stops()
    return AskedSize(size_of(kernel, container, seen, is_stopped=is_stopped), seen.n_failed, is_stopped)


def size_of(
    kernel: Kernel, container: Fd, seen: Survey, *, with_shared: bool = True, is_stopped: bool = False
) -> TreeSize:
    """What was counted, as a record has it. with_shared: as `survey` was asked"""
    magic = kernel.filesystem(container)
    knows = tells_sharing(magic) if with_shared else never_shares(magic)
    shared = seen.shared_bytes if knows else None
    is_at_least = seen.is_at_least or seen.n_failed > 0 or is_stopped
    return TreeSize(
        seen.n_entries, seen.n_bytes, seen.linked_bytes, shared, is_at_least, "count", kernel.now_ns()
    )  # fmt: skip
