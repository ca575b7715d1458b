"""Processes that run slices, forked from this one: on a local filesystem an unlink takes microseconds, and with threads
Python's lock would be the bottleneck.

Slices go to them and come back over a socket, their directories as fds. What a slice is, is its runner's to say.
"""

from __future__ import annotations

import gc
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import dumps, loads
from signal import SIG_IGN, SIGINT, SIGKILL, signal
from socket import socket, socketpair
from typing import Generic

from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_runners import Done, EndedSlice, RunsSlices, Work
from fusefs.linux.child_channel import ChildLost, die_with_parent, is_stopped, receive, send, watch
from fusefs.linux.fd import closed_on_error


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
        self._channels: dict[int, socket] = {}  # by their pids
        self._free: list[int] = []
        self._running: dict[int, tuple[int, Work, SliceBudget]] = {}  # by their channels' fds
        self._heard = select.poll()

    def fork(self) -> None:
        """One more. Raises  OSError"""
        ours, theirs = socketpair()
        with theirs, closed_on_error(ours):
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                try:
                    for channel in (ours, *self._channels.values()):
                        channel.close()
                    _work(parent, theirs, self._runner)
                finally:
                    os._exit(0)
        self.n_workers += 1
        self._channels[pid] = ours
        self._free.append(pid)

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """See SlicePool."""
        pid = self._free.pop()
        channel = self._channels[pid]
        self._running[channel.fileno()] = pid, work, budget
        self._heard.register(channel, select.POLLIN)
        try:
            send(channel, dumps((work, budget)), work.fds())
        except OSError:
            os.kill(pid, SIGKILL)  # it is lost, which is heard

    def ended(self, most_s: float) -> list[EndedSlice[Work, Done]]:
        """See SlicePool."""
        heard = [fd for fd, _events in self._heard.poll(most_s * 1000)]
        return [self._end_slice(fd) for fd in heard or self._stopped()]

    def hasten(self) -> None:
        """See SlicePool: none is."""

    def _stopped(self) -> list[int]:
        return [fd for fd, (pid, _work, _budget) in self._running.items() if is_stopped(pid)]

    def _end_slice(self, fd: int) -> EndedSlice[Work, Done]:
        pid, work, budget = self._running.pop(fd)
        channel = self._channels[pid]
        self._heard.unregister(fd)
        self._free.append(pid)
        try:
            message, fds = receive(channel, watch(pid, channel))
        except (EOFError, OSError, ChildLost):
            # Its user may have stopped it, which must not hold up an administrator; and it must not go on later.
            os.kill(pid, SIGKILL)
            return EndedSlice(work, budget, None)
        done: Done = loads(message)
        return EndedSlice(work, budget, done.with_fds(fds))

    def end(self) -> None:
        """End all workers; they have nothing to do any more."""
        for pid, channel in self._channels.items():
            channel.close()
            os.kill(pid, SIGKILL)
            os.waitpid(pid, 0)


def _work(parent: int, channel: socket, runner: RunsSlices[Work, Done]) -> None:
    """A worker's life: it dies with its parent, and leaves Ctrl-C to it."""
    signal(SIGINT, SIG_IGN)
    if not die_with_parent(parent):
        return
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
