"""The way back into a tree's origin: the directories above a part of it, made like the tree's own where they miss."""

from __future__ import annotations

import os
from contextlib import ExitStack

from fusefs.core.errors import NotFound
from fusefs.core.names import Name, join, split
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.likeness import apply_likeness, read_likeness
from fusefs.store.container import Held
from fusefs.store.sides import Sides, refresh

_DIR = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


def way_back(kernel: Kernel, held: Held, tree: Fd, parents: list[Name]) -> Sides:
    """The directory at the origin that corresponds to one in the tree; missing ones are made like the tree's.

    At most six fds are open at a time, however deep it is.
    """
    if held.record.origin is None:
        raise NotFound(held.id, "it was dropped, so nobody knows where it was: use --to PATH")
    base, like = held.folder.store.base(), kernel.open_beneath(tree, b".", _DIR)
    with ExitStack() as owned:
        owned.enter_context(like)
        if held.record.origin:
            *upper, last = split(held.record.origin)
            with base.beneath(kernel, join(*upper)) as above:
                here = _enter(kernel, above, last, like)
        else:
            here = base.beneath(kernel, b"")  # of a sweep of the directory itself that holds the store
        owned.pop_all()
    for parent in parents:
        here, like = _descend(kernel, here, like, parent)
    like.close()
    return here


def _descend(kernel: Kernel, here: Sides, like: Fd, name: Name) -> tuple[Sides, Fd]:
    """One level down on both sides; closes the two that it starts from."""
    with here, like, ExitStack() as owned:
        model = owned.enter_context(kernel.open_beneath(like, name, _DIR))
        made = _enter(kernel, here, name, model)
        owned.pop_all()
    return made, model


def _enter(kernel: Kernel, above: Sides, name: Name, like: Fd) -> Sides:
    try:
        return above.beneath(kernel, name)
    except FileNotFoundError:
        kernel.mkdir(above.names(), name)
        with kernel.open_dir(above.fd, name) as made, kernel.open_dir(like) as model:
            apply_likeness(kernel, made, read_likeness(kernel, model))
        if above.mounted is not None:
            refresh(kernel, above.mounted, name)
        return above.beneath(kernel, name)
