"""Trash: the matches become one orphan that keeps their tree, restorable whole or in part."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fusefs.core.errors import NotFound
from fusefs.core.names import Name, RelPath
from fusefs.core.record import TreeSize
from fusefs.core.sweep_result import SweepSums
from fusefs.linux.batched_calls import rename_all_free
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.shared_extents import never_shares
from fusefs.store.backing_and_mount import FULL, BackingAndMount, between, is_same
from fusefs.store.locate import find_scope
from fusefs.store.reserve import FOR_USER, with_room
from fusefs.store.stage import SwapOptions
from fusefs.store.sweep_container import SweepContainer, open_basket
from fusefs.sweep.request import Action, ActionEnd, ActionPlace, ActionResult, Identified, SweepRoot, ToTrash
from fusefs.sweep.store_guard import noted_stores, without_stores


@contextmanager
def open_trash(kernel: Kernel, top: SweepRoot, to: ToTrash) -> Iterator[Action]:
    """The action, with a container for what it takes; what came into that is an orphan in the end, even if killed.

    Raises  TrashdError; nothing is left behind then
    """
    with find_scope(kernel, top.path) as scope:
        if not os.path.samestat(kernel.fstat(scope.sides.fd), kernel.fstat(top.sides.fd)):
            raise NotFound(top.path, "it was moved meanwhile")
        with open_basket(kernel, scope, to.options or SwapOptions()) as basket:
            yield _TrashAction(basket, noted_stores(kernel, top.path), to.see)


class _TrashAction:
    """See Action. All that it keeps is there before any worker is, and shared by them."""

    is_single = False
    takes_dirs = True
    avoided: frozenset[Identified] = frozenset()

    def __init__(
        self, basket: SweepContainer, noted: frozenset[RelPath], see: Callable[[Fd, SweepSums], None] | None
    ) -> None:
        self._basket = basket
        self._noted = noted
        self._see = see
        self._has_joined = mmap.mmap(-1, 1)
        """Whether something may have come by a merge, which counts as nothing done if it could not come wholly."""

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """See Action: one rename a name."""
        names, told = without_stores(here, names, self._noted)
        try:
            into = self._basket.into(here.upper, here.ways)
        except FileNotFoundError:
            # The directory has another path by now: what is in it is not where it was asked for.
            return ActionResult([(name, errno.ENOENT) for name in names], "openat2", told)
        with into:
            if is_same(here.kernel, here.sides.fd, into.fd):
                return ActionResult([(name, errno.ENOENT) for name in names], "openat2", told)
            source, target = between(here.sides, into)
            refused = [
                (name, left)
                for name, number in rename_all_free(here.kernel, source, target, names)
                if (left := self._once_more(here, into, Name(os.fsencode(name)), number))
            ]
            return ActionResult(refused, "renameat2", told)

    def _once_more(self, here: ActionPlace, into: BackingAndMount, name: Name, number: int) -> int:
        """What is left of an error; 0 if the name could be taken all the same."""
        if number == errno.EEXIST and here.are_dirs:
            # Something was taken from it before, so that there is one of its name: the rest joins that.
            from fusefs.store.merge import bring  # it has all of a restore with it

            self._has_joined[0] = 1
            left = bring(here.kernel, here.sides, into, name, RelPath(b""))
            return left.failures[0].errno if left.n else 0
        if number not in FULL:
            return number
        source, target = between(here.sides, into)
        try:
            with_room(self._basket.held.folder, FOR_USER, partial(here.kernel.rename_free, source, name, target, name))
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def _size(self, sums: SweepSums) -> TreeSize | None:
        """What it took, if it looked at files anyway: all but directories, what is in them, and links."""
        if not sums.taken_bytes:
            return None
        held = self._basket.held
        kernel = held.folder.store.kernel
        shared = 0 if never_shares(kernel.filesystem(held.fd)) else None
        return TreeSize(sums.n_done + 1, sums.taken_bytes, 0, shared, True, "sweep", kernel.now_ns())

    def end(self, sums: SweepSums) -> ActionEnd:
        """See Action."""
        if self._see is not None:
            self._see(self._basket.tree.fd, sums)
        is_empty = not (sums.n_done or self._has_joined[0])
        orphan, warnings = self._basket.finish(is_empty=is_empty, size=self._size(sums))
        store = None if orphan is None else self._basket.held.folder.path()
        return ActionEnd(orphan, self._basket.volume, store, warnings=warnings)
