"""The way back into a tree's origin: the directories above a part of it, made like the tree's own where they miss."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from fusefs.core.errors import NotFound
from fusefs.core.names import Name, join, split
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.likeness import make_like, read_likeness
from fusefs.store.container import Held, unfinished_name
from fusefs.store.sides import DIRECTORY, Sides, between, open_shown_as, refresh


def way_back(kernel: Kernel, held: Held, tree: Fd, parents: list[Name]) -> Sides:
    """The directory at the origin that corresponds to one in the tree; missing ones are made like the tree's.

    At most six fds are open at a time, however deep it is.
    """
    if held.record.origin is None:
        raise NotFound(held.id, "it was dropped, so nobody knows where it was: use --to PATH")
    base, like = held.folder.store.base(), kernel.open_beneath(tree, b".", DIRECTORY)
    with ExitStack() as owned:
        owned.enter_context(like)
        if held.record.origin:
            *upper, last = split(held.record.origin)
            with base.beneath(kernel, join(*upper)) as above:
                here = _enter(kernel, held, above, last, like)
        else:
            here = base.beneath(kernel, b"")  # of a sweep of the directory itself that holds the store
        owned.pop_all()
    for parent in parents:
        here, like = _descend(kernel, held, here, like, parent)
    like.close()
    return here


def _descend(kernel: Kernel, held: Held, here: Sides, like: Fd, name: Name) -> tuple[Sides, Fd]:
    """One level down on both sides; closes the two that it starts from."""
    with here, like, ExitStack() as owned:
        model = owned.enter_context(kernel.open_beneath(like, name, DIRECTORY))
        made = _enter(kernel, held, here, name, model)
        owned.pop_all()
    return made, model


def _enter(kernel: Kernel, held: Held, above: Sides, name: Name, like: Fd) -> Sides:
    """A directory of that name; made in the container if it is missing, where nobody exchanges it meanwhile."""
    try:
        return above.beneath(kernel, name)
    except FileNotFoundError:
        with kernel.open_dir(like) as model:
            wanted = read_likeness(kernel, model)
    new = unfinished_name()
    with ExitStack() as owned:
        shown = None
        if above.mounted is not None:
            shown = open_shown_as(kernel, held.folder.store.mounted, held.way(), held.fd)
        if shown is not None:
            owned.enter_context(shown)
        source, target = between(Sides(held.fd, shown), above)
        make_like(kernel, held.fd, new, wanted, partial(kernel.rename_free, source, new, target, name))
    if above.mounted is not None:
        refresh(kernel, above.mounted, name)
    return above.beneath(kernel, name)
