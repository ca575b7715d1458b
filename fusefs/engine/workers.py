"""Workers for slices, threads or processes: any concurrent.futures.Executor.

Threads serve where a server is waited for. On a local filesystem an unlink takes microseconds and Python's lock
would be the bottleneck, so that each thread there has a process of its own, forked before the threads start;
slices go to it and come back over a socket, their directories as fds. What a slice is, is its runner's to say.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from fusefs.core.lean import Generic
from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_runners import Done, RunsSlices, Work, WorkerLost
from fusefs.engine.strategy import Workers
from fusefs.linux.act_as_user import die_with_parent
from fusefs.linux.child_processes import ChildLost, receive, send, watch


@dataclass(frozen=True, slots=True)
class WorkerPool(Generic[Work, Done]):
    """An executor and what it needs to run slices."""

    executor: Executor
    runner: RunsSlices[Work, Done]

    def submit(self, work: Work, budget: SliceBudget) -> Future[Done]:
        """Have a slice done; the future raises WorkerLost if it is not known what became of it."""
        return self.executor.submit(self.runner.run, work, budget)

    @staticmethod
    def finished(running: Collection[Future[Done]], most_s: float) -> set[Future[Done]]:
        """Those that are finished; waits for the first, but no longer than that."""
        return wait(running, most_s, FIRST_COMPLETED).done


@contextmanager
def worker_pool(n_workers: int, workers: Workers, runner: RunsSlices[Work, Done]) -> Iterator[WorkerPool[Work, Done]]:
    """Workers for the block; all are gone in the end."""
    if workers is Workers.THREADS:
        with ThreadPoolExecutor(n_workers) as pool:
            yield WorkerPool(pool, runner)
        return
    children = _ForkedWorkers(runner)
    try:
        gc.freeze()  # what is here already is not copied by the children's collectors
        for _ in range(n_workers):
            children.fork()
        gc.unfreeze()
        with ThreadPoolExecutor(n_workers) as pool:
            yield WorkerPool(pool, children)
    finally:
        children.end()


class _ForkedWorkers(Generic[Work, Done]):
    """Forked workers: a slice is run by whichever is free."""

    def __init__(self, runner: RunsSlices[Work, Done]) -> None:
        self._runner = runner
        self._children: dict[int, socket.socket] = {}
        self._free: SimpleQueue[int] = SimpleQueue()

    def fork(self) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                for channel in (ours, *self._children.values()):
                    channel.close()
                _work(parent, theirs, self._runner)
            finally:
                os._exit(0)
        theirs.close()
        self._children[pid] = ours
        self._free.put(pid)

    def run(self, work: Work, budget: SliceBudget) -> Done:
        """Have a slice run by a free worker: there is one, as there are as many as threads.

        Raises  WorkerLost
        """
        pid = self._free.get()
        channel = self._children[pid]
        try:
            send(channel, pickle.dumps((work, budget)), work.fds())
            message, fds = receive(channel, watch(pid, channel))
        except (EOFError, OSError, ChildLost) as error:
            # Its user may have stopped it, which must not hold up an administrator; and it must not go on later.
            os.kill(pid, signal.SIGKILL)
            raise WorkerLost from error
        finally:
            self._free.put(pid)  # of one that is lost, its next use fails at once
        done: Done = pickle.loads(message)
        return done.with_fds(fds)

    def end(self) -> None:
        """End all workers; they have nothing to do any more."""
        for pid, channel in self._children.items():
            channel.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _work(parent: int, channel: socket.socket, runner: RunsSlices[Work, Done]) -> None:
    """A worker's life: it dies with its parent, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not die_with_parent(parent):
        return
    while True:
        try:
            message, fds = receive(channel)
        except EOFError:
            return
        work, budget = pickle.loads(message)
        done = runner.run(work.with_fds(fds), budget)
        send(channel, pickle.dumps(done), done.fds())
        for fd in {*fds, *done.fds()}:
            os.close(fd)
