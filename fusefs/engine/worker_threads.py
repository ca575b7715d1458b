"""Threads that run slices: where a server is waited for, Python's lock is no hindrance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic

from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_runners import Done, EndedSlice, RunsSlices, Work


@contextmanager
def worker_threads(n_workers: int, runner: RunsSlices[Work, Done]) -> Iterator[WorkerThreads[Work, Done]]:
    """So many for the block, or fewer where a limit on threads is reached; what they have begun is ended first."""
    workers = WorkerThreads(runner)
    try:
        try:
            for _ in range(n_workers):
                workers.start()
        except RuntimeError:  # what Python makes of pthread_create's EAGAIN
            pass
        yield workers
    finally:
        workers.end()


class WorkerThreads(Generic[Work, Done]):
    """See SlicePool."""

    def __init__(self, runner: RunsSlices[Work, Done]) -> None:
        self.n_workers = 0
        self._runner = runner
        self._threads: list[Thread] = []
        self._submitted: SimpleQueue[tuple[Work, SliceBudget] | None] = SimpleQueue()
        self._ended: SimpleQueue[EndedSlice[Work, Done]] = SimpleQueue()

    def start(self) -> None:
        """One more. Raises  RuntimeError"""
        thread = Thread(target=self._work)
        thread.start()
        self._threads.append(thread)
        self.n_workers += 1

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """See SlicePool."""
        self._submitted.put((work, budget))

    def ended(self, most_s: float) -> list[EndedSlice[Work, Done]]:
        """See SlicePool."""
        slices = []
        try:
            ended = self._ended.get(timeout=most_s)
            while True:
                slices.append(ended)
                ended = self._ended.get_nowait()
        except Empty:
            return slices

    def hasten(self) -> None:
        """See SlicePool: none is."""

    def end(self) -> None:
        """End the threads, each after its slice."""
        for _thread in self._threads:
            self._submitted.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (submitted := self._submitted.get()) is not None:
            outcome = None
            try:
                outcome = self._runner.run(*submitted)
            finally:  # after a mistake of ours the slice is lost with this thread; run alone it raises again
                self._ended.put(EndedSlice(*submitted, outcome))
