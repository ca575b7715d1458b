"""Threads that serve while the loop's own waits for the backing filesystem: which call will wait can't be foretold.

A thread looks every two milliseconds whether that one, or one of the native core's, is in the same call as at its last
look, and is held up there. If so it lets others have the tables, as any thread does for each call that it makes, and
another thread reads the kernel's requests: it does what looks at something itself, and has changes done by helpers,
since those wait where one of them waits. When it is in the same request for two milliseconds it is replaced in its
turn; its call goes on, and it ends with it. When it comes back it goes on where it was, and reads again, which ends the
stand-in. While no call is made, no thread looks.

Source  docs/decisions/0021-stand-ins.md
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable

from fusefs.mount.requests.fuse_operations import WaitClass
from fusefs.mount.requests.fuse_requests import FuseRequests, RequestReader
from fusefs.mount.requests.thread_pool import PoolTask, ThreadPool
from fusefs.mount.tables.tables_lock import TablesLock

_LOOK_S, _SELDOM_S = 0.002, 0.02
_N_IN_VAIN = 3
"""Looks at a thread that has made no call before none looks any more."""
_POLL_MS = 50
_WORD_S = 0.5

_log = logging.getLogger(__name__)


class StandbyReaders:
    """Those of one mount."""

    def __init__(self, lock: TablesLock, requests: FuseRequests, pool: ThreadPool, alive: Callable[[], object]) -> None:
        """Begin with none; no thread looks yet. On the loop's own thread.

        alive  tells the service manager so, while that thread can't
        """
        self._lock = lock
        self._requests = requests
        self._pool = pool
        self._alive = alive
        self._told_s = 0.0
        self._mutex = threading.Lock()
        self._reader: RequestReader | None = None
        """The stand-in that reads now; under the mutex."""
        self._n_replaced = 0
        """Of those that read before, those that have not come back yet; under the mutex."""
        self._seen_reader: tuple[RequestReader | None, int] = (None, 0)
        self._seen_tasks: set[PoolTask] = set()
        self._has_ended = False

    def begin(self) -> None:
        """Look from now on."""
        self._lock.watch()
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def end(self) -> None:
        """Look no more: the mount is gone."""
        self._has_ended = True
        self._lock.wakes.set()

    def _watch(self) -> None:
        n_in_vain = 0
        lock, requests = self._lock, self._requests
        while not self._has_ended:
            time.sleep(_LOOK_S if n_in_vain < _N_IN_VAIN else _SELDOM_S)
            n_in_vain = 0 if self._look() else n_in_vain + 1
            if n_in_vain >= _N_IN_VAIN and not (requests.is_careful or lock.is_away):
                lock.wakes.clear()
                lock.rests = True
                if not lock.is_used and not self._has_ended:
                    lock.wakes.wait()
                lock.rests = False

    def _look(self) -> bool:
        """Have every thread replaced that waits; whether anything goes on."""
        lock, requests = self._lock, self._requests
        is_used, lock.is_used = lock.is_used, False
        goes_on = is_used
        for turn in lock.turns():
            call = turn.under_way()
            goes_on |= call is not None
            # A turn may have made a call by the very same object again; a request of the core's has one for each.
            if call is None or call is not turn.seen_call or (is_used and turn.shared_by is None):
                turn.seen_call = call
                if call is not None:
                    turn.progress.note()
            elif turn.progress.is_held_up() and lock.take_away(turn, call):
                requests.hand_out()
        reader = self._reader
        seen = (reader, 0 if reader is None else reader.n)
        is_new = seen != self._seen_reader
        if lock.is_away and (reader is None or (reader.n % 2 and not is_new)):
            self._replace(reader, seen[1])
        if lock.is_away and time.monotonic() - self._told_s > _WORD_S:
            self._alive()
            self._told_s = time.monotonic()
        self._seen_reader = seen
        at_work = self._pool.at_work() if requests.is_careful else set()
        tasks = {task for task in at_work if task.key[1] == WaitClass.CHANGE}
        is_late = not tasks.isdisjoint(self._seen_tasks)
        self._seen_tasks = tasks
        requests.is_careful = lock.is_away or self._n_replaced > 0 or is_late
        return goes_on or is_new or bool(tasks)

    def _replace(self, reader: RequestReader | None, n: int) -> None:
        """Have another one read, unless the reader has come back meanwhile."""
        with self._mutex:
            if reader is not self._reader or (reader is not None and reader.n != n):
                return
            if reader is not None:
                self._n_replaced += 1
                self._pool.count(reader.key, 1)
            new = self._reader = RequestReader()
        try:
            threading.Thread(target=self._stand_in, args=(new,), daemon=True, name="stand-in").start()
        except RuntimeError:  # no more threads for us; perhaps at the next look
            with self._mutex:
                self._reader = None

    def _stand_in(self, reader: RequestReader) -> None:
        try:
            poll = select.poll()
            poll.register(self._requests.device, select.POLLIN)
            while self._lock.is_away and self._reader is reader and not self._has_ended:
                for _fd, events in poll.poll(_POLL_MS):
                    if events != select.POLLIN or not self._requests.stand_in(reader):
                        self.end()
        finally:
            with self._mutex:
                if self._reader is reader:
                    self._reader = None
                else:
                    self._n_replaced -= 1
                    self._pool.count(reader.key, -1)
