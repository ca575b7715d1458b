"""Judged units sorted: what is due goes on to the sweep, what goes soon to the lists, the rest is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from heapq import nlargest, nsmallest

from fusefs.core.record import MAX_FAILURES, Failure
from fusefs.core.swept import Match, Spared, Sums, Swept
from fusefs.sweep.purgelist import Counted, PurgeLists
from fusefs.sweep.units import Judged, Unit, Young

_TOLD = 5


class Sieve:
    """The units of one directory, as far as they were judged."""

    def __init__(
        self, directory: bytes, before_ns: int, due_ns: Callable[[int], int], lists: PurgeLists | Counted
    ) -> None:
        """Be ready.

        before_ns  a unit that has nothing of that time or later is due; the others that are given go soon
        due_ns     when something of a time goes
        """
        self._directory = directory
        self._before_ns = before_ns
        self._due_ns = due_ns
        self._lists = lists
        self._sums = Sums()
        self._failures: list[Failure] = []
        self._spared: list[Spared] = []
        self._largest: list[Match] = []
        self._oldest: list[Match] = []

    def due(self, judged: Iterator[Judged]) -> Iterator[bytes]:
        """The names of those that are due."""
        return (unit.name for unit in self._due(judged))

    def _due(self, judged: Iterator[Judged]) -> Iterator[Unit]:
        for one in judged:
            match one:
                case Unit() if one.newest_ns < self._before_ns:
                    self._sums = self._sums.plus(Sums(n_bytes=one.n_bytes))
                    yield one
                case Unit():
                    path = os.path.join(self._directory, one.name)
                    self._lists.add(one.uid, path, self._due_ns(one.newest_ns))
                case Young():
                    pass
                case Spared():
                    self._sums = self._sums.plus(Sums(n_spared=1))
                    self._spared = [*self._spared, one][:MAX_FAILURES]
                case Failure():
                    self._lists.lack()
                    self._sums = self._sums.plus(Sums(n_failed=1))
                    self._failures = [*self._failures, one][:MAX_FAILURES]

    def told(self, swept: Swept) -> Swept:
        """What a sweep of the due ones did, with what it was not given."""
        vanished = swept.sums.n_vanished + swept.sums.n_missing  # each was there when it was judged
        return swept._replace(
            sums=swept.sums._replace(n_bytes=0, n_vanished=vanished, n_missing=0).plus(self._sums),
            failures=(*self._failures, *swept.failures)[:MAX_FAILURES],
            spared=(*self._spared, *swept.spared)[:MAX_FAILURES],
            looks=True,
        )

    def would_take(self, judged: Iterator[Judged], most: int | None, stops: Callable[[], bool]) -> Swept:
        """What a sweep of the due ones would do. most: of them"""
        n_matched = n_bytes = 0
        is_stopped = is_limited = False
        for unit in self._due(judged):
            is_stopped, is_limited = stops(), n_matched == most
            if is_stopped or is_limited:
                break
            n_matched += 1
            n_bytes += unit.n_bytes
            match = Match(unit.name, unit.n_bytes, unit.newest_ns)
            self._largest = nlargest(_TOLD, [*self._largest, match], key=lambda one: one.n_bytes)
            self._oldest = nsmallest(_TOLD, [*self._oldest, match], key=lambda one: one.time_ns)
        sums = Sums(n_seen=n_matched, n_matched=n_matched, n_done=n_matched)
        would = self.told(Swept(self._directory, sums, is_stopped=is_stopped or stops(), is_limited=is_limited))
        return would._replace(
            sums=would.sums._replace(n_bytes=n_bytes), largest=tuple(self._largest), oldest=tuple(self._oldest)
        )
