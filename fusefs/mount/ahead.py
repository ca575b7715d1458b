"""Attributes fetched before they are asked for: many looks at a slow filesystem under way at a time.

Whoever lists a directory is told names alone, at once. When somebody then asks for the attributes of one of them, the
next ones are fetched, more of them the more he asks; so a plain `ls` costs none, and `ls -l` waits a few round trips.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from fusefs.core.inodes import Node
from fusefs.linux.attributes import look_at, peek, peek_closely
from fusefs.linux.fd import Fd
from fusefs.mount.gate import Gate
from fusefs.mount.memory import Look, Memory, Seen
from fusefs.store.locate import is_stores_own

_N_THREADS_MAX = 256
"""Of all directories together: what hangs in some leaves others the rest, and nobody depends on these alone."""
_BATCH = 256
_N_WALKS = 16
_N_KEPT = 2
"""Batches whose results are at hand for the next reply, whatever the cache remembers."""
_NAMES_MAX, _N_BARE = 1 << 17, 1 << 12
_GLANCE_S = 0.001
_PATIENCE_S = 2.0
"""For a name that does not answer; it is then told of without attributes, and who asks for them waits for them."""


class Batch:
    """Some names of a directory that several threads look at together, each at the next one."""

    def __init__(
        self,
        gate: Gate,
        look: Look,
        directory: Node,
        fd: Fd,
        names: Sequence[bytes],
        *,
        has_handles: bool,
        is_close: bool,
    ) -> None:
        """Begin.

        fd           of the directory; the batch's own from now on, as the look is
        has_handles  file handles can be relied on
        is_close     extended attributes' names are looked for too
        """
        self.found: dict[bytes, Seen | None] = {}
        self.look = look
        self._gate = gate
        self._has_handles = has_handles
        self._directory = directory
        self._fd = fd
        self._names = names
        self._is_close = is_close
        self._numbers, self._n_done = itertools.count(), itertools.count(1)
        self._is_done = threading.Event()
        self.is_open = True
        """Whether there may be something that nobody looks at yet."""

    def work(self) -> None:
        """Look at what nobody has looked at yet; without the tables' lock. The counts are the interpreter's to keep."""
        for number in self._numbers:
            if number >= len(self._names):
                self.is_open = False
                return
            name = self._names[number]
            try:
                self.found[name] = self._look(name)
            except OSError:
                self.found[name] = None  # whoever asks for it is told
            if next(self._n_done) == len(self._names):
                self._finish()

    def _look(self, name: bytes) -> Seen:
        if self._is_close:
            seen, handle, xattrs = peek_closely(self._fd, name)
            return seen, handle if self._has_handles else b"", xattrs
        return (*peek(self._fd, name), None) if self._has_handles else (look_at(self._fd, name), b"", None)

    def _finish(self) -> None:
        with self._gate.lock:
            self._fd.close()
            self.look.learn_all(self._directory, self.found)
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
        """Until these have been looked at, or one of them keeps everybody waiting; without the tables' lock."""
        deadline_s = time.monotonic() + _PATIENCE_S
        wanted = set(self._names).intersection(names)
        while not self._is_done.wait(_GLANCE_S) and time.monotonic() < deadline_s:
            if wanted.issubset(self.found):
                break


class Walk:
    """How far one listing has gone. To be used with the tables' lock.

    names       told without attributes, which were not fetched since
    n_allowed   how many of them may be fetched, by what was asked for
    is_asked    somebody asks for attributes: what is told from now on has them
    n_helpers   threads that look for it
    bare        fetched without the names of extended attributes
    """

    def __init__(self, gate: Gate) -> None:
        self.names: deque[bytes] = deque(maxlen=_NAMES_MAX)
        self.n_allowed = 0
        self.is_asked = False
        self.n_helpers = 0
        self.bare: list[bytes] = []
        self._gate = gate
        self._batches: list[Batch] = []

    def add(self, batch: Batch) -> None:
        """Something more is to be fetched."""
        self._batches = [*self.batches(), batch]

    def batches(self) -> Sequence[Batch]:
        """What is being fetched, and the last that was."""
        self._batches = [one for one in self._batches[:-_N_KEPT] if not one.is_done] + self._batches[-_N_KEPT:]
        return self._batches

    def n_left(self) -> int:
        """Names that are being fetched, or wait for it."""
        return sum(batch.n_left for batch in self._batches)

    def work(self) -> None:
        """Look, until there is nothing more to look at; without the tables' lock."""
        while True:
            with self._gate.lock:
                batch = next((one for one in self._batches if one.is_open), None)
                if batch is None:
                    self.n_helpers -= 1
                    return
            batch.work()


class Ahead:
    """The walks of a mount. To be used with the tables' lock."""

    def __init__(self, gate: Gate, memory: Memory, n_in_flight: int, *, has_handles: bool) -> None:
        """Begin with none.

        has_handles  file handles of the backing filesystem can be relied on
        n_in_flight  looks under way at a time, for one walk
        """
        self._gate = gate
        self._memory = memory
        self._has_handles = has_handles
        self._n_in_flight = n_in_flight
        self._walks: dict[Node, Walk] = {}
        self._crew = _Crew()
        self._wants_xattrs = self._is_new = False

    @property
    def n_under_way(self) -> int:
        """Names whose attributes are being fetched, or wait for it."""
        return sum(walk.n_left() for walk in self._walks.values())

    def begin(self, directory: Node) -> Walk:
        """A listing begins."""
        self._wants_xattrs &= self._is_new
        self._is_new = False
        self.drop(directory)
        walk = self._walks[directory] = Walk(self._gate)
        if len(self._walks) > _N_WALKS:
            self.drop(next(iter(self._walks)))
        return walk

    def drop(self, directory: Node) -> None:
        """A directory is forgotten, or listed anew."""
        self._walks.pop(directory, None)

    def asked(self, directory: Node, fd: Fd | None) -> None:
        """Somebody asks what a name in this directory is.

        fd  of the directory, which stays its owner's; None: it is not open, and nothing is fetched for now
        """
        walk = self._walks.get(directory) or self._listed_long_ago(directory)
        if walk is None:
            return
        walk.is_asked = True
        walk.n_allowed += self._n_in_flight
        if fd is not None and walk.names and self._memory.is_kept and walk.n_left() < self._n_in_flight:
            n = min(len(walk.names), walk.n_allowed, _BATCH)
            walk.n_allowed -= n
            self.fetch(walk, directory, fd, [walk.names.popleft() for _ in range(n)])

    def asked_xattr(self, directory: Node | None, fd: Fd | None) -> None:
        """Somebody asks for an extended attribute, as `ls -l` does of all that it lists: this listing, and the next.

        directory, fd  that has what it is asked of, and was fetched without; None: not known, or not open
        """
        self._wants_xattrs = self._is_new = True
        walk = self._walks.get(directory) if directory is not None else None
        if directory is not None and fd is not None and walk is not None and walk.bare:
            names, walk.bare = walk.bare, []
            self._begin(walk, directory, fd, names)

    def has_no_xattrs(self) -> None:
        """It was asked in vain: there are none here."""
        self._wants_xattrs = self._is_new = False

    def _listed_long_ago(self, directory: Node) -> Walk | None:
        """A walk of a directory that the kernel has a listing of, as we have."""
        entries = self._memory.cache.listing(directory.source, time.monotonic())
        if entries is None:
            return None
        walk = self.begin(directory)
        walk.names.extend(name for name, *_ in entries)
        return walk

    def fetch(self, walk: Walk, directory: Node, fd: Fd, names: Sequence[bytes]) -> None:
        """Begin to look at those of some names that are not remembered.

        Nothing is begun while too much waits for answers, or is open, already. fd: of the directory, its owner's
        """
        missing = [name for name in names if not (is_stores_own(name) or self._memory.knows(directory, name))]
        if missing:
            if not self._wants_xattrs:
                walk.bare = [*walk.bare, *missing][-_N_BARE:]
            self._begin(walk, directory, fd, missing)

    def _begin(self, walk: Walk, directory: Node, fd: Fd, names: Sequence[bytes]) -> None:
        if self._crew.n_waiting > _N_THREADS_MAX:
            return
        try:
            own_fd = Fd(os.dup(fd))
        except OSError:
            return  # too many are open: who asks looks himself
        look, has_handles, is_close = self._memory.looking_ahead(), self._has_handles, self._wants_xattrs
        batch = Batch(self._gate, look, directory, own_fd, names, has_handles=has_handles, is_close=is_close)
        walk.add(batch)
        n_more = min(self._n_in_flight, walk.n_left()) - walk.n_helpers
        if n_more > 0:
            walk.n_helpers += n_more
            self._crew.help(walk, n_more)


class _Crew:
    """Threads that look for walks: as many as are needed, up to a limit. They end with the process."""

    def __init__(self) -> None:
        self._calls: deque[Walk] = deque()
        self._has_calls = threading.Condition()
        self._n_idle = self._n_threads = 0

    @property
    def n_waiting(self) -> int:
        """Calls for help that nobody has heard yet."""
        return len(self._calls)

    def help(self, walk: Walk, n: int) -> None:
        """Have n threads look: later, where so many are busy."""
        with self._has_calls:
            self._calls.extend([walk] * n)
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
                walk = self._calls.popleft()
            walk.work()
