"""Matches that are renamed: into one orphan that keeps their tree and can be restored, or to another directory.

A directory that holds a trash store is never taken whole, as what the store has would be lost to its commands.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count

from fusefs.core.errors import NotFound
from fusefs.core.names import Name, RelPath, join
from fusefs.core.record import TreeSize
from fusefs.core.sweep_result import SweepSums, Swept
from fusefs.linux.batched_calls import rename_all_free
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel, Refused
from fusefs.linux.shared_extents import never_shares
from fusefs.store.backing_and_mount import FULL, BackingAndMount, between, is_same
from fusefs.store.locate import find_scope
from fusefs.store.refusals import held_store
from fusefs.store.reserve import FOR_USER, with_room
from fusefs.store.stage import SwapOptions
from fusefs.store.stores_inside import stores_below
from fusefs.store.sweep_container import SweepContainer, open_basket
from fusefs.store.user_boundary import check_giving, is_bounded
from fusefs.sweep.move_destination import MoveDestination, open_destination
from fusefs.sweep.request import Action, ActionPlace, ActionResult, Identified, IfExists, SweepRoot, ToMove, ToTrash

_CLOCK_REALTIME_COARSE = 5  # Python's time doesn't name it


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
        if held_store(here.kernel, here.sides.fd, raw) or any(one.startswith(path) for one in noted):
            spared.append((name, "holds a trash store"))
        else:
            free.append(name)
    return free, spared


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


class _TrashAction(Action):
    """All that it keeps is there before any worker is, and shared by them."""

    takes_dirs = True

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
            owner = here.kernel.fstat(here.sides.fd).st_uid
            check_giving(here.kernel, into.fd, here.upper, owner, here.sides.fd)  # another was there before?
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

    def end(self, swept: Swept) -> Swept:
        """See Action."""
        if self._see is not None:
            self._see(self._basket.tree.fd, swept.sums)
        is_empty = not (swept.sums.n_done or self._has_joined[0])
        orphan, warnings = self._basket.finish(is_empty=is_empty, size=self._size(swept.sums))
        store = None if orphan is None else self._basket.held.folder.path()
        expires_ns = self._basket.held.record.adopted_expires_ns()
        swept = swept._replace(orphan=orphan, expires_ns=expires_ns, volume=self._basket.volume)
        return swept._replace(store=store, warnings=warnings)


@contextmanager
def open_move(kernel: Kernel, top: SweepRoot, to: ToMove) -> Iterator[Action]:
    """The action that moves; made in the first process, before there are others.

    Raises  UsageError, OtherFilesystem, Refused, NotFound
    """
    with open_destination(kernel, top, to.target) as destination:
        yield _MoveAction(destination, to, noted_stores(kernel, top.path))


@contextmanager
def avoided_by(kernel: Kernel, top: SweepRoot, to: ToMove) -> Iterator[frozenset[Identified]]:
    """What a move would leave alone, without one; it touches nothing, and refuses what `open_move` would."""
    with open_destination(kernel, top, to.target) as destination:
        yield frozenset({destination.identified})


class _MoveAction(Action):
    """Moves names of a directory to the one that corresponds to it."""

    takes_dirs = True

    def __init__(self, destination: MoveDestination, to: ToMove, noted: frozenset[RelPath]) -> None:
        self._destination = destination
        self._noted = noted
        self._to = to
        # What gives files their ctime, a little behind the fine one.
        self._began_ns = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
        self.avoided = frozenset({destination.identified})
        # Another worker would not know what this one has put there just now.
        self.is_single = to.if_exists is IfExists.REPLACE

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """Move some names. Raises  OSError if the directory that they go to can't be had"""
        names, spared = without_stores(here, names, self._noted)
        return self._take(here, names)._replace(spared=spared)

    def _take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        with self._destination.open(here.upper, here.ways, here.sides.fd) as target:
            if is_same(here.kernel, here.sides.names(), target):
                return ActionResult([(name, errno.ENOENT) for name in names], "openat2")
            refused = rename_all_free(here.kernel, here.sides.names(), target, names)
            return ActionResult(self._settled(here, target, refused), "renameat2") if refused else ActionResult()

    def end(self, swept: Swept) -> Swept:
        """Say where everything is."""
        return swept._replace(where=self._destination.path) if swept.sums.n_done else swept

    def _settled(self, here: ActionPlace, target: Fd, refused: Refused) -> Refused:
        """What is still refused after those whose name was taken got another, or took it."""
        final = []
        for name, number in refused:
            try:
                if number != errno.EEXIST or self._to.if_exists is IfExists.SKIP:
                    final.append((name, number))
                elif self._to.if_exists is IfExists.NUMBER:
                    self._number(here, target, name)
                else:
                    self._replace(here, target, os.fsencode(name))
            except OSError as error:
                final.append((name, error.errno or errno.EIO))
        return final

    def _number(self, here: ActionPlace, target: Fd, name: str) -> None:
        old = os.fsencode(name)
        for number in count(1):
            with suppress(FileExistsError):
                here.kernel.rename_free(here.sides.names(), old, target, b"%s.%d" % (old, number))
                return

    def _replace(self, here: ActionPlace, target: Fd, name: bytes) -> None:
        kernel, names = here.kernel, here.sides.names()
        there, source = kernel.stat(target, name), kernel.stat(names, name)
        if is_bounded() and there.st_uid != source.st_uid:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), name)
        if there.st_ctime_ns >= self._began_ns:  # it came since the sweep began: it may be another match of it
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        if os.path.samestat(there, source) and not stat.S_ISDIR(there.st_mode):
            kernel.unlink(names, name)  # of two links to one file a rename leaves both
        else:
            kernel.rename(names, name, target, name)
