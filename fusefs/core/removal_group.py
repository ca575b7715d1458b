"""Paths that one command removes together."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import chain
from typing import NamedTuple


class ListedDirectory(NamedTuple):
    """A directory, and names in it that are to be removed.

    given   what was told before each name: empty, or a path with a slash at its end
    path    its path, absolute, without links
    packed  the names, a NUL behind each: as objects they take ten times the memory
    """

    given: bytes
    path: bytes
    packed: bytearray

    def names(self) -> Iterator[bytes]:
        """The names, one by one."""
        import re  # where there are any

        return (found[0] for found in re.finditer(rb"[^\0]+", self.packed))

    def all_given(self) -> Iterator[bytes]:
        """Their paths, as they were given."""
        return (self.given + name for name in self.names())

    def paths(self) -> Iterator[bytes]:
        """Their paths, absolute."""
        above = self.path.rstrip(b"/") + b"/"
        return (above + name for name in self.names())


class RemovalGroup(NamedTuple):
    """Names on one mount. directory: above all of them"""

    directory: bytes
    directories: tuple[ListedDirectory, ...]

    def n(self) -> int:
        """How many there are."""
        return sum(listed.packed.count(b"\0") for listed in self.directories)

    def all_given(self) -> Iterator[bytes]:
        """Their paths, as they were given."""
        return chain.from_iterable(listed.all_given() for listed in self.directories)

    def paths_without(self, left: Container[bytes]) -> Iterator[bytes]:
        """The paths of all but these. left: as they were given"""
        paths = chain.from_iterable(listed.paths() for listed in self.directories)
        return (path for given, path in zip(self.all_given(), paths, strict=True) if given not in left)
