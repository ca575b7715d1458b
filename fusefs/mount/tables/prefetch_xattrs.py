"""What is fetched with attributes: file handles, and which extended attributes. A client that asks for one of a file
will ask the next file for it."""

from __future__ import annotations

import stat
from collections.abc import Iterable

from fusefs.core.common_xattrs import ASKED_OF_ALL, UNSUPPORTED, is_asked_of_all
from fusefs.core.inode_attributes import Attributes
from fusefs.mount.tables.daemon_cache import SeenByName

_N_REFUSED_MAX = 64
_Kind = tuple[bytes, bool]
"""A name, and whether it is of directories, or else of files: a filesystem may have it of one of them alone."""


class PrefetchXattrs:
    """Of one mount. To be changed with the tables' lock; to be asked on any thread."""

    def __init__(self, device: int, *, has_handles: bool = False) -> None:
        """Begin with none.

        device       of the backing filesystem; what one mounted in it has not, that may have
        has_handles  its file handles can be relied on: they are fetched, too
        """
        self._device = device
        self.has_handles = has_handles
        self._kinds: frozenset[_Kind] = frozenset()
        self._new: frozenset[_Kind] = frozenset()
        self._answered: frozenset[_Kind] = frozenset()
        self._refused: frozenset[_Kind] = frozenset()

    def begin(self) -> None:
        """A listing begins: what was not asked for since the one before is not wanted any more."""
        self._kinds, self._new = self._kinds & self._new, frozenset()

    def has(self, name: bytes, *, is_directory: bool) -> bool:
        """Whether one is among them."""
        return (name, is_directory) in self._kinds

    def add(self, name: bytes, *, is_directory: bool) -> bool:
        """A client was told one, or that it is not there: for this listing, and the next. Returns  whether it is new"""
        if not is_asked_of_all(name):
            return False
        kind = (name, is_directory)
        is_new = kind not in self._kinds
        self._new |= {kind}
        self._answered |= {kind}
        self._kinds |= {kind}
        return is_new

    def of(self, seen: Attributes) -> tuple[bytes, ...]:
        """Those of one inode."""
        if not self._kinds or not _is_common(seen):
            return ()
        is_directory = seen.is_directory()
        return tuple(name for name, of_directories in self._kinds if of_directories is is_directory)

    def bits(self) -> tuple[int, int]:
        """Those of files, and of directories: a bit for each, as numbered in ASKED_OF_ALL."""
        files, directories = (
            sum(1 << ASKED_OF_ALL.index(name) for name, is_directory in self._kinds if is_directory is of_directories)
            for of_directories in (False, True)
        )
        return files, directories

    def refuses(self, device: int, name: bytes, *, is_directory: bool) -> bool:
        """Whether this filesystem has one not at all."""
        return device == self._device and (name, is_directory) in self._refused

    def answered(self, seen: Attributes, answers: Iterable[tuple[bytes, bytes | int]]) -> None:
        """What was answered of one inode: what is unsupported, and never was there, need not be asked for again."""
        if seen.dev != self._device or not _is_common(seen):
            return
        for name, answer in answers:
            kind = (name, seen.is_directory())
            if answer not in UNSUPPORTED:
                if kind not in self._answered and is_asked_of_all(name):
                    self._answered |= {kind}
            elif kind not in self._answered:
                self._refused = (self._refused if len(self._refused) < _N_REFUSED_MAX else frozenset()) | {kind}
                self._kinds -= {kind}

    def answered_all(self, found: Iterable[SeenByName | None]) -> None:
        """What was answered of many inodes: what is unsupported, and never was there, need not be asked for again."""
        for one in found:
            if one is not None and one[2]:
                self.answered(one[0], one[2].items())

    def supported(self, name: bytes, *, is_directory: bool) -> None:
        """A client has set one: it is there after all."""
        self._refused -= {(name, is_directory)}


def _is_common(seen: Attributes) -> bool:
    return stat.S_ISREG(seen.mode) or stat.S_ISDIR(seen.mode)
