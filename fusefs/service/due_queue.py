"""The queue of what is due next in one folder: as many containers as memory allows, and whether there are more."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from typing import NamedTuple


class DueContainer(NamedTuple):
    """A container that may be reaped, and the retention in its record that this rests on."""

    id: str
    retention_s: int | None


class _DueEntry(NamedTuple):
    at_s: float
    id: str
    retention_s: int | None


class DueQueue:
    """Containers and the times at which they may be reaped, soonest first; pure.

    Times are the service's, in seconds. When there are too many the latest are dropped: once the others are taken,
    look again.
    """

    def __init__(self, most: int) -> None:
        """most: so many are kept at a time."""
        self._most = most
        self._times: dict[str, float] = {}
        self._queue: list[_DueEntry] = []
        self._soonest_dropped_s = math.inf

    def __len__(self) -> int:
        return len(self._queue)

    def clear(self) -> None:
        """Forget all: it is looked for from the beginning."""
        self._times.clear()
        self._queue.clear()
        self._soonest_dropped_s = math.inf

    def add(self, chosen: DueContainer, at_s: float) -> None:
        """Note a container, or another time for it."""
        identifier = chosen.id
        self.remove(identifier)
        insort(self._queue, _DueEntry(at_s, *chosen), key=_order)
        self._times[identifier] = at_s
        if len(self._queue) > self._most:
            dropped = self._queue.pop()
            del self._times[dropped.id]
            self._soonest_dropped_s = min(self._soonest_dropped_s, dropped.at_s)

    def remove(self, identifier: str) -> None:
        """Forget a container; one that is not known is none."""
        at_s = self._times.pop(identifier, None)
        if at_s is not None:
            self._queue.pop(bisect_right(self._queue, (at_s, identifier), key=_order) - 1)

    def n_due(self, now_s: float) -> int:
        """How many may be reaped now; there may be more if it `is_cut`."""
        return bisect_right(self._queue, (now_s, "\U0010ffff"), key=_order)

    def take(self, now_s: float, most: int) -> list[DueContainer]:
        """Some that may be reaped now, the longest overdue first; they are not kept any more."""
        taken = [DueContainer(entry.id, entry.retention_s) for entry in self._queue[: min(most, self.n_due(now_s))]]
        del self._queue[: len(taken)]
        for chosen in taken:
            del self._times[chosen.id]
        return taken

    def is_cut(self) -> bool:
        """Whether there were more than are kept."""
        return self._soonest_dropped_s < math.inf

    def must_look(self) -> bool:
        """Whether something that was dropped comes before all that is kept."""
        return self.is_cut() and (not self._queue or self._queue[0].at_s > self._soonest_dropped_s)

    def next_at_s(self) -> float | None:
        """When the next one is due; None if none is known."""
        return self._queue[0].at_s if self._queue else None


def _order(entry: _DueEntry) -> tuple[float, str]:
    return entry.at_s, entry.id
