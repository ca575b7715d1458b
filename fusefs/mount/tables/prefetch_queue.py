"""The batches of names of a listing whose attributes are to be fetched, by threads or by io_uring."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from fusefs.core.inode_table import Node
from fusefs.linux.fd import Fd
from fusefs.linux.statx import look_at, peek, peek_closely
from fusefs.mount.tables.daemon_cache import CacheFill, SeenByName
from fusefs.mount.tables.prefetch_xattrs import PrefetchXattrs
from fusefs.mount.tables.tables_lock import TablesLock

_N_KEPT = 2
"""Batches whose results are at hand for the next reply, whatever the cache remembers."""
_NAMES_MAX, _N_TAKEN_MAX = 1 << 17, 1 << 12
_N_PASSED_MAX = 1 << 10
"""Names of which all is known, at which one question looks: others wait meanwhile."""
_GLANCE_S = 0.001
_PATIENCE_S = 2.0
"""For a name that does not answer; it is then told of without attributes, and a request for them waits."""


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
