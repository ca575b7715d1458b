"""Directories that hold a trash store: nobody takes one whole, as what the store has would be lost to its commands."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fusefs.store.refuse import holds_store
from fusefs.sweep.request import Here


def without_stores(here: Here, names: Sequence[str]) -> tuple[Sequence[str], list[tuple[str, str]]]:
    """The names that may be taken, and those that are spared, with the reason."""
    if not here.are_dirs:
        return names, []
    free: list[str] = []
    spared: list[tuple[str, str]] = []
    for name in names:
        if holds_store(here.kernel, here.sides.fd, os.fsencode(name)):
            spared.append((name, "holds a trash store"))
        else:
            free.append(name)
    return free, spared
