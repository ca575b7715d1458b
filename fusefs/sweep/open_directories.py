"""Open the directories that match a rule's pattern, without following anything that other users can change.

Root may run a rule in other users' trees. Therefore the search opens each component by fd. It follows a link only if
nobody except root and our own user can have created it, and does not enter users' mounts.
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
from fusefs.store.layout import is_store_name
from fusefs.store.walk import SeenDirectories, attribute_directory

_LINKS_MAX = 40
_WILD = frozenset(b"*?[\\")


class MatchedDirectory(NamedTuple):
    """A directory that matches a pattern.

    path   absolute, with links resolved
    fd     the directory (O_PATH); while it is open, no other file has its inode number
    whose  the owner of its content as root sees it (store.walk); None: the path leads from one user's directory into
           another's
    """

    path: bytes
    fd: Fd
    whose: int | None = 0


class SkippedDirectory(NamedTuple):
    """A path that matches a pattern but is not entered, and the reason."""

    path: bytes
    why: str


SearchResult = MatchedDirectory | SkippedDirectory


class _WildComponent(NamedTuple):
    text: str
    matches: Callable[[str], bool]


_Part = bytes | _WildComponent


def has_wildcards(pattern: bytes) -> bool:
    """Whether a pattern has wildcards, so that it may match any number of directories."""
    return bool(_WILD & set(pattern))


def find_directories(
    kernel: Kernel,
    pattern: bytes,
    mounts: Sequence[Mount] | None = None,
    seen_directories: SeenDirectories | None = None,
) -> Generator[SearchResult, None, None]:
    """Yield the directories that match an absolute pattern, sorted; each is open until the next one is requested.

    mounts            the mounts, if they have just been read
    seen_directories  directories of one user inside another's that an earlier run has seen
    As in a shell, a wildcard matches neither a slash nor a dot at the beginning of a name. If a wildcard matches stores
    or entries that are not directories (such as links), they are silently skipped.
    """
    parts: list[_Part] = [_part(name) for name in pattern.split(b"/") if name]
    with kernel.open_path(b"/") as root:
        search = _PatternSearch(kernel, root, read_mounts() if mounts is None else mounts, seen_directories)
        yield from search.below(root, b"/", parts, _LINKS_MAX, 0)


@contextmanager
def open_directory(kernel: Kernel, path: bytes, mounts: Sequence[Mount] | None = None) -> Iterator[MatchedDirectory]:
    """Open the directory at a path from the command line, with the same checks as `find_directories`.

    Raises  Refused: the path has another user's link or mount, or does not lead to a directory; NotFound
    """
    absolute = os.path.abspath(path)
    search = find_directories(kernel, _escape_pattern(absolute), mounts)
    try:
        result = next(search, None)
        if result is None:
            raise NotFound(path)
        if isinstance(result, SkippedDirectory):
            raise Refused(f"{printable(result.path)}: {result.why}")
        yield result
    finally:
        search.close()


def _escape_pattern(path: bytes) -> bytes:
    """Return a pattern that matches exactly one path."""
    return b"".join(b"\\" + bytes((byte,)) if byte in _WILD else bytes((byte,)) for byte in path)


def _part(name: bytes) -> _Part:
    text = os.fsdecode(name)
    return _WildComponent(text, compile_glob(text)) if _WILD.intersection(name) else name


def _open(directory: Fd, name: bytes) -> Fd:
    """Open a name; this triggers an automount (autofs).

    Mount points are crossed, because each directory of a pattern may be a separate mount.
    """
    way = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return Fd(os.open(name, way | os.O_DIRECTORY, dir_fd=directory))
    except NotADirectoryError:
        return Fd(os.open(name, way, dir_fd=directory))


class _PatternSearch:
    """The search for one pattern from the root directory."""

    def __init__(
        self, kernel: Kernel, root: Fd, mounts: Sequence[Mount], seen_directories: SeenDirectories | None
    ) -> None:
        self._kernel = kernel
        self._root = root
        self._seen_directories = seen_directories
        self._ours = (0, os.geteuid())
        self._foreign = {mount.mnt_id: mount.owner for mount in mounts if mount.owner not in self._ours}

    def below(
        self, fd: Fd, path: bytes, parts: Sequence[_Part], n_links: int, whose: int | None
    ) -> Iterator[SearchResult]:
        """Yield the matches of the remaining pattern below a directory. n_links: how many more links may be followed"""
        match parts:
            case []:
                yield MatchedDirectory(path, fd, whose)
            case [_WildComponent() as wild, *rest]:
                try:
                    names = self._matches(fd, wild)
                except OSError as error:
                    yield SkippedDirectory(path, f"it can't be listed: {error.strerror}")
                    return
                for name in names:
                    yield from self._enter(fd, path, name, rest, n_links, whose, is_named=False)
            case [bytes() as name, *rest]:
                yield from self._enter(fd, path, name, rest, n_links, whose, is_named=True)

    def _matches(self, fd: Fd, wild: _WildComponent) -> list[bytes]:
        with self._kernel.reopen(fd, os.O_RDONLY | os.O_DIRECTORY) as listed:
            names = self._kernel.list(listed)
        hidden = not wild.text.startswith(".")
        visible = [name for name in names if not (hidden and name.startswith(b".")) and not is_store_name(name)]
        return [name for name in visible if wild.matches(os.fsdecode(name))]

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
    ) -> Iterator[SearchResult]:
        """Continue the search in an entry. is_named: the pattern contains its name, so failures are reported"""
        inner_path = os.path.join(path, name)
        if is_store_name(name):
            yield SkippedDirectory(inner_path, "it is a trash store")
            return
        try:
            inner = _open(fd, name)
        except OSError as error:
            if is_named:
                yield SkippedDirectory(inner_path, error.strerror or "it can't be opened")
            return
        with inner:
            # Check this before any other call: a user's filesystem may never respond.
            mounter = self._foreign.get(self._kernel.statx(inner).mnt_id)
            if mounter is not None:
                yield SkippedDirectory(inner_path, f"uid {mounter} mounted it")
                return
            st = self._kernel.fstat(inner)
            if stat.S_ISDIR(st.st_mode):
                if whose is not None:
                    whose = attribute_directory(self._kernel, inner, whose, self._seen_directories)
                yield from self.below(inner, inner_path, rest, n_links, whose)
            elif stat.S_ISLNK(st.st_mode) and is_named:
                yield from self._follow(fd, path, name, st, rest, n_links)
            elif is_named:
                yield SkippedDirectory(inner_path, "it is not a directory")

    def _follow(
        self, fd: Fd, path: bytes, name: bytes, link: os.stat_result, rest: Sequence[_Part], n_links: int
    ) -> Iterator[SearchResult]:
        """Continue the search at the target of a link."""
        inner_path = os.path.join(path, name)
        if not n_links:
            yield SkippedDirectory(inner_path, "too many symbolic links")
            return
        if not is_trusted_link(self._kernel.fstat(fd), link, self._ours):
            yield SkippedDirectory(inner_path, "a symbolic link that other users can change is not followed")
            return
        target = link_target(path, os.readlink(name, dir_fd=fd))
        if target is None:
            yield SkippedDirectory(inner_path, "a symbolic link with `..` after a name is not followed")
            return
        base, names = target
        base_parts = [part for part in base.split(b"/") if part]
        yield from self.below(self._root, b"/", [*base_parts, *names, *rest], n_links - 1, 0)
