"""The daemon's counters, in a file that it has mapped: always up to date, and read by others without asking the daemon.

Nothing wakes up to write them, and if the daemon is killed, its last numbers stay.
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

from fusefs.core.mount_counters import (
    BOUNDS_NS,
    N_BUCKETS,
    CachedKind,
    CounterLayout,
    CounterTable,
    Gauges,
    encode_counters,
)
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.file_locks import lock_open_file
from fusefs.linux.runtime_directories import NEW, make_dir
from fusefs.mount.places import runtime_dir

_LAYOUT: Final = CounterLayout(CounterTable(version="", pid=0, started_ns=0))
CELL_OF: Final = _LAYOUT.operations
"""By operation: the cell where its counters begin."""
LAYOUT: Final = (
    N_BUCKETS, BOUNDS_NS[0].bit_length() - 1, _LAYOUT.failed, _LAYOUT.total_ns, _LAYOUT.max_ns, _LAYOUT.buckets
)  # fmt: skip
"""For the native core, which counts all requests, in many threads at once."""
_LAG_S = 0.1
"""From a change to the update of the gauges: counting everything for each operation would cost more than most
operations."""

_log = logging.getLogger(__name__)


class Counters:
    """The counters of one mount. Operations do not wait for them: each count takes a fraction of a microsecond.

    The native core counts requests; everything else is counted with the tables lock.
    """

    def __init__(self, cells: memoryview) -> None:
        """cells: from `core.mount_counters.encode`, as numbers that can be changed; in_memory() makes its own."""
        self.cells = cells
        self._has_changed = trio.Event()
        self.needs_wake = bytearray(1)
        """Not 0 if `changed` is to be called after a change. The native core reads it, too."""
        self._token: trio.lowlevel.TrioToken | None = None

    @classmethod
    def in_memory(cls) -> Counters:
        """Make counters that no other process can read."""
        return cls(memoryview(bytearray(8 * _LAYOUT.n_cells)).cast("Q"))

    def count_hit(self, kind: CachedKind) -> None:
        """Count a cache hit."""
        self.cells[_LAYOUT.sorts + 2 * kind] += 1

    def count_miss(self, kind: CachedKind) -> None:
        """Count a cache miss."""
        self.cells[_LAYOUT.sorts + 2 * kind + 1] += 1

    def note_change(self) -> None:
        """Note that a gauge may have changed; by any thread."""
        if self.needs_wake[0] and self._token is not None:
            self.needs_wake[0] = 0
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._has_changed.set)

    def set_device(self, device: int) -> None:
        """Set the st_dev of the mount that is counted."""
        self.cells[_LAYOUT.device] = device

    async def update_gauges(self, read_gauges: Callable[[], Gauges]) -> None:
        """Update the gauges a moment after each change, and while threads work; never wake up while nothing happens.

        Checkpoint  between two updates
        """
        updated_ns = 0
        self._token = trio.lowlevel.current_trio_token()
        while True:
            self._has_changed = trio.Event()
            self.needs_wake[0] = 1  # before reading the gauges, or changes during that would go unnoticed
            gauges = read_gauges()
            for cell, value in enumerate(gauges, _LAYOUT.gauges):
                self.cells[cell] = value
            self.cells[_LAYOUT.updated_ns] = updated_ns  # a reader that sees this sees the gauges, too
            if not gauges.n_threads and not gauges.n_prefetches:  # no request reports that these have ended
                await self._has_changed.wait()
            await trio.sleep(_LAG_S)
            updated_ns = time.time_ns()


@contextmanager
def open_counters(target: bytes) -> Iterator[Counters]:
    """Make the counters of a mount to be, all 0, in a file that other commands find; it is removed with the mount.

    Without a place or space for the file the mount works as well, and a message is logged.
    """
    path = runtime_dir.path_of(target, runtime_dir.STATS)
    if path is None:
        _log.info("%s: `trashd status` shows no numbers, since there is no runtime directory", printable(target))
        yield Counters.in_memory()
        return
    try:
        fd = _make_file(path)
    except OSError as error:
        _log.warning("%s: `trashd status` shows no numbers: %s: %s", printable(target), printable(path), error.strerror)
        yield Counters.in_memory()
        return
    with fd:
        try:
            yield Counters(_map_cells(fd))
        finally:
            if not runtime_dir.is_mounted(target):
                _remove_file(path, fd)


def _make_file(path: bytes) -> Fd:
    """Make a new file of zeros, fully allocated, and locked, so that readers can check that this process runs."""
    make_dir(os.path.dirname(path))
    with suppress(FileNotFoundError):
        os.unlink(path + NEW)
    fd = Fd(os.open(path + NEW, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with close_on_error(fd):
        text = encode_counters(CounterTable(version=version("trashd"), pid=os.getpid(), started_ns=time.time_ns()))
        with open(fd, "wb", closefd=False) as file:
            file.write(text)
        lock_open_file(fd)
        os.fchmod(fd, 0o644)
        os.rename(path + NEW, path)
    return fd


def _map_cells(fd: Fd) -> memoryview:
    """Map the counters in the file."""
    mapped = mmap.mmap(fd, 0)
    return memoryview(mapped)[mapped.size() - 8 * _LAYOUT.n_cells :].cast("Q")


def _remove_file(path: bytes, fd: Fd) -> None:
    """Remove our file, and a user's directory for it; not the file of another daemon of the same mount point."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            os.unlink(path)
            if os.geteuid():  # root's directory stays locked, also for other uses
                os.rmdir(os.path.dirname(path))
