"""Who runs slices: any concurrent.futures.Executor.

Threads serve where a server is waited for. On a local filesystem an unlink takes microseconds and Python's lock
would be the bottleneck, so that each thread there has a process of its own, forked before the threads start;
slices go to it and come back over a socket, their directories as fds.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Protocol

from fusefs.core.budget import Budget
from fusefs.core.slices import Outcome, Slice
from fusefs.linux.channel import receive, send
from fusefs.linux.children import ChildLost, watch
from fusefs.linux.credentials import die_with_parent
from fusefs.reaper.strategy import Workers


class WorkerLost(Exception):
    """A worker ended in the middle of a slice; how far it came is not known."""


class Runs(Protocol):
    """What runs a slice; a worker gets its own copy by fork."""

    def run(self, work: Slice, budget: Budget) -> Outcome:
        """Do it."""


class Crew:
    """An executor and what it needs to run slices."""

    def __init__(self, executor: Executor, runner: Runs) -> None:
        self._executor = executor
        self._runner = runner

    def submit(self, work: Slice, budget: Budget) -> Future[Outcome]:
        """Have a slice done; the future raises WorkerLost if nobody knows what became of it."""
        return self._executor.submit(self._runner.run, work, budget)


@contextmanager
def crew_of(n_workers: int, workers: Workers, runner: Runs) -> Iterator[Crew]:
    """A crew for the block; all its workers are gone in the end."""
    if workers is Workers.THREADS:
        with ThreadPoolExecutor(n_workers) as pool:
            yield Crew(pool, runner)
        return
    children = _Children(runner)
    try:
        gc.freeze()  # what is here already is not copied by the children's collectors
        for _ in range(n_workers):
            children.fork()
        gc.unfreeze()
        with ThreadPoolExecutor(n_workers) as pool:
            yield Crew(pool, children)
    finally:
        children.end()


class _Children:
    """Forked workers: a slice is run by whichever is free."""

    def __init__(self, runner: Runs) -> None:
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

    def run(self, work: Slice, budget: Budget) -> Outcome:
        """Have a slice run by a free worker: there is one, as there are as many as threads.

        Raises  WorkerLost
        """
        pid = self._free.get()
        channel = self._children[pid]
        try:
            send(channel, pickle.dumps((work, budget)), [work.fd])
            message, fds = receive(channel, watch(pid, channel))
        except (EOFError, OSError, ChildLost) as error:
            # Its user may have stopped it, which must not hold up an administrator; and it must not go on later.
            os.kill(pid, signal.SIGKILL)
            raise WorkerLost from error
        finally:
            self._free.put(pid)  # of one that is lost, whoever takes it next is told so at once
        outcome: Outcome = pickle.loads(message)
        left = (one._replace(fd=fd) for one, fd in zip(outcome.left, fds, strict=True))
        return outcome._replace(left=tuple(left))

    def end(self) -> None:
        """End all workers; they have nothing to do any more."""
        for pid, channel in self._children.items():
            channel.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _work(parent: int, channel: socket.socket, runner: Runs) -> None:
    """A worker's life: it dies with its parent, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not die_with_parent(parent):
        return
    while True:
        try:
            message, (fd,) = receive(channel)
        except EOFError:
            return
        work, budget = pickle.loads(message)
        with fd:
            outcome = runner.run(work._replace(fd=fd), budget)
            send(channel, pickle.dumps(outcome), [left.fd for left in outcome.left])
        for left in outcome.left:
            os.close(left.fd)
