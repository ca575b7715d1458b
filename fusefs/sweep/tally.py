"""What a slice of a sweep has done so far."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from fusefs.core.names import join
from fusefs.core.record import MAX_FAILURES, Failure
from fusefs.core.swept import Spared, Sums
from fusefs.sweep.request import Taken

_OTHER_KIND = {"unlink": errno.EISDIR, "rmdir": errno.ENOTDIR}
"""What a call says of a name that is of another kind now: what was chosen is there no more, as if it were gone."""
_USELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_MOST_USELESS = 3


class Tally:
    """Counts, and the first of what is told by name."""

    def __init__(self, left: int | None) -> None:
        """left: matches that may still be acted on; None: all."""
        self.left = left
        self.is_limited = False
        self.sums = Sums()
        self.failures: list[Failure] = []
        self.spared: list[Spared] = []
        self._useless: list[int] = []

    def count(self, sums: Sums) -> None:
        """So much more."""
        self.sums = self.sums.plus(sums)

    def add(self, sums: Sums, failures: Iterable[Failure], spared: Iterable[Spared]) -> None:
        """What a slice did, as well."""
        self.count(sums)
        self.failures += list(failures)[: MAX_FAILURES - len(self.failures)]
        self.spared += list(spared)[: MAX_FAILURES - len(self.spared)]

    def fail(self, name: bytes, number: int | None, call: str, n: int = 1) -> None:
        """Something could not be done: so many things, one of them by name."""
        self.count(Sums(n_failed=n))
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(Failure(name, number or errno.EIO, call))

    def spare(self, name: bytes, why: str) -> None:
        """Something is left alone."""
        self.count(Sums(n_spared=1))
        if len(self.spared) < MAX_FAILURES:
            self.spared.append(Spared(name, why))

    def take(self, upper: bytes, n_names: int, taken: Taken, *, are_matches: bool, has_left: bool) -> None:
        """Take in what became of some names of a directory.

        has_left  they still are to be taken from what is left
        """
        vanished, failed = _split(taken)
        n_tried = n_names - taken.n_left
        n_done = n_tried - len(taken.refused) - len(taken.spared)
        if are_matches:
            self.count(Sums(n_matched=n_tried, n_done=n_done, n_vanished=vanished))
            if self.left is not None and has_left:
                self.left -= n_done
        else:
            self.count(Sums(n_inside=n_done))
        for name, number in failed:
            self.fail(join(upper, os.fsencode(name)), number, taken.call)
        for name, why in taken.spared:
            self.spare(join(upper, os.fsencode(name)), why)
        if n_done:
            self._useless.clear()
        self._useless += [number for _name, number in failed if number in _USELESS]

    def why(self) -> str:
        """What makes it useless to go on; empty if nothing does."""
        return os.strerror(self._useless[-1]) if len(self._useless) >= _MOST_USELESS else ""


def _split(taken: Taken) -> tuple[int, list[tuple[str, int]]]:
    """How many vanished, and what failed."""
    no_match = (errno.ENOENT, _OTHER_KIND.get(taken.call, errno.ENOENT))
    failed = [one for one in taken.refused if one[1] not in no_match]
    return len(taken.refused) - len(failed), failed
