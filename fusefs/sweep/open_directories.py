"""The directories that a rule's pattern means, opened without following anything that others can change.

A rule may be run by root, in trees of others. So the way is gone name by name, by fds: a link is followed only where
only root and ourselves can have put it, and what a user has mounted is not entered.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from fusefs.core.errors import NotFound, Refused
from fusefs.core.glob import compile_glob
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, read_mounts
from fusefs.linux.untrusted_path import is_trusted_link, link_target
from fusefs.store.layout import is_stores_own
from fusefs.store.walk import SeenDirectories, whose_is

_LINKS_MAX = 40
_WILD = frozenset(b"*?[\\")


class MeantDirectory(NamedTuple):
    """A directory that a pattern means.

    path   absolute, links resolved
    fd     itself (O_PATH): as long as it is open, nothing else has its inode number
    whose  to root who came to it (store.walk); None: the way led from one user's directory into another's
    """

    path: bytes
    fd: Fd
    whose: int | None = 0


class PassedDirectory(NamedTuple):
    """What a pattern means and is not entered, and why."""

    path: bytes
    why: str


FoundDirectory = MeantDirectory | PassedDirectory
"""What a search comes to."""


class _WildComponent(NamedTuple):
    """A component with wildcards."""

    text: str
    matches: Callable[[str], bool]


_Part = bytes | _WildComponent


def has_wildcards(pattern: bytes) -> bool:
    """Whether it may mean several directories, or none."""
    return bool(_WILD & set(pattern))


def find_directories(
    kernel: Kernel, pattern: bytes, mounts: Sequence[Mount] | None = None, seen: SeenDirectories | None = None
) -> Generator[FoundDirectory, None, None]:
    """The directories of an absolute pattern, sorted; each is open until the next is asked for.

    mounts  if they were read just now
    seen    of another user's directory in a user's: those that were there before
    As in a shell a wildcard stands for no slash, nor for a dot at the beginning of a name. What it finds and is no
    directory, a link too, is not told; nor is a store.
    """
    parts: list[_Part] = [_part(name) for name in pattern.split(b"/") if name]
    with kernel.open_path(b"/") as root:
        search = _PatternSearch(kernel, root, read_mounts() if mounts is None else mounts, seen)
        yield from search.below(root, b"/", parts, _LINKS_MAX, 0)


@contextmanager
def found_directory(kernel: Kernel, path: bytes, mounts: Sequence[Mount] | None = None) -> Iterator[MeantDirectory]:
    """The directory at a path that was typed, by the same way. mounts: as for `find_directories`

    Raises  Refused: a link on it is another user's, who may have mounted something on it, or it leads to no directory;
            NotFound
    """
    absolute = os.path.normpath(os.path.join(os.getcwdb(), path))
    search = find_directories(kernel, _as_it_is(absolute), mounts)
    try:
        found = next(search, None)
        if found is None:
            raise NotFound(path)
        if isinstance(found, PassedDirectory):
            raise Refused(f"{printable(found.path)}: {found.why}")
        yield found
    finally:
        search.close()


def _as_it_is(path: bytes) -> bytes:
    """The pattern that means one path."""
    return b"".join(b"\\" + bytes((byte,)) if byte in _WILD else bytes((byte,)) for byte in path)


def _part(name: bytes) -> _Part:
    text = os.fsdecode(name)
    return _WildComponent(text, compile_glob(text)) if _WILD.intersection(name) else name


def _open(directory: Fd, name: bytes) -> Fd:
    """What has a name; a directory that is mounted when it is wanted (autofs) is mounted.

    Not beneath: each of a pattern's directories may be a mount of its own.
    """
    way = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return Fd(os.open(name, way | os.O_DIRECTORY, dir_fd=directory))
    except NotADirectoryError:
        return Fd(os.open(name, way, dir_fd=directory))


class _PatternSearch:
    """One pattern's way from the root."""

    def __init__(self, kernel: Kernel, root: Fd, mounts: Sequence[Mount], seen: SeenDirectories | None) -> None:
        self._kernel = kernel
        self._root = root
        self._seen = seen
        self._ours = (0, os.geteuid())
        self._foreign = {mount.mnt_id: mount.owner for mount in mounts if mount.owner not in self._ours}

    def below(
        self, fd: Fd, path: bytes, parts: Sequence[_Part], n_links: int, whose: int | None
    ) -> Iterator[FoundDirectory]:
        """What the rest of a pattern means below a directory. n_links: how many may still be followed"""
        match parts:
            case []:
                yield MeantDirectory(path, fd, whose)
            case [_WildComponent() as wild, *rest]:
                try:
                    names = self._matches(fd, wild)
                except OSError as error:
                    yield PassedDirectory(path, f"it can't be listed: {error.strerror}")
                    return
                for name in names:
                    yield from self._enter(fd, path, name, rest, n_links, whose, is_named=False)
            case [bytes() as name, *rest]:
                yield from self._enter(fd, path, name, rest, n_links, whose, is_named=True)

    def _matches(self, fd: Fd, wild: _WildComponent) -> list[bytes]:
        """The names in a directory that a wildcard stands for."""
        with self._kernel.reopen(fd, os.O_RDONLY | os.O_DIRECTORY) as listed:
            names = self._kernel.list(listed)
        hidden = not wild.text.startswith(".")
        seen = [name for name in names if not (hidden and name.startswith(b".")) and not is_stores_own(name)]
        return [name for name in seen if wild.matches(os.fsdecode(name))]

    def _enter(
        self,
        fd: Fd,
        path: bytes,
        name: bytes,
        rest: Sequence[_Part],
        n_links: int,
        whose: int | None,
        *,
        is_named: bool,
    ) -> Iterator[FoundDirectory]:
        """Go on in what has a name. is_named: the pattern says it, so that it is told why not"""
        there = os.path.join(path, name)
        if is_stores_own(name):
            yield PassedDirectory(there, "it is a trash store")
            return
        try:
            inner = _open(fd, name)
        except OSError as error:
            if is_named:
                yield PassedDirectory(there, error.strerror or "it can't be opened")
            return
        with inner:
            # Before anything is asked of it: a user's filesystem may never answer.
            mounter = self._foreign.get(self._kernel.statx(inner).mnt_id)
            if mounter is not None:
                yield PassedDirectory(there, f"uid {mounter} mounted it")
                return
            st = self._kernel.fstat(inner)
            if stat.S_ISDIR(st.st_mode):
                if whose is not None:
                    whose = whose_is(self._kernel, inner, whose, self._seen)
                yield from self.below(inner, there, rest, n_links, whose)
            elif stat.S_ISLNK(st.st_mode) and is_named:
                yield from self._follow(fd, path, name, st, rest, n_links)
            elif is_named:
                yield PassedDirectory(there, "it is not a directory")

    def _follow(
        self, fd: Fd, path: bytes, name: bytes, link: os.stat_result, rest: Sequence[_Part], n_links: int
    ) -> Iterator[FoundDirectory]:
        """Go where a link leads."""
        there = os.path.join(path, name)
        if not n_links:
            yield PassedDirectory(there, "too many symbolic links")
            return
        if not is_trusted_link(self._kernel.fstat(fd), link, self._ours):
            yield PassedDirectory(there, "a symbolic link that other users can change is not followed")
            return
        target = link_target(path, os.readlink(name, dir_fd=fd))
        if target is None:
            yield PassedDirectory(there, "a symbolic link with `..` after a name is not followed")
            return
        base, names = target
        way = [part for part in base.split(b"/") if part]
        yield from self.below(self._root, b"/", [*way, *names, *rest], n_links - 1, 0)
