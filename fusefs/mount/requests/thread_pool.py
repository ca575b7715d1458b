"""Threads that do what may wait, each one request at a time; a user with too many requests waits for their own.

They are given up, not waited for, when the process ends.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from fusefs.core.fuse_protocol import Answer
from fusefs.linux.thread_progress import run_on_any_core

_N_OF_ONE = 120
"""Requests of one sort that a user may have under way; of what is left to all, half at most."""
_REST_S = 10.0
"""For which a thread waits for more to do."""
_PARKED_BYTES_MAX = 64 << 20
"""Of one user's: a write that waits takes its megabyte."""

Key = tuple[int | None, int]
"""The uid that asks, if known, and the sort of request."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolTask:
    """Something to be done.

    act     what does it; told whether it had to wait for its turn
    unique  the number of the request that it is about; 0: of none
    pid     of the thread that has asked for it
    n_bytes of memory that it takes as long as it waits
    send    sends its reply
    """

    key: Key
    act: Callable[[bool], None]
    unique: int = 0
    pid: int = 0
    n_bytes: int = 0
    send: Callable[[Answer, int], None] | None = None


class ThreadPool:
    """Those of one mount. Any thread may ask them."""

    def __init__(self, n_threads: int) -> None:
        """Begin with none. n_threads: that may be at work at a time"""
        self._n_max = n_threads
        self._mutex = threading.Lock()
        self._n_under_way: Counter[Key] = Counter()
        self._parked: defaultdict[Key, dict[int, PoolTask]] = defaultdict(dict)
        self._n_parked_bytes: Counter[Key] = Counter()
        self._key_of: dict[int, Key] = {}
        self._idle: list[SimpleQueue[PoolTask]] = []

    def do(self, task: PoolTask) -> bool:
        """Have something done, now or when it is its user's turn; False: that user has too much waiting already."""
        with self._mutex:
            if self._has_room(task.key) and self._begin(task):
                return True
            if not self._n_under_way or self._n_parked_bytes[task.key] + task.n_bytes > _PARKED_BYTES_MAX:
                return False
            self._parked[task.key][task.unique or -id(task)] = task
            self._key_of[task.unique or -id(task)] = task.key
            self._n_parked_bytes[task.key] += task.n_bytes
            return True

    def parked(self, unique: int) -> PoolTask | None:
        """A request that still waits for its turn; None: it does not."""
        with self._mutex:
            key = self._key_of.get(unique)
            return None if key is None else self._parked[key][unique]

    def remove(self, unique: int) -> bool:
        """It need not be done any more; False: it has begun."""
        with self._mutex:
            key = self._key_of.get(unique)
            if key is None:
                return False
            self._take(self._parked[key][unique])
            return True

    def n_under_way(self) -> int:
        """How many requests threads are at."""
        with self._mutex:
            return self._n_under_way.total()

    def _has_room(self, key: Key) -> bool:
        n_left = self._n_max - self._n_under_way.total()
        n = self._n_under_way[key]
        return n_left > 0 and n < max(1, min(_N_OF_ONE, n_left // 2))

    def _begin(self, task: PoolTask) -> bool:
        if self._idle:
            self._idle.pop().put(task)
        else:
            try:
                threading.Thread(target=self._work, args=(task,), daemon=True, name="helper").start()
            except RuntimeError:  # no more threads for us: one that is there will do it
                return False
        self._count(task.key, 1)
        return True

    def _count(self, key: Key, n: int) -> None:
        self._n_under_way[key] += n
        if not self._n_under_way[key]:
            del self._n_under_way[key]

    def _take(self, task: PoolTask) -> None:
        """It waits no more; its user is behind the others now."""
        key, number = task.key, task.unique or -id(task)
        del self._key_of[number]
        parked = self._parked.pop(key)
        del parked[number]
        if parked:
            self._parked[key] = parked
            self._n_parked_bytes[key] -= task.n_bytes
        else:
            del self._n_parked_bytes[key]

    def _next(self) -> PoolTask | None:
        """A task of the user whose turn it is."""
        for key, parked in self._parked.items():
            if self._has_room(key):
                return next(iter(parked.values()))
        return None

    def _work(self, first: PoolTask) -> None:
        run_on_any_core()
        task, tasks = first, SimpleQueue[PoolTask]()
        has_waited = False
        while True:
            try:
                task.act(has_waited)
            finally:
                with self._mutex:
                    self._count(task.key, -1)
                    following = self._next()
                    if following is None:
                        self._idle.append(tasks)
                    else:
                        self._take(following)
                        self._count(following.key, 1)
            has_waited = following is not None
            if following is None:
                following = self._wait(tasks)
                if following is None:
                    return
            task = following

    def _wait(self, tasks: SimpleQueue[PoolTask]) -> PoolTask | None:
        with suppress(Empty):
            return tasks.get(timeout=_REST_S)
        with self._mutex:
            if tasks in self._idle:
                self._idle.remove(tasks)
                return None
        return tasks.get()
