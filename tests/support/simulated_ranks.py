"""A job of ranks without MPI, threads or a clock: what ends next, and when, is by chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from fusefs.core.pacing import SliceBudget
from fusefs.engine.mpi_ranks import GivenSlice, SlicesOfRanks, SlicesOfThreads
from fusefs.engine.run_slices import Done, SharedSlice, SliceSource, Work
from fusefs.engine.strategy import Strategy, Workers

BUDGET = SliceBudget(1.0)


@dataclass
class ModelRank(Generic[Work, Done]):
    """One rank, without a filesystem (engine.run_slices.SharesSlices)."""

    strategy: Strategy
    shares: Callable[[Work, Strategy], SharedSlice[Work, Done]]

    def shared(self, work: Work) -> SharedSlice[Work, Done]:
        """See SharesSlices."""
        return self.shares(work, self.strategy)


def strategy_of(n_threads: int) -> Strategy:
    """A rank's with so many threads."""
    return Strategy(n_threads, Workers.THREADS, 100, 1 << 20, False, True, 1, True, True, False, None, 0.0)


class ModelJob(Generic[Work, Done]):
    """Ranks, and what they have."""

    def __init__(
        self,
        plan: SliceSource[Work],
        done: Callable[[Work, Done], object],
        ranks: list[ModelRank[Work, Done]],
        may_share: Callable[[Work], bool],
        run: Callable[[Work], Done],
        chance: random.Random,
    ) -> None:
        """Begin.

        plan, done  the first rank's, and how it takes in what a slice did
        run         does a part of a slice, as much of it as it likes
        """
        self._plan, self._done, self._run, self._chance = plan, done, run, chance
        n_slices = [rank.strategy.n_workers for rank in ranks]
        self._n_workers = sum(n_slices)
        self._ranks = SlicesOfRanks[Work, Done](n_slices, may_share)
        self._threads = [SlicesOfThreads[Work, Done](rank) for rank in ranks]
        self._running: list[tuple[SlicesOfThreads[Work, Done], GivenSlice[Work]]] = []
        self._now_s = 0.0
        self.n_asked = 0

    def run(self) -> None:
        """All of it; raises what the plan does."""
        n_under_way = 0
        while True:
            while n_under_way < self._n_workers and (work := self._plan.next()) is not None:
                rank, given = self._ranks.give(work, BUDGET, self._now_s)
                self._threads[rank].take(given, self._now_s)
                n_under_way += 1
            if not n_under_way:
                return
            for rank, left in self._ranks.to_be_left(self._now_s, each=self._chance.random() < 0.1):
                self._threads[rank].take(left, self._now_s)
                self.n_asked += 1
            self._step()
            for threads in self._threads:
                for told in threads.told():
                    work, _budget, outcome = self._ranks.told(told)
                    assert outcome is not None
                    self._done(work, outcome)
                    n_under_way -= not outcome.goes_on

    def _step(self) -> None:
        """A thread comes to an end, or finds nothing."""
        for threads in self._threads:
            while (part := threads.next()) is not None:
                self._running.append((threads, part))
        if not self._running:
            return
        threads, part = self._running.pop(self._chance.randrange(len(self._running)))
        self._now_s += self._chance.choice((0.0, 0.1, 2.0))
        threads.done(part, self._run(part.work), self._now_s)
