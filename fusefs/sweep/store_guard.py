"""Directories that hold a trash store: none is taken whole, as what the store has would be lost to its commands."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from fusefs.core.names import RelPath, join
from fusefs.linux.kernel import Kernel
from fusefs.store.locate import find_scope
from fusefs.store.refusals import holds_store
from fusefs.store.stores_inside import stores_below
from fusefs.sweep.request import ActionPlace


def noted_stores(kernel: Kernel, directory: bytes) -> frozenset[RelPath]:
    """Where stores that hold something are known to be below a sweep's directory: relative to it.

    Raises  what `find_scope` does
    """
    with find_scope(kernel, directory) as scope:
        return frozenset(stores_below(kernel, scope.root.fd, scope.root_path, scope.relative))


def without_stores(
    here: ActionPlace, names: Sequence[str], noted: Collection[RelPath]
) -> tuple[Sequence[str], list[tuple[str, str]]]:
    """The names that may be taken, and those that are spared, with the reason.

    noted  stores that may be deeper than in the top of one of these, as `noted_stores` has them
    """
    if not here.are_dirs:
        return names, []
    free: list[str] = []
    spared: list[tuple[str, str]] = []
    for name in names:
        raw = os.fsencode(name)
        path = join(here.upper, raw) + b"/"
        if holds_store(here.kernel, here.sides.fd, raw) or any(one.startswith(path) for one in noted):
            spared.append((name, "holds a trash store"))
        else:
            free.append(name)
    return free, spared
