"""Work in slices, done alone or by workers, at a pace, until none is left or it is stopped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, Protocol

from fusefs.core.report import Stops
from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_pace import GLANCE_S, SlicePace
from fusefs.engine.slice_runners import Done, RunsSlices, SlicePool, Work
from fusefs.engine.strategy import Strategy, Workers


class SliceSource(Protocol[Work]):
    """What is to be done, and what a finished slice leaves to do."""

    def is_dry(self) -> bool:
        """Whether there is no work that `next` could give."""

    def next(self) -> Work | None:
        """A slice that may run beside those that do; None if there is none at the moment."""

    def lost(self, lost: Work) -> None:
        """A slice ended with its worker, it is not known how far."""


class SliceRunner(NamedTuple, Generic[Work, Done]):
    """A plan, who does its slices, and how fast.

    done  takes in what a slice did, beside its pace
    opens  what runs them beside each other; None: workers of this machine, as the strategy has them
    """

    plan: SliceSource[Work]
    runner: RunsSlices[Work, Done]
    strategy: Strategy
    pace: SlicePace
    is_stopped: Stops
    done: Callable[[Work, Done], None]
    opens: Callable[[], AbstractContextManager[SlicePool[Work, Done]]] | None = None

    def run(self, first_s: float | None = None) -> None:
        """Do all of it. No worker is forked for what one slice does.

        first_s  the longest that this one may be, if it is to be shorter than others
        """
        self._run_alone(once=True, most_s=first_s)
        is_whole = True
        while not self.plan.is_dry() and not self.is_stopped():
            if is_whole and self._uses_workers():
                with (self.opens or self._workers)() as pool:
                    is_whole = self._run_with(pool)
            else:
                self._run_alone(once=is_whole)

    def _workers(self) -> AbstractContextManager[SlicePool[Work, Done]]:
        # Most of what is asked for is small, and needs none.
        if self.strategy.workers is Workers.THREADS:
            from fusefs.engine.worker_threads import worker_threads

            return worker_threads(self.strategy.n_workers, self.runner)
        from fusefs.engine.worker_processes import worker_processes

        return worker_processes(self.strategy.n_workers, self.runner)

    def _uses_workers(self) -> bool:
        """Whether several slices may run beside each other: not where others use the disk."""
        return self.strategy.n_workers > 1 and self.pace.follow().is_alone

    def _begin(self) -> tuple[Work, SliceBudget] | None:
        """A slice that may begin now, and what it may do; None if the pace or the other slices forbid it."""
        budget = self.pace.budget()
        if budget is None:
            return None
        work = self.plan.next()
        if work is None:
            self.pace.give_back(budget)
            return None
        return work, budget

    def _run_alone(self, *, once: bool, most_s: float | None = None) -> None:
        """Run slices ourselves, all or the next that may begin."""
        while not self.plan.is_dry() and not self.is_stopped():
            begun = self._begin()
            if begun is None:
                self.pace.sleep()
                continue
            work, budget = begun
            if most_s is not None:
                budget = budget._replace(seconds=min(budget.seconds, most_s))
            self._take(work, budget, self.runner.run(work, budget))
            if once:
                return

    def _run_with(self, pool: SlicePool[Work, Done]) -> bool:
        """Keep all workers busy as long as several may be; False if one of them was lost, or there is none: then this
        process goes on alone.
        """
        n_running, is_whole = 0, pool.n_workers > 0
        while True:
            goes_on = is_whole and not self.is_stopped() and self._uses_workers()
            while goes_on and n_running < pool.n_workers and (begun := self._begin()):
                pool.submit(*begun)
                n_running += 1
            if n_running:
                if not goes_on:
                    pool.hasten()
                for work, budget, outcome in pool.ended(GLANCE_S):
                    n_running -= outcome is None or not outcome.goes_on
                    if outcome is None:
                        is_whole = False
                        self.plan.lost(work)
                        self.pace.give_back(budget)
                    else:
                        self._take(work, budget, outcome)
            elif not goes_on or self.plan.is_dry():
                return is_whole
            else:
                self.pace.sleep()

    def _take(self, work: Work, budget: SliceBudget, outcome: Done) -> None:
        """Take in what a slice did."""
        self.pace.done(budget, outcome)
        self.done(work, outcome)
