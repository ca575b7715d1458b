"""Run slices of work at a pace, in this process or in workers, until no work remains or the caller stops them.

On a local filesystem an unlink takes microseconds, and Python's lock would be a bottleneck for threads. The workers are
then processes forked from this one; they receive slices over a socket, with the directories as fds. Workers that mostly
wait for a server are threads.
"""

from __future__ import annotations

import gc
import os
import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pickle import dumps, loads
from queue import Empty, Queue, SimpleQueue
from signal import SIG_IGN, SIGINT, signal
from socket import socket
from threading import Thread
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from fusefs.core.pacing import SliceBudget, WorkTotals
from fusefs.core.results import ShouldStop
from fusefs.engine.pace import REACTION_S, SlicePace
from fusefs.engine.strategy import Strategy, Workers
from fusefs.linux.children import Child, ChildLost, is_stopped, receive, send


class HasFds(Protocol):
    """A value that can be pickled, except for the fds in it."""

    def fds(self) -> Sequence[int]:
        """Return the fds in the value."""

    def with_fds(self, fds: Sequence[int]) -> Self:
        """Return the value for the receiving process, in which the fds have these numbers."""


class SliceOutcome(HasFds, Protocol):
    """The result of a slice: the entries removed, the bytes freed, and the time taken."""

    @property
    def removed(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...

    @property
    def busy_s(self) -> float: ...


Task = TypeVar("Task")
Result = TypeVar("Result")
Work = TypeVar("Work", bound=HasFds)
Outcome = TypeVar("Outcome", bound=SliceOutcome)


class EndedSlice(NamedTuple, Generic[Task, Result]):
    """A slice that is no longer running. outcome: None if it was lost with its worker, so its progress is unknown"""

    work: Task
    budget: SliceBudget
    outcome: Result | None


class SlicePool(Protocol[Work, Outcome]):
    """Runs slices in parallel: threads, processes, or the ranks of an MPI job.

    n_workers  how many slices may run at a time; fewer than requested if the system refuses more
    """

    n_workers: int

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """Start a slice; there must be a free worker."""

    def collect_ended(self, most_s: float) -> list[EndedSlice[Work, Outcome]]:
        """Return the slices that have ended, after waiting up to most_s for the first one."""


@contextmanager
def worker_threads(
    n_workers: int, run_slice: Callable[[Task, SliceBudget], Result]
) -> Iterator[WorkerThreads[Task, Result]]:
    """Provide n_workers threads, or fewer if a system limit is reached. On exit, wait for the running slices."""
    workers = WorkerThreads(run_slice)
    try:
        try:
            for _ in range(n_workers):
                workers.start()
        except RuntimeError:  # Python raises this if pthread_create returns EAGAIN
            pass
        yield workers
    finally:
        workers.end()


class WorkerThreads(Generic[Task, Result]):
    """Threads that run slices. See SlicePool."""

    def __init__(self, run_slice: Callable[[Task, SliceBudget], Result]) -> None:
        self.n_workers = 0
        self._run_slice = run_slice
        self._threads: list[Thread] = []
        self._submitted: SimpleQueue[tuple[Task, SliceBudget] | None] = SimpleQueue()
        self._ended = Queue[EndedSlice[Task, Result]]()

    def start(self) -> None:
        """Start one more thread. Raises  RuntimeError"""
        thread = Thread(target=self._serve_slices)
        thread.start()
        self._threads.append(thread)
        self.n_workers += 1

    def submit(self, work: Task, budget: SliceBudget) -> None:
        self._submitted.put((work, budget))

    def collect_ended(self, most_s: float) -> list[EndedSlice[Task, Result]]:
        slices = []
        try:
            ended = self._ended.get(timeout=most_s)
            while True:
                slices.append(ended)
                ended = self._ended.get_nowait()
        except Empty:
            return slices

    def end(self) -> None:
        """End the threads, each after its current slice."""
        for _thread in self._threads:
            self._submitted.put(None)
        for thread in self._threads:
            thread.join()

    def _serve_slices(self) -> None:
        while (submitted := self._submitted.get()) is not None:
            outcome = None
            try:
                outcome = self._run_slice(*submitted)
            finally:  # after a bug, the slice is lost with this thread; the main thread repeats it, and raises
                self._ended.put(EndedSlice(*submitted, outcome))


@contextmanager
def worker_processes(
    n_workers: int, run_slice: Callable[[Work, SliceBudget], Outcome]
) -> Iterator[WorkerProcesses[Work, Outcome]]:
    """Provide n_workers processes, or fewer if a system limit is reached. On exit, end all of them."""
    workers = WorkerProcesses(run_slice)
    try:
        gc.freeze()  # keeps the children's garbage collectors from copying existing objects
        try:
            for _ in range(n_workers):
                workers.fork()
        except BlockingIOError:  # fork(2): EAGAIN
            pass
        finally:
            gc.unfreeze()
        yield workers
    finally:
        workers.end()


class WorkerProcesses(Generic[Work, Outcome]):
    """Forked processes that run slices; a slice runs in any free process. See SlicePool."""

    def __init__(self, run_slice: Callable[[Work, SliceBudget], Outcome]) -> None:
        self.n_workers = 0
        self._run_slice = run_slice
        self._children: list[Child] = []
        self._free: list[Child] = []
        self._running: dict[int, tuple[Child, Work, SliceBudget]] = {}  # by the fd of the child's channel
        self._poll = select.poll()

    def fork(self) -> None:
        """Fork one more worker. Raises  OSError"""
        child = Child(partial(_serve_slices, self._run_slice))
        self.n_workers += 1
        self._children.append(child)
        self._free.append(child)

    def submit(self, work: Work, budget: SliceBudget) -> None:
        child = self._free.pop()
        self._running[child.channel.fileno()] = child, work, budget
        self._poll.register(child.channel, select.POLLIN)
        try:
            child.send(dumps((work, budget)), work.fds())
        except ChildLost:
            child.kill()  # poll() reports its end

    def collect_ended(self, most_s: float) -> list[EndedSlice[Work, Outcome]]:
        readable_fds = [fd for fd, _events in self._poll.poll(most_s * 1000)]
        stopped = (fd for fd, (child, _work, _budget) in self._running.items() if is_stopped(child.pid))
        return [self._end_slice(fd) for fd in readable_fds or list(stopped)]

    def _end_slice(self, fd: int) -> EndedSlice[Work, Outcome]:
        child, work, budget = self._running.pop(fd)
        self._poll.unregister(fd)
        self._free.append(child)
        try:
            message, fds = child.receive()
        except ChildLost:
            # A user may have stopped the process. It must not delay an administrator, and must not continue later.
            child.kill()
            return EndedSlice(work, budget, None)
        outcome: Outcome = loads(message)
        return EndedSlice(work, budget, outcome.with_fds(fds))

    def end(self) -> None:
        """End all workers, which must be idle."""
        for child in self._children:
            child.end()


def _serve_slices(run_slice: Callable[[Work, SliceBudget], Outcome], channel: socket) -> None:
    """Run the slices that arrive on the channel until the parent closes it. Only the parent handles Ctrl-C."""
    signal(SIGINT, SIG_IGN)
    while True:
        try:
            message, fds = receive(channel)
        except EOFError:
            return
        work, budget = loads(message)
        outcome = run_slice(work.with_fds(fds), budget)
        send(channel, dumps(outcome), outcome.fds())
        for fd in {*fds, *outcome.fds()}:
            os.close(fd)


class SliceSource(Protocol[Work]):
    """A plan of slices: supplies work and takes back unfinished work."""

    def is_dry(self) -> bool:
        """Whether there is no work for `next` to return."""

    def next(self) -> Work | None:
        """Return a slice that may run in parallel with the running ones, or None if there is none at the moment."""

    def lost(self, lost: Work) -> None:
        """Account for a slice that was lost with its worker; how much of it was done is unknown."""


class SliceRunner(NamedTuple, Generic[Work, Outcome]):
    """Runs the slices of a plan at a pace.

    run_slice  runs one slice; each forked worker has its own copy of this function's state. The caller still owns the
               fds in the work; the result may contain the same fds
    on_slice_end  called with each slice and its result, after the pace has accounted for it
    pool  runs slices in parallel; None: workers on this machine, as chosen by the strategy
    """

    plan: SliceSource[Work]
    run_slice: Callable[[Work, SliceBudget], Outcome]
    strategy: Strategy
    pace: SlicePace
    is_stopped: ShouldStop
    on_slice_end: Callable[[Work, Outcome], None]
    pool: SlicePool[Work, Outcome] | None = None

    def run_plan(self, first_s: float | None = None) -> None:
        """Run the whole plan. No workers are started for a plan with a single slice.

        first_s  the longest duration of the first slice, if it is to be shorter than the others
        """
        self._run_in_process(once=True, most_s=first_s)
        is_whole = True
        while not self.plan.is_dry() and not self.is_stopped():
            if is_whole and self._uses_workers():
                with self._workers() as pool:
                    is_whole = self._run_in_pool(pool)
            else:
                self._run_in_process(once=is_whole)

    def _workers(self) -> AbstractContextManager[SlicePool[Work, Outcome]]:
        if self.pool is not None:
            return nullcontext(self.pool)
        if self.strategy.workers is Workers.THREADS:
            return worker_threads(self.strategy.n_workers, self.run_slice)
        return worker_processes(self.strategy.n_workers, self.run_slice)

    def _uses_workers(self) -> bool:
        """Return whether several slices may run in parallel, which they never may while others use the disk."""
        return self.strategy.n_workers > 1 and self.pace.follow().is_alone

    def _begin(self) -> tuple[Work, SliceBudget] | None:
        """Return a slice that may start now, and its budget, or None if the pace or the plan allows none now."""
        budget = self.pace.budget()
        if budget is None:
            return None
        work = self.plan.next()
        if work is None:
            self.pace.give_back(budget)
            return None
        return work, budget

    def _run_in_process(self, *, once: bool, most_s: float | None = None) -> None:
        """Run slices in this process: all of them, or only the next one."""
        while not self.plan.is_dry() and not self.is_stopped():
            begun = self._begin()
            if begun is None:
                self.pace.sleep()
                continue
            work, budget = begun
            if most_s is not None:
                budget = budget._replace(seconds=min(budget.seconds, most_s))
            self._account(work, budget, self.run_slice(work, budget))
            if once:
                return

    def _run_in_pool(self, pool: SlicePool[Work, Outcome]) -> bool:
        """Keep all workers busy while several slices may run.

        Returns False if a worker was lost or there is none; then this process must run the remaining slices itself.
        """
        n_running, is_whole = 0, pool.n_workers > 0
        while True:
            goes_on = is_whole and not self.is_stopped() and self._uses_workers()
            while goes_on and n_running < pool.n_workers and (begun := self._begin()):
                pool.submit(*begun)
                n_running += 1
            if n_running:
                for work, budget, outcome in pool.collect_ended(REACTION_S):
                    n_running -= 1
                    if outcome is None:
                        is_whole = False
                        self.plan.lost(work)
                        self.pace.give_back(budget)
                    else:
                        self._account(work, budget, outcome)
            elif not goes_on or self.plan.is_dry():
                return is_whole
            else:
                self.pace.sleep()

    def _account(self, work: Work, budget: SliceBudget, outcome: Outcome) -> None:
        self.pace.finish_slice(budget, WorkTotals(outcome.removed, outcome.n_bytes, outcome.busy_s))
        self.on_slice_end(work, outcome)
