"""Actions that need no more than the matches: to delete them for good, to tell them one by one, or to count them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fusefs.core.names import join
from fusefs.core.selection import Selection
from fusefs.core.stat_bounds import Field
from fusefs.core.sweep_result import MATCHES_MAX, Match, Swept
from fusefs.linux.batched_calls import StatxResult, look_at_all, rmdir_all, unlink_all
from fusefs.sweep.request import Action, ActionPlace, ActionResult, Identified, ToPrint


class DeleteMatches(Action):
    """Deletes."""

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """See Action."""
        if here.are_dirs:
            return ActionResult(rmdir_all(here.kernel, here.sides.names(), names), "rmdir")
        return ActionResult(unlink_all(here.kernel, here.sides.names(), names), "unlink")


class Untellable(Exception):
    """What is told could not be written."""

    def __init__(self, error: OSError) -> None:
        """error: that of telling."""
        super().__init__(error)
        self.error = error


class PrintMatches(Action):
    """Tells, in this process alone."""

    is_single = True

    def __init__(self, to: ToPrint) -> None:
        self._to = to

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """See Action. Raises  Untellable"""
        try:
            return ActionResult(self._to.tell(here, names), "stat")
        except OSError as error:
            raise Untellable(error) from error


class CountMatches(Action):
    """Counts (sweep.request.Action), in this process alone; it remembers the largest and the oldest."""

    is_single = True

    def __init__(self, selection: Selection, avoided: frozenset[Identified], *, takes_dirs: bool) -> None:
        self.avoided = avoided
        self.takes_dirs = takes_dirs
        self._field: Field = next((bound.field for bound in selection.times), "mtime")
        self.n_bytes = 0
        self._largest: list[tuple[int, bytes, int]] = []
        self._oldest: list[tuple[int, bytes, int]] = []

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """See Action."""
        looked, refused = look_at_all(here.kernel, here.sides.fd, names, asks_birth=self._field == "btime")
        for one in looked:
            self._count(here.upper, one)
        return ActionResult(refused, "stat")

    def _count(self, upper: bytes, one: StatxResult) -> None:
        n_bytes = one.st_size
        time_ns: int = one.btime_ns if self._field == "btime" else getattr(one, f"st_{self._field}_ns")
        self.n_bytes += n_bytes
        if len(self._largest) < MATCHES_MAX or n_bytes > self._largest[0][0] or -time_ns > self._oldest[0][0]:
            path = join(upper, os.fsencode(one.name))
            _keep(self._largest, (n_bytes, path, time_ns))
            _keep(self._oldest, (-time_ns, path, n_bytes))

    def end(self, swept: Swept) -> Swept:
        """Add what was counted."""
        sums = swept.sums._replace(n_bytes=self.n_bytes)
        largest = [Match(path, n_bytes, time_ns) for n_bytes, path, time_ns in sorted(self._largest, reverse=True)]
        oldest = [Match(path, n_bytes, -time_ns) for time_ns, path, n_bytes in sorted(self._oldest, reverse=True)]
        return swept._replace(sums=sums, looks=True, largest=tuple(largest), oldest=tuple(oldest))


def _keep(heap: list[tuple[int, bytes, int]], one: tuple[int, bytes, int]) -> None:
    import heapq  # only what counts needs it

    if len(heap) < MATCHES_MAX:
        heapq.heappush(heap, one)
    else:
        heapq.heappushpop(heap, one)
