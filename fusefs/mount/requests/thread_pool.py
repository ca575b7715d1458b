"""Worker threads for requests that may wait; each serves one request at a time. A user with too many requests does not
delay other users.

The process ends without waiting for the threads.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from fusefs.core.fuse_protocol import Answer
from fusefs.linux.thread_progress import allow_all_cores

_N_TASKS_PER_CLASS = 120
"""How many requests of one wait class a user may have in progress, but never more than half of the free threads."""
_IDLE_S = 10.0
"""How long an idle thread waits for another task."""
_QUEUED_BYTES_MAX = 64 << 20
"""Limit for the queued requests of one user and wait class. A queued write may take a megabyte."""

Key = tuple[int | None, int]
"""The user's uid (None for a release), and the wait class of the request."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolTask:
    """A task for a worker.

    function  does the task; its argument states whether the task was queued first
    unique    the request's number; 0: none
    pid       of the thread that sent the request
    n_bytes   memory that the task takes while it is queued
    send      sends the reply
    """

    key: Key
    function: Callable[[bool], None]
    unique: int = 0
    pid: int = 0
    n_bytes: int = 0
    send: Callable[[Answer, int], None] | None = None


class ThreadPool:
    """The workers of one mount. Any thread may call the methods."""

    def __init__(self, n_threads: int) -> None:
        """Set up, without starting a thread. n_threads: how many may be busy at a time"""
        self._n_max = n_threads
        self._mutex = threading.Lock()
        self._n_under_way: Counter[Key] = Counter()
        self._queued: defaultdict[Key, dict[int, PoolTask]] = defaultdict(dict)
        self._n_queued_bytes: Counter[Key] = Counter()
        self._key_of: dict[int, Key] = {}
        self._idle: list[SimpleQueue[PoolTask]] = []

    def submit(self, task: PoolTask) -> bool:
        """Start a task, or queue it behind the user's other tasks.

        Returns  False: neither is possible, because no thread can be started, or the user's queue is full
        """
        with self._mutex:
            if self._has_room(task.key) and self._start(task):
                return True
            if not self._n_under_way or self._n_queued_bytes[task.key] + task.n_bytes > _QUEUED_BYTES_MAX:
                return False
            self._queued[task.key][task.unique or -id(task)] = task
            self._key_of[task.unique or -id(task)] = task.key
            self._n_queued_bytes[task.key] += task.n_bytes
            return True

    def queued_task(self, unique: int) -> PoolTask | None:
        """Return the queued task of a request; None if it is not queued."""
        with self._mutex:
            key = self._key_of.get(unique)
            return None if key is None else self._queued[key][unique]

    def remove(self, unique: int) -> bool:
        """Remove the queued task of a request; return False if it has begun."""
        with self._mutex:
            key = self._key_of.get(unique)
            if key is None:
                return False
            self._dequeue(self._queued[key][unique])
            return True

    def n_under_way(self) -> int:
        with self._mutex:
            return self._n_under_way.total()

    def _has_room(self, key: Key) -> bool:
        n_free = self._n_max - self._n_under_way.total()
        n = self._n_under_way[key]
        return n_free > 0 and n < max(1, min(_N_TASKS_PER_CLASS, n_free // 2))

    def _start(self, task: PoolTask) -> bool:
        if self._idle:
            self._idle.pop().put(task)
        else:
            try:
                threading.Thread(target=self._run_worker, args=(task,), daemon=True, name="helper").start()
            except RuntimeError:  # no more threads are allowed; an existing worker will do the task
                return False
        self._count(task.key, 1)
        return True

    def _count(self, key: Key, n: int) -> None:
        self._n_under_way[key] += n
        if not self._n_under_way[key]:
            del self._n_under_way[key]

    def _dequeue(self, task: PoolTask) -> None:
        """Dequeue a task; its user's remaining tasks move behind those of all other users."""
        key, number = task.key, task.unique or -id(task)
        del self._key_of[number]
        queued = self._queued.pop(key)
        del queued[number]
        if queued:
            self._queued[key] = queued
            self._n_queued_bytes[key] -= task.n_bytes
        else:
            del self._n_queued_bytes[key]

    def _next(self) -> PoolTask | None:
        """Return the next queued task whose user may have one more in progress; None if there is none."""
        for key, queued in self._queued.items():
            if self._has_room(key):
                return next(iter(queued.values()))
        return None

    def _run_worker(self, first: PoolTask) -> None:
        allow_all_cores()
        task, tasks = first, SimpleQueue[PoolTask]()
        has_waited = False
        while True:
            try:
                task.function(has_waited)
            finally:
                with self._mutex:
                    self._count(task.key, -1)
                    following = self._next()
                    if following is None:
                        self._idle.append(tasks)
                    else:
                        self._dequeue(following)
                        self._count(following.key, 1)
            has_waited = following is not None
            if following is None:
                following = self._await_task(tasks)
                if following is None:
                    return
            task = following

    def _await_task(self, tasks: SimpleQueue[PoolTask]) -> PoolTask | None:
        with suppress(Empty):
            return tasks.get(timeout=_IDLE_S)
        with self._mutex:
            if tasks in self._idle:
                self._idle.remove(tasks)
                return None
        return tasks.get()
