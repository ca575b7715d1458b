"""Attributes fetched before they are asked for: many looks at a slow filesystem under way at a time.

A listing tells names alone, at once. When the attributes of one of them are then asked for, the
next ones are fetched, ever more of them; so a plain `ls` costs none, and `ls -l` waits a few round trips.

They are fetched by io_uring where that can be had, by threads of the kernel, and one of ours for each queue: no thread
of Python's waits for a name, and what is ready to be looked at lies in the kernel, which goes on while others have
Python's lock. Else they are fetched by threads of ours.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.statx import look_at, peek, peek_closely
from fusefs.linux.statx_uring import DEPTH, StatxUring, are_possible
from fusefs.linux.thread_progress import run_on_any_core
from fusefs.mount.native._core import Node
from fusefs.mount.tables.daemon_cache import CacheFill, DaemonCache, SeenByName
from fusefs.mount.tables.prefetch_xattrs import PrefetchXattrs
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.store.layout import is_stores_own

_BATCH = 256
_N_QUEUES = 16
_N_THREADS_MAX = 256
"""Of all directories together: what hangs in some leaves others the rest, and no request depends on these alone."""
_N_LOOKS_MAX = 256
"""Of all directories together: what hangs in some leaves others the rest. For what is beyond it there are threads."""
_LINGER_S = 0.1
"""For a queue's next batch; then its ring is given up."""
_N_KEPT = 2
"""Batches whose results are at hand for the next reply, whatever the cache remembers."""
_NAMES_MAX, _N_TAKEN_MAX = 1 << 17, 1 << 12
_N_PASSED_MAX = 1 << 10
"""Names of which all is known, at which one question looks: others wait meanwhile."""
_GLANCE_S = 0.001
_PATIENCE_S = 2.0
"""For a name that does not answer; it is then told of without attributes, and a request for them waits."""

_log = logging.getLogger(__name__)


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
        run_on_any_core()
        while True:
            with self._has_calls:
                self._n_idle += 1
                while not self._calls:
                    self._has_calls.wait()
                self._n_idle -= 1
                queue = self._calls.popleft()
            queue.work()


class PrefetchBatch:
    """Some names of a directory that several threads look at together, each at the next one."""

    def __init__(
        self, lock: TablesLock, look: CacheFill, directory: Node, fd: Fd, names: Sequence[bytes], wanted: PrefetchXattrs
    ) -> None:
        """Begin.

        fd      of the directory; the batch's own from now on, as the look is
        wanted  what is looked for beside attributes
        """
        self.found: dict[bytes, SeenByName | None] = {}
        self.look = look
        self._lock = lock
        self._directory = directory
        self._fd = fd
        self._names = names
        self._wanted = wanted
        self._numbers, self._n_done = itertools.count(), itertools.count(1)
        self._is_done = threading.Event()
        self.is_open = True
        """Whether there may be something that no thread looks at yet."""
        self.has_ring = False
        """Whether that is a ring's to look at."""

    def work(self) -> None:
        """Look at what is not looked at yet; without the tables' lock. The counts are the interpreter's to keep."""
        while (following := self.next_name()) is not None:
            _, name = following
            try:
                self.found[name] = self._look(name)
            except OSError:
                self.found[name] = None  # a request for it tells
            if next(self._n_done) == len(self._names):
                with self._lock:
                    self._learn(self.found)
                    self._end()

    def next_name(self) -> tuple[Fd, bytes] | None:
        """What is not looked at yet, for a ring to look at, and the directory's fd until `tell`; None: no more."""
        number = next(self._numbers)
        if number >= len(self._names):
            self.is_open = False
            return None
        return self._fd, self._names[number]

    def tell(self, found: Mapping[bytes, SeenByName | None]) -> None:
        """What a ring has found; without the tables' lock."""
        self.found.update(found)
        with self._lock:
            self._learn(found)
            if any(next(self._n_done) == len(self._names) for _ in found):
                self._end()

    def _learn(self, found: Mapping[bytes, SeenByName | None]) -> None:
        self.look.learn_all(self._directory, found)
        self._wanted.answered_all(found.values())

    def _look(self, name: bytes) -> SeenByName:
        if self._wanted:
            seen, handle, xattrs = peek_closely(self._fd, name, self._wanted.of)
            return seen, handle if self._wanted.has_handles else b"", xattrs
        return (*peek(self._fd, name), {}) if self._wanted.has_handles else (look_at(self._fd, name), b"", {})

    def _end(self) -> None:
        self._fd.close()
        self.look.end()
        self._is_done.set()

    @property
    def n_left(self) -> int:
        """How many have to be looked at yet."""
        return 0 if self.is_done else len(self._names) - len(self.found)

    @property
    def is_done(self) -> bool:
        """Whether all have been looked at."""
        return self._is_done.is_set()

    def wait_for(self, names: Sequence[bytes]) -> None:
        """Until these have been looked at, or one of them keeps all waiting; without the tables' lock."""
        deadline_s = time.monotonic() + _PATIENCE_S
        wanted = set(self._names).intersection(names)
        while not wanted.issubset(self.found) and time.monotonic() < deadline_s:
            if self._is_done.wait(_GLANCE_S):
                break


class PrefetchQueue:
    """How far one listing has gone. To be used with the tables' lock.

    names       told, perhaps without all that was wanted, and not fetched since
    n_allowed   how many of them may be fetched, by what was asked for
    is_asked    a client asks for attributes: what is told from now on has them
    n_helpers   threads that look for it
    """

    def __init__(self, lock: TablesLock) -> None:
        self.names: deque[bytes] = deque(maxlen=_NAMES_MAX)
        self.n_allowed = 0
        self.is_asked = False
        self.n_helpers = 0
        self._lock = lock
        self._taken: deque[bytes] = deque(maxlen=_N_TAKEN_MAX)
        self._batches: list[PrefetchBatch] = []

    def take(self, n: int, knows: Callable[[bytes], bool]) -> Sequence[bytes]:
        """The next names of which something is to be fetched, at most n: passing those of which all is known."""
        found: list[bytes] = []
        for _ in range(min(len(self.names), _N_PASSED_MAX)):
            if len(found) == n:
                break
            name = self.names.popleft()
            self._taken.append(name)
            if not knows(name):
                found.append(name)
        return found

    def taken(self, names: Iterable[bytes]) -> None:
        """Some that are fetched before they are told."""
        self._taken.extend(names)

    def take_again(self) -> None:
        """Something more is wanted of the last ones."""
        self.names.extendleft(reversed(self._taken))
        self._taken.clear()

    def add(self, batch: PrefetchBatch) -> None:
        """Something more is to be fetched."""
        self._batches = [*self.batches(), batch]

    def batches(self) -> Sequence[PrefetchBatch]:
        """What is being fetched, and the last that was."""
        self._batches = [one for one in self._batches[:-_N_KEPT] if not one.is_done] + self._batches[-_N_KEPT:]
        return self._batches

    def n_left(self) -> int:
        """Names that are being fetched, or wait for it."""
        return sum(batch.n_left for batch in self._batches)

    def work(self) -> None:
        """Look, until there is nothing more to look at; without the tables' lock."""
        while True:
            with self._lock:
                batch = next((one for one in self._batches if one.is_open and not one.has_ring), None)
                if batch is None:
                    self.n_helpers -= 1
                    return
            batch.work()


class PrefetchRings:
    """The rings of a mount. To be used with the tables' lock."""

    def __init__(self, lock: TablesLock, wanted: PrefetchXattrs, n_in_flight: int, n_fds: int) -> None:
        """Begin with none.

        wanted       what is looked for beside attributes
        n_in_flight  looks at a time, of one ring
        n_fds        that all of them may have open for a moment
        """
        self._lock = lock
        self.wanted = wanted
        self._n_at_a_time = min(n_in_flight, _N_LOOKS_MAX)
        self._n_rings_max = min(_N_LOOKS_MAX, n_fds // DEPTH) // self._n_at_a_time
        self._rings: dict[PrefetchQueue, _PrefetchRing] = {}
        self._is_told = False

    def fetch(self, queue: PrefetchQueue, batch: PrefetchBatch) -> bool:
        """Have something looked at; False: threads have to. A ring is made for many names, if no thread is at it."""
        if self.wanted.is_list or not self._n_rings_max or not self._are_possible():
            return False
        ring = self._rings.get(queue)
        if ring is None:
            is_worth_it = batch.n_left >= self._n_at_a_time and not queue.n_helpers
            if not is_worth_it or len(self._rings) == self._n_rings_max:
                return False
            try:
                ring = _PrefetchRing(self, queue)
            except (OSError, RuntimeError):  # no fds, or no threads, for more
                return False
            self._rings[queue] = ring
        batch.has_ring = True
        ring.add(batch)
        return True

    def n_at_work(self, queue: PrefetchQueue) -> int:
        """Looks that are under way for a queue."""
        ring = self._rings.get(queue)
        return 0 if ring is None else min(ring.n_under_way, self._n_at_a_time)

    def _are_possible(self) -> bool:
        are_they = are_possible()
        if not self._is_told:
            self._is_told = True
            _log.info("attributes are fetched ahead by %s", "io_uring" if are_they else "threads: no io_uring here")
        return are_they

    def peeks(self, bell: Fd) -> StatxUring[tuple[PrefetchBatch, bytes]]:
        """A ring for the thread that asks. Raises  OSError: there is none to be had now"""
        return StatxUring(bell, self._n_at_a_time, self.wanted.of, has_handles=self.wanted.has_handles)

    def is_over(self, queue: PrefetchQueue, batches: deque[PrefetchBatch]) -> bool:
        """Whether a queue has nothing more to be fetched: its ring is then no more. Without the tables' lock."""
        with self._lock:
            if not batches:
                del self._rings[queue]
            return not batches


class _PrefetchRing:
    """A queue's own, and the thread that has it."""

    def __init__(self, rings: PrefetchRings, queue: PrefetchQueue) -> None:
        """Begin. Raises  OSError, RuntimeError: there is no fd, or no thread, for it"""
        self._rings = rings
        self._queue = queue
        self._batches: deque[PrefetchBatch] = deque()
        self.n_under_way = 0
        """Looks that were begun, and have not ended; its thread's to change."""
        with closed_on_error(Fd(os.eventfd(0, os.EFD_CLOEXEC))) as self._bell:
            threading.Thread(target=self._work, daemon=True, name="ring").start()

    def add(self, batch: PrefetchBatch) -> None:
        """Have something looked at; with the tables' lock."""
        self._batches.append(batch)
        os.eventfd_write(self._bell, 1)

    def _work(self) -> None:
        run_on_any_core()
        with self._bell:
            try:
                peeks = self._rings.peeks(self._bell)
            except OSError:
                self._look_alone()
                return
            with peeks:
                self._look(peeks)

    def _look(self, peeks: StatxUring[tuple[PrefetchBatch, bytes]]) -> None:
        while True:
            self._begin(peeks)
            self.n_under_way = peeks.n_under_way
            if self.n_under_way:
                self._tell(peeks.ended())
            elif not self._batches and not peeks.ended(_LINGER_S) and self._rings.is_over(self._queue, self._batches):
                return

    def _begin(self, peeks: StatxUring[tuple[PrefetchBatch, bytes]]) -> None:
        """As many as there is room for."""
        while self._batches and peeks.has_room():
            batch = self._batches[0]
            following = batch.next_name()
            if following is None:
                self._batches.popleft()
            else:
                dir_fd, name = following
                peeks.begin(dir_fd, name, (batch, name), is_close=bool(self._rings.wanted))

    def _tell(self, ended: Sequence[tuple[tuple[PrefetchBatch, bytes], SeenByName | None]]) -> None:
        found: dict[PrefetchBatch, dict[bytes, SeenByName | None]] = {}
        for (batch, name), one in ended:
            found.setdefault(batch, {})[name] = one
        for batch, names in found.items():
            batch.tell(names)

    def _look_alone(self) -> None:
        """Too many fds are open, or memory is short: one name after the other, then."""
        while not self._rings.is_over(self._queue, self._batches):
            self._batches[0].work()
            self._batches.popleft()
