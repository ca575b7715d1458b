"""Attributes fetched before they are asked for: many looks at a slow filesystem under way at a time.

Whoever lists a directory is told names alone, at once. When somebody then asks for the attributes of one of them, the
next ones are fetched, more of them the more he asks; so a plain `ls` costs none, and `ls -l` waits a few round trips.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from fusefs.core.inodes import Node
from fusefs.linux.attributes import peek, peek_closely
from fusefs.linux.fd import Fd
from fusefs.mount.gate import Gate
from fusefs.mount.memory import Look, Memory, Seen

_N_THREADS_MAX = 256
"""Of all directories together: what hangs in some leaves others the rest, and nobody depends on these alone."""
_BATCH = 256
_N_WALKS = 16
_NAMES_MAX = 1 << 17
_PATIENCE_S = 2.0
"""For a name that does not answer; it is then told of without attributes, and who asks for them waits for them."""


class Batch:
    """Some names of a directory that several threads look at together, each at the next one."""

    def __init__(
        self,
        gate: Gate,
        look: Look,
        lasting: Callable[[bytes], bytes],
        directory: Node,
        fd: Fd,
        names: Sequence[bytes],
        *,
        is_close: bool,
    ) -> None:
        """Begin.

        fd        of the directory; the batch's own from now on, as the look is
        is_close  extended attributes' names are looked for too
        """
        self._is_close = is_close
        self._lasting = lasting
        self.found: dict[bytes, Seen] = {}
        self.look = look
        self._gate = gate
        self._directory = directory
        self._fd = fd
        self._names = names
        self._numbers = itertools.count()
        self.n_left = len(names)
        self._is_done = threading.Event()

    def work(self) -> None:
        """Look at what nobody has looked at yet; without the tables' lock."""
        for number in self._numbers:
            if number >= len(self._names):
                return
            name = self._names[number]
            try:
                seen, handle, xattrs = peek_closely(self._fd, name) if self._is_close else (*peek(self._fd, name), None)
                self.found[name] = (seen, self._lasting(handle), xattrs)
            except OSError:
                pass  # whoever asks for it is told
            with self._gate.lock:
                self.n_left -= 1
                if not self.n_left:
                    self._finish()

    def _finish(self) -> None:
        self._fd.close()
        self.look.learn_all(self._directory, self.found)
        self.look.end()
        self._is_done.set()

    @property
    def is_done(self) -> bool:
        """Whether all have been looked at."""
        return not self.n_left

    def wait(self) -> None:
        """Until all have been looked at, or one keeps everybody waiting; without the tables' lock."""
        self._is_done.wait(_PATIENCE_S)


class Walk:
    """How far one listing has gone.

    names       told without attributes, which were not fetched since
    n_allowed   how many of them may be fetched, by what was asked for
    is_asked    somebody asks for attributes: what is told from now on has them
    """

    def __init__(self, fd: Fd) -> None:
        """fd: of the directory; the walk's own from now on."""
        self.fd = fd
        self.names: deque[bytes] = deque(maxlen=_NAMES_MAX)
        self.n_allowed = 0
        self.is_asked = False
        self.batch: Batch | None = None

    def is_busy(self) -> bool:
        """Whether something is being fetched for it."""
        return self.batch is not None and not self.batch.is_done


class Ahead:
    """The walks of a mount. To be used with the tables' lock."""

    def __init__(self, gate: Gate, memory: Memory, lasting: Callable[[bytes], bytes], n_in_flight: int) -> None:
        """Begin with none.

        lasting      what of a file handle may be relied on
        n_in_flight  looks under way at a time, for one walk
        """
        self._gate = gate
        self._memory = memory
        self._lasting = lasting
        self._n_in_flight = n_in_flight
        self._walks: OrderedDict[Node, Walk] = OrderedDict()
        self._crew = _Crew()
        self._wants_xattrs = self._is_new = False

    @property
    def n_under_way(self) -> int:
        """Names whose attributes are being fetched, or wait for it."""
        return sum(walk.batch.n_left for walk in self._walks.values() if walk.batch is not None)

    def close(self) -> None:
        """Fetch nothing any more."""
        for directory in list(self._walks):
            self.drop(directory)

    def begin(self, directory: Node, fd: Fd) -> Walk:
        """A listing begins; fd: of the directory, which stays its owner's."""
        self._wants_xattrs &= self._is_new
        self._is_new = False
        self.drop(directory)
        walk = self._walks[directory] = Walk(Fd(os.dup(fd)))
        if len(self._walks) > _N_WALKS:
            self.drop(next(iter(self._walks)))
        return walk

    def drop(self, directory: Node) -> None:
        """A directory is forgotten, or listed anew."""
        walk = self._walks.pop(directory, None)
        if walk is not None:
            walk.fd.close()

    def asked(self, directory: Node, fd: Fd | None = None) -> None:
        """Somebody asks what a name in this directory is; fd: of the directory, which stays its owner's."""
        walk = self._walks.get(directory)
        if walk is None and fd is not None:
            walk = self._listed_long_ago(directory, fd)
        if walk is None:
            return
        walk.is_asked = True
        walk.n_allowed += self._n_in_flight
        if walk.names and self._memory.is_kept and not walk.is_busy():
            n = min(len(walk.names), walk.n_allowed, _BATCH)
            walk.n_allowed -= n
            self.fetch(walk, directory, walk.fd, [walk.names.popleft() for _ in range(n)])

    def asked_xattr(self) -> None:
        """Somebody asks for an extended attribute, as `ls -l` does of all that it lists: this listing, and the next."""
        self._wants_xattrs = self._is_new = True

    def _listed_long_ago(self, directory: Node, fd: Fd) -> Walk | None:
        """A walk of a directory that the kernel has a listing of, as we have."""
        entries = self._memory.listing(directory)
        if entries is None:
            return None
        walk = self.begin(directory, fd)
        walk.names.extend(name for name, *_ in entries)
        return walk

    def fetch(self, walk: Walk, directory: Node, fd: Fd, names: Sequence[bytes]) -> Batch | None:
        """Begin to look at those of some names that are not remembered.

        fd       of the directory, which stays its owner's
        Returns  None: all are, or too much waits for answers already
        """
        missing = [name for name in names if not self._memory.knows(directory, name)]
        if not missing or self._crew.n_waiting > _N_THREADS_MAX:
            return None
        look = self._memory.looking_ahead()
        walk.batch = batch = Batch(
            self._gate, look, self._lasting, directory, Fd(os.dup(fd)), missing, is_close=self._wants_xattrs
        )
        self._crew.help(batch, min(self._n_in_flight, len(missing)))
        return batch


class _Crew:
    """Threads that take part in batches: as many as are needed, up to a limit. They end with the process."""

    def __init__(self) -> None:
        self._calls: deque[Batch] = deque()
        self._has_calls = threading.Condition()
        self._n_idle = self._n_threads = 0

    @property
    def n_waiting(self) -> int:
        """Calls for help that nobody has heard yet."""
        return len(self._calls)

    def help(self, batch: Batch, n: int) -> None:
        """Have n threads take part: later, where so many are busy."""
        with self._has_calls:
            self._calls.extend([batch] * n)
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
                batch = self._calls.popleft()
            batch.work()
