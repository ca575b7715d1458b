"""Directories of a tree of any depth, opened with few fds and without `..`.

What stays open on a long way down spares walking it from the top for each directory below. That would take the square
of its length: minutes for a chain of 10,000 directories.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Generic, Self, TypeVar

from fusefs.core.names import Name, RelPath, join, split
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import WALK_MAX_BYTES
from fusefs.store.backing_and_mount import DIRECTORY, BackingAndMount, check_wholly

D = TypeVar("D", bound=AbstractContextManager[object])

_FDS_MAX = 64
_NEAR_BYTES = 512
_APART = 1000
"""Bytes of path between two directories that stay open for `DeepOpener`, about; a shorter path needs none."""
_MOST = 32

Make = Callable[[BackingAndMount, bytes, bytes], None]
"""Makes the directories of a path that are missing: below this one, which has that path, as far as this leads on."""
MakeLike = Callable[[Fd, Name, Fd], None]
"""Makes one directory: in this one, of that name, like the other (O_PATH both); unless it appears before."""


class _OpenDirectories(Generic[D]):
    """The open directories on a way down from a top directory, which stays its owner's.

    When there are too many, every other one is closed. So they lie dense at the end and ever sparser towards the top.

    A mark says how far down a directory is: the length of the path to it, with one slash a name. The top's is 0.
    """

    def __init__(self, top: D, n_max: int) -> None:
        self._top = top
        self._n_max = n_max
        self._open: dict[int, D] = {}  # by mark, ascending

    def __enter__(self) -> Self:
        """Own what is open for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close all of it."""
        self._close_below(0)

    @property
    def mark(self) -> int:
        """Where the last one is."""
        return next(reversed(self._open), 0)

    def _last(self) -> D:
        return self._open[self.mark] if self._open else self._top

    def _keep(self, mark: int, directory: D) -> None:
        self._open[mark] = directory
        if len(self._open) > self._n_max:
            for every_other in list(self._open)[:-1:2]:
                self._open.pop(every_other).__exit__(None, None, None)

    def _close_below(self, mark: int) -> None:
        while self.mark > mark:
            self._open.popitem()[1].__exit__(None, None, None)


class Descent(_OpenDirectories[Fd]):
    """Where a walk of a tree is, which goes down by names, and back to directories that it came through.

    Going back to a directory that was closed walks there from the nearest one above, by its names, and keeps some on
    the way open again: a chain of n directories costs about n log n steps, not n².
    """

    def __init__(self, kernel: Kernel, top: Fd) -> None:
        """top: stays its owner's."""
        super().__init__(top, _FDS_MAX)
        self._kernel = kernel
        self._path = bytearray()

    @property
    def fd(self) -> Fd:
        """The directory where we are, readable; ours to close."""
        return self._last()

    def descend(self, name: Name) -> None:
        """Go into a directory of this one.

        Raises  OSError, and we are where we were: gone, no directory, a mount, not ours to open
        """
        self._keep(self.mark + 1 + len(name), self._kernel.open_dir(self.fd, name))
        self._path += b"/" + name

    def go_back(self, mark: int) -> None:
        """Go to a directory above. The caller looks whether it is the same as before: names may have moved.

        Raises  OSError, and we are somewhere above it
        """
        self._close_below(mark)
        del self._path[mark:]
        while (here := self.mark) < mark:
            stop = self._next_stop(here, mark)
            self._keep(stop, self._kernel.open_dir(self.fd, bytes(self._path[here + 1 : stop])))

    def _next_stop(self, here: int, mark: int) -> int:
        """Half the way that is left, as we are likely to come back to directories just above; at most a stride."""
        left = mark - here
        if left <= _NEAR_BYTES:
            return mark
        stop = self._path.rfind(b"/", here + 1, here + 1 + min(WALK_MAX_BYTES, max(left // 2, _NEAR_BYTES)))
        if stop < 0:  # FUSE may have names as long as that
            stop = self._path.find(b"/", here + 1)
        return stop if stop >= 0 else mark


class DeepOpener(_OpenDirectories[BackingAndMount]):
    """Opens directories of a tree by their paths, one after the other, from what is open on the way to the last one.

    A directory on the way that is moved meanwhile is still where it was for us. So all are closed when the way
    below them has cost as much as the way to them, which makes it no more than twice as long.
    """

    def __init__(self, kernel: Kernel, root: BackingAndMount) -> None:
        """root: where the paths begin; stays its owner's."""
        super().__init__(root, _MOST)
        self._kernel = kernel
        self._way = b""
        """To the last one that is open, with a slash at its end; what follows it doesn't count."""
        self._walked = 0

    def beneath(self, path: bytes, make: Make | None = None, flags: int = DIRECTORY) -> BackingAndMount:
        """A directory by its path from the root, empty for that itself; its caller's. See `BackingAndMount.beneath`.

        make    asked for what is missing
        Raises  OSError
        """
        at = self._reach(path, make)
        return self._step(path, at, len(path), make, flags)

    def wholly(self, path: bytes, make: Make | None = None) -> BackingAndMount:
        """A directory below the root, on both sides if the root is. Raises  OSError: ESTALE as `wholly_beneath` does"""
        return check_wholly(self._top, self.beneath(path, make), path)

    def remove(self, path: bytes) -> None:
        """Remove an empty directory, where others see that. Raises  OSError"""
        upper, _, name = path.rpartition(b"/")
        with self.wholly(upper) as above:
            self._kernel.rmdir(above.names(), name)

    def _reach(self, path: bytes, make: Make | None) -> int:
        """Where in the path it goes on from the last directory on the way that is open now."""
        if self._walked > len(path):
            self._close_below(0)
            self._walked = 0
        while (at := self.mark) and not path.startswith(self._way[:at]):
            self._close_below(at - 1)
        while (end := path.find(b"/", at + _APART)) > 0:
            self._keep(end + 1, self._step(path, at, end, make, DIRECTORY))
            self._way = path[: (at := end + 1)]
        self._walked += len(path) - at
        return at

    def _step(self, path: bytes, at: int, end: int, make: Make | None, flags: int) -> BackingAndMount:
        above = self._last()
        try:
            return above.beneath(self._kernel, path[at:end], flags)
        except FileNotFoundError:
            if make is None:
                raise
            make(above, path[: max(at - 1, 0)], path[at:end])
        return above.beneath(self._kernel, path[at:end], flags)


class DeepOpeners:
    """`DeepOpener` of several trees, for as long as a piece of work takes."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._into: dict[BackingAndMount, DeepOpener] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for paths in self._into.values():
            paths.__exit__()
        self._into.clear()

    def into(self, root: BackingAndMount) -> DeepOpener:
        """That of a tree, whose root stays open longer than it is used."""
        if root not in self._into:
            self._into[root] = DeepOpener(self._kernel, root)
        return self._into[root]


def walk_inwards(
    start: RelPath, enter: Callable[[RelPath], Iterable[Name]], leave: Callable[[RelPath], object]
) -> None:
    """Enter and leave each directory of a tree, by its path: before those in it, and once more when they are done.

    It remembers names alone: the paths of all directories of a chain take the square of its length.
    enter  gives the names of those in it that are to be entered too
    """
    path = start
    pending = [list(enter(path))]
    while pending:
        if pending[-1]:
            path = join(path, pending[-1].pop())
            pending.append(list(enter(path)))
        else:
            pending.pop()
            leave(path)
            path = RelPath(os.path.dirname(path))


def make_missing(kernel: Kernel, above: Fd, way: bytes, missing: bytes, models: DeepOpener, make: MakeLike) -> None:
    """Make what is missing of a path below a directory, like the directories of another tree.

    way      the path of the directory itself, the same in the other tree
    models   of the other tree
    Raises   OSError: ENOENT if that has none there any more
    """
    names = split(missing)
    here, n_there = _deepest(kernel, above, names)
    with closed_on_error(here):
        like = models.beneath(join(way, *names[:n_there])).fd
    for name in names[n_there:]:
        here, like = _descend(kernel, here, like, name, make)
    here.close()
    like.close()


def _deepest(kernel: Kernel, above: Fd, names: list[Name]) -> tuple[Fd, int]:
    """The deepest directory of a path that is there, and how many parts of the path lead to it."""
    for count in range(len(names) - 1, 0, -1):
        with suppress(FileNotFoundError):
            return kernel.open_beneath(above, join(*names[:count]), DIRECTORY), count
    return kernel.open_beneath(above, b".", DIRECTORY), 0


def _descend(kernel: Kernel, here: Fd, like: Fd, name: Name, make: MakeLike) -> tuple[Fd, Fd]:
    """One level down on both sides; closes the two that it starts from."""
    with here, like, closed_on_error(kernel.open_beneath(like, name, DIRECTORY)) as model:
        make(here, name, model)
        return kernel.open_beneath(here, name, DIRECTORY), model
