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
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pickle import dumps, loads
from queue import Empty, SimpleQueue
from signal import SIG_IGN, SIGINT, signal
from socket import socket
from threading import Thread
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from fusefs.core.pacing import SliceBudget
from fusefs.core.results import Stops
from fusefs.engine.pace import GLANCE_S, SliceDone, SlicePace
from fusefs.engine.strategy import Strategy, Workers
from fusefs.linux.children import Child, ChildLost, is_stopped, receive, send
from fusefs.linux.kernel import Kernel


class HasFds(Protocol):
    """A value that pickles, but for the fds in it."""

    def fds(self) -> Sequence[int]:
        """They."""

    def with_fds(self, fds: Sequence[int]) -> Self:
        """The value in the process that they came to, where they have these numbers."""


class SliceOutcome(HasFds, SliceDone, Protocol):
    """What comes back of a slice."""

    @property
    def goes_on(self) -> bool:
        """It is not over: this is what it did since it was told of last."""


Work = TypeVar("Work", bound=HasFds)
Done = TypeVar("Done", bound=SliceOutcome)
_Work_contra = TypeVar("_Work_contra", bound=HasFds, contravariant=True)
_Done_co = TypeVar("_Done_co", bound=SliceOutcome, covariant=True)


class RunsSlices(Protocol[_Work_contra, _Done_co]):
    """What runs a slice; a worker gets its own copy by fork."""

    def run(self, work: _Work_contra, budget: SliceBudget) -> _Done_co:
        """Do it. Its fds stay their owner's; those that come back with it may be the same."""


class EndedSlice(NamedTuple, Generic[Work, Done]):
    """A slice that no worker has any more. outcome: None: it was lost with its worker, not known how far it came"""

    work: Work
    budget: SliceBudget
    outcome: Done | None


class SlicePool(Protocol[Work, Done]):
    """What runs slices beside each other: the one place that knows where.

    n_workers  how many slices may run at a time; fewer than were asked for where the system refuses more
    """

    n_workers: int

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """Have a slice done; no more of them at a time than there are workers."""

    def ended(self, most_s: float) -> list[EndedSlice[Work, Done]]:
        """Those that have ended since; waits for the first, but no longer than that. Raises  mistakes of ours"""

    def hasten(self) -> None:
        """Have those end soon that are longer than others; what is left of them comes back."""


class SharedSlice(Protocol[Work, Done]):
    """A slice that several threads do: the plan of what is in it."""

    def is_dry(self) -> bool:
        """See SliceSource."""

    def is_crowded(self) -> bool:
        """Whether what `next` gives is in a directory where others are at work, who are slower for it."""

    def next(self) -> Work | None:
        """See SliceSource."""

    def lost(self, lost: Work) -> None:
        """See SliceSource."""

    def done(self, part: Work, outcome: Done) -> None:
        """Take in what a part of it did."""

    def told(self, *, goes_on: bool) -> Done:
        """What was done since it was told of last; unless it goes on, with what is left of it."""


class SharesSlices(Protocol[Work, Done]):
    """A rank of an MPI job whose threads share slices. strategy: the rank's own, so many threads"""

    @property
    def strategy(self) -> Strategy: ...

    def shared(self, work: Work) -> SharedSlice[Work, Done]:
        """A slice as all of them do it."""


class RankRunner(SharesSlices[Work, Done], RunsSlices[Work, Done], Protocol[Work, Done]):
    """What runs slices in a rank of an MPI job."""

    def may_share(self, work: Work) -> bool:
        """Whether a slice is for all threads of a rank, and not for one of them; of the first rank."""


class Recipe(Protocol[Work, Done]):
    """What a rank makes its runner of; it pickles."""

    def opened(self, kernel: Kernel, n_ranks: int) -> AbstractContextManager[RankRunner[Work, Done]]:
        """The runner. Raises  TrashdError, OSError: the rank does not see what is to be worked on"""


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


@contextmanager
def worker_processes(n_workers: int, runner: RunsSlices[Work, Done]) -> Iterator[WorkerProcesses[Work, Done]]:
    """So many for the block, or fewer where a limit on processes is reached; all are gone in the end."""
    workers = WorkerProcesses(runner)
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

    def __init__(self, runner: RunsSlices[Work, Done]) -> None:
        self.n_workers = 0
        self._runner = runner
        self._children: list[Child] = []
        self._free: list[Child] = []
        self._running: dict[int, tuple[Child, Work, SliceBudget]] = {}  # by their channels' fds
        self._heard = select.poll()

    def fork(self) -> None:
        """One more. Raises  OSError"""
        child = Child(partial(_work, self._runner))
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
        return [self._end_slice(fd) for fd in heard or self._stopped()]

    def hasten(self) -> None:
        """See SlicePool: none is."""

    def _stopped(self) -> list[int]:
        return [fd for fd, (child, _work, _budget) in self._running.items() if is_stopped(child.pid)]

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


def _work(runner: RunsSlices[Work, Done], channel: socket) -> None:
    """A worker's life: it leaves Ctrl-C to its parent."""
    signal(SIGINT, SIG_IGN)
    while True:
        try:
            message, fds = receive(channel)
        except EOFError:
            return
        work, budget = loads(message)
        done = runner.run(work.with_fds(fds), budget)
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
        if self.strategy.workers is Workers.THREADS:
            return worker_threads(self.strategy.n_workers, self.runner)
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
