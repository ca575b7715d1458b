"""Threads that run slices: where a server is waited for, Python's lock is no hindrance."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic

from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_runners import Done, EndedSlice, RunsSlices, Work


@contextmanager
def worker_threads(n_workers: int, runner: RunsSlices[Work, Done]) -> Iterator[WorkerThreads[Work, Done]]:
    """So many for the block; what they have begun is ended first."""
    with ThreadPoolExecutor(n_workers) as executor:
        yield WorkerThreads(executor, runner)


class WorkerThreads(Generic[Work, Done]):
    """See SlicePool."""

    def __init__(self, executor: Executor, runner: RunsSlices[Work, Done]) -> None:
        self._executor = executor
        self._runner = runner
        self._running: dict[Future[Done], tuple[Work, SliceBudget]] = {}

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """See SlicePool."""
        self._running[self._executor.submit(self._runner.run, work, budget)] = work, budget

    def ended(self, most_s: float) -> list[EndedSlice[Work, Done]]:
        """See SlicePool."""
        done = wait(self._running, most_s, FIRST_COMPLETED).done
        return [EndedSlice(*self._running.pop(future), future.result()) for future in done]

    def hasten(self) -> None:
        """See SlicePool: none is."""
