"""What the daemon counts, in a file that it has mapped: always true, read by others without asking the daemon.

No writer wakes for it, and when the daemon is killed its last numbers stay.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Final

import trio

from fusefs.core.mount_counters import BOUNDS_NS, N_BUCKETS, CounterLayout, CounterTable, Gauges, Remembering, encode
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.file_locks import lock_open_file
from fusefs.linux.runtime_directories import NEW, make_dir
from fusefs.mount.places import runtime_dir

_LAYOUT: Final = CounterLayout(CounterTable(version="", pid=0, started_ns=0))
CELL_OF: Final = _LAYOUT.operations
"""Where the counters of an operation begin."""
LAYOUT: Final = (
    N_BUCKETS, BOUNDS_NS[0].bit_length() - 1, _LAYOUT.failed, _LAYOUT.total_ns, _LAYOUT.max_ns, _LAYOUT.buckets
)  # fmt: skip
"""For the native core, which counts all requests: many threads do so at once."""
_LAG_S = 0.1
"""From a change to the gauges that tell it: counting everything at each operation would cost more than most of them."""

_log = logging.getLogger(__name__)


class Counters:
    """The numbers of one mount. No operation waits for them: each costs a fraction of a microsecond.

    The native core counts requests; everything else is counted under the tables' lock.
    """

    def __init__(self, cells: memoryview) -> None:
        """cells: of `core.mount_counters.encode`, as numbers that can be changed; in_memory() has some of its own."""
        self.cells = cells
        self._has_changed = trio.Event()
        self.rests = bytearray(1)
        """Whether `changed` is to be called: the native core looks at it, too."""
        self._token: trio.lowlevel.TrioToken | None = None

    @classmethod
    def in_memory(cls) -> Counters:
        """Numbers that no other process sees."""
        return cls(memoryview(bytearray(8 * _LAYOUT.n_cells)).cast("Q"))

    def hit(self, sort: Remembering) -> None:
        """Something was remembered when it was needed."""
        self.cells[_LAYOUT.sorts + 2 * sort] += 1

    def miss(self, sort: Remembering) -> None:
        """Something was not."""
        self.cells[_LAYOUT.sorts + 2 * sort + 1] += 1

    def changed(self) -> None:
        """A gauge may have changed; on any thread."""
        if self.rests[0] and self._token is not None:
            self.rests[0] = 0
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._has_changed.set)

    def mounted(self, device: int) -> None:
        """From now on these are the numbers of the mount that has this st_dev."""
        self.cells[_LAYOUT.device] = device

    async def keep_gauges(self, look: Callable[[], Gauges]) -> None:
        """Set the gauges a moment after something happened, and on while threads work; never while nothing happens.

        Checkpoint  between two looks
        """
        updated_ns = 0
        self._token = trio.lowlevel.current_trio_token()
        while True:
            self._has_changed = trio.Event()
            self.rests[0] = 1  # before the look, or what changes during it is seen by nobody
            gauges = look()
            for at, value in enumerate(gauges, _LAYOUT.gauges):
                self.cells[at] = value
            self.cells[_LAYOUT.updated_ns] = updated_ns  # a reader that sees this sees those, too
            if not gauges.n_threads and not gauges.n_prefetches:  # nothing tells of their end
                await self._has_changed.wait()
            await trio.sleep(_LAG_S)
            updated_ns = time.time_ns()


@contextmanager
def kept(target: bytes) -> Iterator[Counters]:
    """The numbers of a mount to be, all 0, in the file where others look for them; it goes with the mount.

    Without a place for it, or room, the mount works as well, and the log says so.
    """
    path = runtime_dir.file_of(target, runtime_dir.STATS)
    if path is None:
        _log.info("%s: `trashd status` shows no numbers, since there is no runtime directory", printable(target))
        yield Counters.in_memory()
        return
    try:
        fd = _make(path)
    except OSError as error:
        _log.warning("%s: `trashd status` shows no numbers: %s: %s", printable(target), printable(path), error.strerror)
        yield Counters.in_memory()
        return
    with fd:
        try:
            yield Counters(_map(fd))
        finally:
            if not runtime_dir.stands(target):
                _remove(path, fd)


def _make(path: bytes) -> Fd:
    """A new file of zeros, all of it allocated, and locked: a reader can tell that we run."""
    make_dir(os.path.dirname(path))
    with suppress(FileNotFoundError):
        os.unlink(path + NEW)
    fd = Fd(os.open(path + NEW, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closed_on_error(fd):
        text = encode(CounterTable(version=version("trashd"), pid=os.getpid(), started_ns=time.time_ns()))
        with open(fd, "wb", closefd=False) as file:
            file.write(text)
        lock_open_file(fd)
        os.fchmod(fd, 0o644)
        os.rename(path + NEW, path)
    return fd


def _map(fd: Fd) -> memoryview:
    """The counters of the file, to be changed in place."""
    mapped = mmap.mmap(fd, 0)
    return memoryview(mapped)[mapped.size() - 8 * _LAYOUT.n_cells :].cast("Q")


def _remove(path: bytes, fd: Fd) -> None:
    """Take our file away, and a user's directory for it; not another daemon's of the same mount point."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            os.unlink(path)
            if os.geteuid():  # root's is locked by us, and not only for this
                os.rmdir(os.path.dirname(path))
