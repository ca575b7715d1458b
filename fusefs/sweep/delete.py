"""Matches deleted for good: one unlink a file, one rmdir a directory, and the kernel says what is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fusefs.core.swept import Sums
from fusefs.linux.batches import rmdir_all
from fusefs.sweep.request import Ended, Here, Identified, Taken


class Deleting(NamedTuple):
    """Deletes (sweep.request.Action)."""

    is_single: bool = False
    takes_dirs: bool = False
    avoided: frozenset[Identified] = frozenset()

    def take(self, here: Here, names: Sequence[str]) -> Taken:
        """See Action."""
        if here.are_dirs:
            return Taken(rmdir_all(here.kernel, here.sides.names(), names), "rmdir")
        return Taken(here.kernel.unlink_all(here.sides.names(), names), "unlink")

    def end(self, _sums: Sums) -> Ended:
        """See Action."""
        return Ended()
