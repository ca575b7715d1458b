"""Attributes fetched before they are asked for: many looks at a slow filesystem under way at a time.

A listing tells names alone, at once. When the attributes of one of them are then asked for, the
next ones are fetched, ever more of them; so a plain `ls` costs none, and `ls -l` waits a few round trips.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from fusefs.core.inode_table import Node
from fusefs.linux.fd import Fd
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.prefetch_queue import PrefetchBatch, PrefetchQueue
from fusefs.mount.tables.prefetch_uring import PrefetchRings
from fusefs.mount.tables.prefetch_xattrs import PrefetchXattrs
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.store.layout import is_stores_own

_BATCH = 256
_N_QUEUES = 16
_N_THREADS_MAX = 256
"""Of all directories together: what hangs in some leaves others the rest, and no request depends on these alone."""


class Prefetch:
    """The queues of a mount. To be used with the tables' lock."""

    def __init__(
        self, lock: TablesLock, cache: DaemonCache, wanted: PrefetchXattrs, n_in_flight: int, n_fds: int
    ) -> None:
        """Begin with none.

        wanted       what is fetched beside attributes
        n_in_flight  looks under way at a time, for one queue
        n_fds        that looks may have open for a moment
        """
        self._lock = lock
        self._cache = cache
        self._wanted = wanted
        self._n_in_flight = n_in_flight
        self._queues: dict[Node, PrefetchQueue] = {}
        self._threads = PrefetchThreads()
        self._rings = PrefetchRings(lock, wanted, n_in_flight, n_fds)

    @property
    def n_under_way(self) -> int:
        """Names whose attributes are being fetched, or wait for it."""
        return sum(queue.n_left() for queue in self._queues.values())

    def begin(self, directory: Node) -> PrefetchQueue:
        """A listing begins."""
        self._wanted.begin()
        self.drop(directory)
        queue = self._queues[directory] = PrefetchQueue(self._lock)
        if len(self._queues) > _N_QUEUES:
            self.drop(next(iter(self._queues)))
        return queue

    def drop(self, directory: Node) -> None:
        """A directory is forgotten, or listed anew."""
        self._queues.pop(directory, None)

    def asked(self, directory: Node, fd: Fd | None) -> None:
        """A client asks what a name in this directory is.

        fd  of the directory, which stays its owner's; None: it is not open, and nothing is fetched for now
        """
        queue = self._queues.get(directory) or self._listed_long_ago(directory)
        if queue is None:
            return
        queue.is_asked = True
        queue.n_allowed += self._n_in_flight
        if fd is not None and queue.names and self._cache.is_kept and queue.n_left() < self._n_in_flight:
            names = queue.take(min(queue.n_allowed, _BATCH), partial(self._knows, directory))
            queue.n_allowed -= len(names)
            self.fetch(queue, directory, fd, names)

    def asked_xattr(self, name: bytes, node: Node, fd: Fd | None) -> None:
        """A client was told an extended attribute of what is in a directory. fd: of that, as in `asked`"""
        if self._wanted.add(name, is_directory=node.is_directory):
            for queue in self._queues.values():
                queue.take_again()
        if node.parent is not None:
            self.asked(node.parent, fd)

    def _listed_long_ago(self, directory: Node) -> PrefetchQueue | None:
        """The queue of a directory that the kernel has a listing of, as we have."""
        entries = self._cache.metadata.listing(directory.source, time.monotonic())
        if entries is None:
            return None
        queue = self.begin(directory)
        queue.names.extend(name for name, *_ in entries)
        return queue

    def missing(self, queue: PrefetchQueue, directory: Node, names: Sequence[bytes]) -> Sequence[bytes]:
        """Those of some names that are told next of which something is to be fetched."""
        queue.taken(names)
        return [name for name in names if not self._knows(directory, name)]

    def _knows(self, directory: Node, name: bytes) -> bool:
        return is_stores_own(name) or self._cache.knows(directory, name, self._wanted.of)

    def fetch(self, queue: PrefetchQueue, directory: Node, fd: Fd, names: Sequence[bytes]) -> None:
        """Begin to look at some names.

        Nothing is begun while too much waits for answers, or is open, already. fd: of the directory, its owner's
        """
        if not names or self._threads.is_overloaded:
            return
        try:
            own_fd = Fd(os.dup(fd))
        except OSError:
            return  # too many are open: the request looks itself
        look, names = self._cache.looking_ahead(), list(dict.fromkeys(names))
        batch = PrefetchBatch(self._lock, look, directory, own_fd, names, self._wanted)
        queue.add(batch)
        if self._rings.fetch(queue, batch):
            return
        n_allowed = max(1, self._n_in_flight - self._rings.n_at_work(queue))
        n_more = min(n_allowed, queue.n_left()) - queue.n_helpers
        if n_more > 0:
            queue.n_helpers += n_more
            self._threads.help(queue, n_more)


class PrefetchThreads:
    """Threads that look for queues, where there are no rings, or where these can't: for extended attributes.

    As many as are needed, up to a limit. They end with the process.
    """

    def __init__(self) -> None:
        self._calls: deque[PrefetchQueue] = deque()
        self._has_calls = threading.Condition()
        self._n_idle = self._n_threads = 0

    @property
    def is_overloaded(self) -> bool:
        """Whether many calls for help have not been heard yet."""
        return len(self._calls) > _N_THREADS_MAX

    def help(self, queue: PrefetchQueue, n: int) -> None:
        """Have n threads look: later, where so many are busy."""
        with self._has_calls:
            self._calls.extend([queue] * n)
            self._has_calls.notify(n)
            n_new = min(len(self._calls) - self._n_idle, _N_THREADS_MAX - self._n_threads)
            with suppress(RuntimeError):  # no more threads for us: fewer will do
                for _ in range(n_new):
                    threading.Thread(target=self._work, daemon=True, name="ahead").start()
                    self._n_threads += 1

    def _work(self) -> None:
        while True:
            with self._has_calls:
                self._n_idle += 1
                while not self._calls:
                    self._has_calls.wait()
                self._n_idle -= 1
                queue = self._calls.popleft()
            queue.work()
