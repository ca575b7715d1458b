"""Matches moved to another directory, one rename each."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

from fusefs.core.names import RelPath
from fusefs.core.sweep_result import SweepSums
from fusefs.linux.batched_calls import rename_all_free
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel, Refused
from fusefs.store.backing_and_mount import is_same
from fusefs.sweep.move_destination import MoveDestination, open_destination
from fusefs.sweep.request import Action, ActionEnd, ActionPlace, ActionResult, Identified, IfExists, SweepRoot, ToMove
from fusefs.sweep.store_guard import noted_stores, without_stores

_CLOCK_REALTIME_COARSE = 5  # Python's time doesn't name it


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


class _MoveAction:
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
        with self._destination.open(here.upper, here.ways) as target:
            if is_same(here.kernel, here.sides.names(), target):
                return ActionResult([(name, errno.ENOENT) for name in names], "openat2")
            refused = rename_all_free(here.kernel, here.sides.names(), target, names)
            return ActionResult(self._settled(here, target, refused), "renameat2") if refused else ActionResult()

    def end(self, sums: SweepSums) -> ActionEnd:
        """Say where everything is."""
        return ActionEnd(where=self._destination.path if sums.n_done else None)

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
        there = kernel.stat(target, name)
        if there.st_ctime_ns >= self._began_ns:  # it came since the sweep began: it may be another match of it
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        if os.path.samestat(there, kernel.stat(names, name)) and not stat.S_ISDIR(there.st_mode):
            kernel.unlink(names, name)  # of two links to one file a rename leaves both
        else:
            kernel.rename(names, name, target, name)
