"""Running slices of work at a pace, alone or by worker processes or threads, until none is left or it is stopped.

On a local filesystem an unlink takes microseconds, and with threads Python's lock would be the bottleneck: workers are
processes forked from this one, which get slices over a socket, their directories as fds. Where a server is waited for,
threads do.
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

from fusefs.core.pacing import SliceBudget, WorkDone
from fusefs.core.results import Stops
from fusefs.engine.pace import GLANCE_S, SlicePace
from fusefs.engine.strategy import Strategy, Workers
from fusefs.linux.children import Child, ChildLost, is_stopped, receive, send


class HasFds(Protocol):
    """A value that pickles, but for the fds in it."""

    def fds(self) -> Sequence[int]:
        """They."""

    def with_fds(self, fds: Sequence[int]) -> Self:
        """The value in the process that they came to, where they have these numbers."""


class SliceOutcome(HasFds, Protocol):
    """What comes back of a slice: entries removed, bytes freed, and how long it took."""

    @property
    def removed(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...

    @property
    def busy_s(self) -> float: ...


Task = TypeVar("Task")
Result = TypeVar("Result")
Work = TypeVar("Work", bound=HasFds)
Done = TypeVar("Done", bound=SliceOutcome)


class EndedSlice(NamedTuple, Generic[Task, Result]):
    """A slice that no worker has any more. outcome: None: it was lost with its worker, not known how far it came"""

    work: Task
    budget: SliceBudget
    outcome: Result | None


class SlicePool(Protocol[Work, Done]):
    """What runs slices beside each other: threads, processes, or the ranks of an MPI job.

    n_workers  how many slices may run at a time; fewer than were asked for where the system refuses more
    """

    n_workers: int

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """Have a slice done; no more of them at a time than there are workers."""

    def ended(self, most_s: float) -> list[EndedSlice[Work, Done]]:
        """Those that have ended since; waits for the first, but no longer than that. Raises  mistakes of ours"""


@contextmanager
def worker_threads(n_workers: int, run: Callable[[Task, SliceBudget], Result]) -> Iterator[WorkerThreads[Task, Result]]:
    """So many for the block, or fewer where a limit on threads is reached; what they have begun is ended first."""
    workers = WorkerThreads(run)
    try:
        try:
            for _ in range(n_workers):
                workers.start()
        except RuntimeError:  # what Python makes of pthread_create's EAGAIN
            pass
        yield workers
    finally:
        workers.end()


class WorkerThreads(Generic[Task, Result]):
    """See SlicePool."""

    def __init__(self, run: Callable[[Task, SliceBudget], Result]) -> None:
        self.n_workers = 0
        self._run = run
        self._threads: list[Thread] = []
        self._submitted: SimpleQueue[tuple[Task, SliceBudget] | None] = SimpleQueue()
        self._ended = Queue[EndedSlice[Task, Result]]()

    def start(self) -> None:
        """One more. Raises  RuntimeError"""
        thread = Thread(target=self._work)
        thread.start()
        self._threads.append(thread)
        self.n_workers += 1

    def submit(self, work: Task, budget: SliceBudget) -> None:
        """See SlicePool."""
        self._submitted.put((work, budget))

    def ended(self, most_s: float) -> list[EndedSlice[Task, Result]]:
        """See SlicePool."""
        slices = []
        try:
            ended = self._ended.get(timeout=most_s)
            while True:
                slices.append(ended)
                ended = self._ended.get_nowait()
        except Empty:
            return slices

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
                outcome = self._run(*submitted)
            finally:  # after a mistake of ours the slice is lost with this thread; run alone it raises again
                self._ended.put(EndedSlice(*submitted, outcome))


@contextmanager
def worker_processes(n_workers: int, run: Callable[[Work, SliceBudget], Done]) -> Iterator[WorkerProcesses[Work, Done]]:
    """So many for the block, or fewer where a limit on processes is reached; all are gone in the end."""
    workers = WorkerProcesses(run)
    try:
        gc.freeze()  # what is here already is not copied by the children's collectors
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


class WorkerProcesses(Generic[Work, Done]):
    """See SlicePool: a slice is run by whichever worker is free."""

    def __init__(self, run: Callable[[Work, SliceBudget], Done]) -> None:
        self.n_workers = 0
        self._run = run
        self._children: list[Child] = []
        self._free: list[Child] = []
        self._running: dict[int, tuple[Child, Work, SliceBudget]] = {}  # by their channels' fds
        self._heard = select.poll()

    def fork(self) -> None:
        """One more. Raises  OSError"""
        child = Child(partial(_work, self._run))
        self.n_workers += 1
        self._children.append(child)
        self._free.append(child)

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """See SlicePool."""
        child = self._free.pop()
        self._running[child.channel.fileno()] = child, work, budget
        self._heard.register(child.channel, select.POLLIN)
        try:
            child.send(dumps((work, budget)), work.fds())
        except ChildLost:
            child.kill()  # which is heard

    def ended(self, most_s: float) -> list[EndedSlice[Work, Done]]:
        """See SlicePool."""
        heard = [fd for fd, _events in self._heard.poll(most_s * 1000)]
        stopped = (fd for fd, (child, _work, _budget) in self._running.items() if is_stopped(child.pid))
        return [self._end_slice(fd) for fd in heard or list(stopped)]

    def _end_slice(self, fd: int) -> EndedSlice[Work, Done]:
        child, work, budget = self._running.pop(fd)
        self._heard.unregister(fd)
        self._free.append(child)
        try:
            message, fds = child.receive()
        except ChildLost:
            # Its user may have stopped it, which must not hold up an administrator; and it must not go on later.
            child.kill()
            return EndedSlice(work, budget, None)
        done: Done = loads(message)
        return EndedSlice(work, budget, done.with_fds(fds))

    def end(self) -> None:
        """End all workers; they have nothing to do any more."""
        for child in self._children:
            child.end()


def _work(run: Callable[[Work, SliceBudget], Done], channel: socket) -> None:
    """A worker's life: it leaves Ctrl-C to its parent."""
    signal(SIGINT, SIG_IGN)
    while True:
        try:
            message, fds = receive(channel)
        except EOFError:
            return
        work, budget = loads(message)
        done = run(work.with_fds(fds), budget)
        send(channel, dumps(done), done.fds())
        for fd in {*fds, *done.fds()}:
            os.close(fd)


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

    run_slice  runs one; a worker process has its own copy by fork. Its fds stay their owner's; those that come back
               with it may be the same
    done  takes in what a slice did, beside its pace
    pool  what runs them beside each other; None: workers of this machine, as the strategy has them
    """

    plan: SliceSource[Work]
    run_slice: Callable[[Work, SliceBudget], Done]
    strategy: Strategy
    pace: SlicePace
    is_stopped: Stops
    done: Callable[[Work, Done], None]
    pool: SlicePool[Work, Done] | None = None

    def run(self, first_s: float | None = None) -> None:
        """Do all of it. No worker is forked for what one slice does.

        first_s  the longest that this one may be, if it is to be shorter than others
        """
        self._run_alone(once=True, most_s=first_s)
        is_whole = True
        while not self.plan.is_dry() and not self.is_stopped():
            if is_whole and self._uses_workers():
                with self._workers() as pool:
                    is_whole = self._run_with(pool)
            else:
                self._run_alone(once=is_whole)

    def _workers(self) -> AbstractContextManager[SlicePool[Work, Done]]:
        if self.pool is not None:
            return nullcontext(self.pool)
        if self.strategy.workers is Workers.THREADS:
            return worker_threads(self.strategy.n_workers, self.run_slice)
        return worker_processes(self.strategy.n_workers, self.run_slice)

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
            self._take(work, budget, self.run_slice(work, budget))
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
                for work, budget, outcome in pool.ended(GLANCE_S):
                    n_running -= 1
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
        self.pace.done(budget, WorkDone(outcome.removed, outcome.n_bytes, outcome.busy_s))
        self.done(work, outcome)
