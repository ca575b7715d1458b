"""An MPI job without MPI: its ranks are runners in this process that find everything by paths, as if far away."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import cycle
from typing import Any, cast

from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.mpi_ranks import Look, MpiJob, UnseenHere
from fusefs.engine.slice_runners import RankRunner, Recipe
from fusefs.engine.worker_threads import WorkerThreads, worker_threads
from fusefs.linux.kernel import Kernel
from fusefs.reaper.remove_by_ranks import RemovalByRanks


class _CrewHere:
    """See engine.mpi_ranks.RankCrew. No slice but the very first is run by ours, unless another does not see it."""

    def __init__(self, ours: RankRunner[Any, Any], others: list[RankRunner[Any, Any]]) -> None:
        self.ours = ours
        self.n_workers = self.n_ranks = len(others)
        self._others = cycle(others)

    def pool(self) -> AbstractContextManager[WorkerThreads[Any, Any]]:
        return worker_threads(self.n_workers, self)

    def run(self, work: Any, budget: SliceBudget) -> Any:
        try:
            return pickle.loads(pickle.dumps(next(self._others).run(pickle.loads(pickle.dumps(work)), budget)))
        except UnseenHere:
            return self.ours.run(work, budget)


class JobHere:
    """See engine.mpi_ranks.MpiJob."""

    def __init__(self, n_ranks: int = 3) -> None:
        self.n_ranks = n_ranks

    def prepare(self, look: Look) -> None:
        pickle.loads(pickle.dumps(look)).act(Kernel())

    @contextmanager
    def crew(self, ours: AbstractContextManager[RankRunner[Any, Any]], recipe: Recipe[Any, Any]) -> Iterator[_CrewHere]:
        sent = pickle.dumps(recipe)
        with ExitStack() as owned:
            runner = owned.enter_context(ours)
            opened = (pickle.loads(sent).opened(Kernel(), self.n_ranks) for _ in range(1, self.n_ranks))
            yield _CrewHere(runner, [owned.enter_context(one) for one in opened])


def job_here(n_ranks: int = 3) -> RemovalByRanks:
    """As a wish has it."""
    return RemovalByRanks(cast(MpiJob, JobHere(n_ranks)))
