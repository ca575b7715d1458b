"""io_uring for listings: attributes fetched by threads of the kernel, and one of ours for each queue.

No thread of Python's waits for a name. What is ready to be looked at lies in the kernel, which goes on while others
have Python's lock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from fusefs.linux.fd import Fd
from fusefs.linux.statx_uring import DEPTH, StatxUring, are_possible
from fusefs.mount.tables.daemon_cache import SeenByName
from fusefs.mount.tables.prefetch_queue import PrefetchBatch, PrefetchQueue
from fusefs.mount.tables.prefetch_xattrs import PrefetchXattrs
from fusefs.mount.tables.tables_lock import TablesLock

_N_LOOKS_MAX = 256
"""Of all directories together: what hangs in some leaves others the rest. For what is beyond it there are threads."""
_LINGER_S = 0.1
"""For a queue's next batch; then its ring is given up."""

_log = logging.getLogger(__name__)


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

    def peeks(self, bell: Fd) -> StatxUring[tuple[PrefetchBatch, bytes]] | None:
        """A ring for the thread that asks; None: there is none to be had now."""
        with suppress(OSError):
            return StatxUring(bell, self._n_at_a_time, self.wanted.of, has_handles=self.wanted.has_handles)
        return None

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
        self._bell = Fd(os.eventfd(0, os.EFD_CLOEXEC))
        try:
            threading.Thread(target=self._work, daemon=True, name="ring").start()
        except RuntimeError:
            self._bell.close()
            raise

    def add(self, batch: PrefetchBatch) -> None:
        """Have something looked at; with the tables' lock."""
        self._batches.append(batch)
        os.eventfd_write(self._bell, 1)

    def _work(self) -> None:
        with self._bell:
            peeks = self._rings.peeks(self._bell)
            if peeks is not None:
                with peeks:
                    self._look(peeks)
            else:
                self._look_alone()

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
