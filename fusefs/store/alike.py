"""Directories made like those of another tree, as far as they are missing on the way to one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress

from fusefs.core.names import Name, join, split
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.deep_path import DeepOpener
from fusefs.store.sides import DIRECTORY

MakeLike = Callable[[Fd, Name, Fd], None]
"""Makes one directory: in this one, of that name, like the other (O_PATH both); unless somebody is faster."""


def make_alike(kernel: Kernel, above: Fd, way: bytes, missing: bytes, models: DeepOpener, make: MakeLike) -> None:
    """Make what is missing of a path below a directory.

    way      the path of the directory itself, the same in the other tree
    models   of the other tree
    Raises   OSError: ENOENT if that has none there any more
    """
    names = split(missing)
    here, n_there = _deepest(kernel, above, names)
    with ExitStack() as owned:
        owned.enter_context(here)
        like = models.beneath(join(way, *names[:n_there])).fd
        owned.pop_all()
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
    with here, like, ExitStack() as owned:
        model = owned.enter_context(kernel.open_beneath(like, name, DIRECTORY))
        make(here, name, model)
        made = kernel.open_beneath(here, name, DIRECTORY)
        owned.pop_all()
    return made, model
