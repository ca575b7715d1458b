"""Where the remover stops: at a store that holds something. Whoever had it may not know that it went along.

A store that holds nothing, and what a third person made to look like one, is removed like everything else: nobody can
make somebody's orphan last for ever.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.names import RelPath, join
from fusefs.core.report import PINNED, STORE
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.inner_pinned import pinned_in
from fusefs.store.layout import TREE, is_stores_own
from fusefs.store.stores_inside import things_in

_BEGINS = ".trashd"
"""What the names of stores begin with: cheaper to ask, for each directory, than `is_stores_own`."""


class Stop(NamedTuple):
    """Why a directory is not entered: what of it stands against that, below the directory that it is in."""

    way: RelPath
    why: str


class InnerStores:
    """Says of directories whether they are such stores, in one container's removal."""

    def __init__(self, kernel: Kernel, container: Fd, *, with_stores: bool = False) -> None:
        """with_stores: a person said that they go too; what is pinned in them stays all the same."""
        self._kernel = kernel
        self._with_stores = with_stores
        self._owners = {0, os.geteuid()}
        if os.geteuid() == 0:
            # Who takes another's tree for root takes his stores with it.
            with suppress(OSError):  # gone, or mounted over: the remover says so
                self._owners.add(kernel.stat(container, TREE).st_uid)

    def stop_at(self, dir_fd: Fd, path: bytes, name: str) -> Stop | None:
        """Why a directory is not entered; None if it is none of that kind.

        path    of the directory that it is in, below the container
        Raises  OSError that says nothing of it
        """
        if not (name.startswith(_BEGINS) or not path):
            return None
        raw = os.fsencode(name)
        if path and not is_stores_own(raw):
            return None
        if self._with_stores:
            pinned = next(pinned_in(self._kernel, dir_fd, raw, self._owners), None)
            return None if pinned is None else Stop(join(raw, pinned.way()), PINNED)
        if next(things_in(self._kernel, dir_fd, raw, self._owners), None) is None:
            return None
        return Stop(RelPath(raw), STORE)
