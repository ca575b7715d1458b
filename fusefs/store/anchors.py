"""Directories on a long way down that stay open, so that it is not walked from the top for each directory below it.

That would take the square of its length: minutes for a chain of 10,000 directories.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Self

from fusefs.linux.kernel import Kernel
from fusefs.store.sides import DIRECTORY, Sides, check_wholly

_APART = 1000
"""Bytes of path between two of them, about; a shorter path needs none."""
_MOST = 32

Make = Callable[[Sides, bytes, bytes], None]
"""Makes the directories of a path that are missing: below this one, which has that path, as far as this leads on."""


class Anchors:
    """They, on the way to the directory that was opened last.

    An anchor that somebody moves meanwhile is still where it was for us. So all are let go when the way below them
    has cost as much as the way to them, which makes it no more than twice as long.
    """

    def __init__(self, kernel: Kernel, root: Sides) -> None:
        """root: where the way begins."""
        self._kernel = kernel
        self._root = root
        self._open: deque[tuple[bytes, Sides]] = deque()
        self._walked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._let_go()

    def beneath(self, path: bytes, make: Make | None = None, flags: int = DIRECTORY) -> Sides:
        """A directory by its path from the root, empty for that itself; its caller's. See `Sides.beneath`.

        make    asked for what is missing
        Raises  OSError
        """
        above, at = self._reach(path, make)
        return self._step(above, path, at, len(path), make, flags)

    def wholly(self, path: bytes, make: Make | None = None) -> Sides:
        """The same on both sides if the root is. Raises  OSError: ESTALE as `wholly_beneath` does"""
        return check_wholly(self._root, self.beneath(path, make), path)

    def remove(self, path: bytes) -> None:
        """Remove an empty directory, where others see that. Raises  OSError"""
        upper, _, name = path.rpartition(b"/")
        with self.wholly(upper) as above:
            self._kernel.rmdir(above.names(), name)

    def _reach(self, path: bytes, make: Make | None) -> tuple[Sides, int]:
        """The last anchor on the way, and where in the path it goes on from there."""
        if self._walked > len(path):
            self._let_go()
        while self._open and not path.startswith(self._open[-1][0]):
            self._open.pop()[1].__exit__()
        way, above = self._open[-1] if self._open else (b"", self._root)
        at = len(way)
        while (end := path.find(b"/", at + _APART)) > 0:
            above = self._step(above, path, at, end, make, DIRECTORY)
            at = end + 1
            self._open.append((path[:at], above))
            if len(self._open) > _MOST:
                self._open.popleft()[1].__exit__()
        self._walked += len(path) - at
        return above, at

    def _step(self, above: Sides, path: bytes, at: int, end: int, make: Make | None, flags: int) -> Sides:
        try:
            return above.beneath(self._kernel, path[at:end], flags)
        except FileNotFoundError:
            if make is None:
                raise
            make(above, path[: max(at - 1, 0)], path[at:end])
        return above.beneath(self._kernel, path[at:end], flags)

    def _let_go(self) -> None:
        while self._open:
            self._open.pop()[1].__exit__()
        self._walked = 0


class Ways:
    """Anchors in several trees, for as long as a piece of work takes."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._into: dict[Sides, Anchors] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for anchors in self._into.values():
            anchors.__exit__()
        self._into.clear()

    def into(self, root: Sides) -> Anchors:
        """Those of a tree, whose root stays open longer than they are."""
        if root not in self._into:
            self._into[root] = Anchors(self._kernel, root)
        return self._into[root]
