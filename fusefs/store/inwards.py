"""A walk of a tree of any depth: a directory before those in it, and once more when they are done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from fusefs.core.names import Name, RelPath, join


def walk_inwards(
    start: RelPath, enter: Callable[[RelPath], Iterable[Name]], leave: Callable[[RelPath], object]
) -> None:
    """Enter and leave each directory of a tree, by its path.

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
