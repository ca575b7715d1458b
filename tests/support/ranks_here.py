"""An MPI job without MPI: its ranks are threads of this process that find everything by paths, as if far away."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

from fusefs.engine.mpi_ranks import Look, MpiJob, RankCrew, RankThreads
from fusefs.engine.slice_runners import RankRunner, Recipe
from fusefs.linux.kernel import Kernel
from fusefs.reaper.remove_by_ranks import RemovalByRanks


class JobHere:
    """See engine.mpi_ranks.MpiJob."""

    def __init__(self, n_ranks: int = 3) -> None:
        self.n_ranks = n_ranks
        self._ranks: dict[int, RankThreads[Any, Any]] = {}

    def prepare(self, look: Look) -> None:
        pickle.loads(pickle.dumps(look)).act(Kernel())

    @contextmanager
    def crew(
        self, ours: AbstractContextManager[RankRunner[Any, Any]], recipe: Recipe[Any, Any]
    ) -> Iterator[RankCrew[Any, Any]]:
        sent = pickle.dumps(recipe)
        with ExitStack() as owned:
            runner = owned.enter_context(ours)
            n_slices = [runner.strategy.n_workers]
            for rank in range(1, self.n_ranks):
                one = owned.enter_context(pickle.loads(sent).opened(Kernel(), self.n_ranks))
                n_slices.append(one.strategy.n_workers)
                threads = owned.enter_context(ThreadPoolExecutor(one.strategy.n_workers))
                self._ranks[rank] = RankThreads(one, threads)
            yield RankCrew(cast(MpiJob, self), runner, n_slices)

    def send(self, what: Any, rank: int) -> None:
        self._ranks[rank].take(pickle.loads(pickle.dumps(what)))

    def received(self) -> tuple[int, Any] | None:
        for rank, threads in self._ranks.items():
            if told := threads.told(0.0):
                return rank, pickle.loads(pickle.dumps(told))
        return None


def job_here(n_ranks: int = 3) -> RemovalByRanks:
    """As a wish has it."""
    return RemovalByRanks(cast(MpiJob, JobHere(n_ranks)))
