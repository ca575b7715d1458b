"""The daemon's counters, in a file that the daemon has mapped. Other processes read it without asking the daemon.

The file is always up to date without periodic writes, and the last counts survive if the daemon is killed.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from fusefs.core.version import VERSION
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.file_locks import lock_open_file
from fusefs.linux.runtime_directories import NEW, make_dir
from fusefs.mount.places import runtime_dir

_LAYOUT: Final = CounterLayout(CounterTable(version="", pid=0, started_ns=0))
CELL_OF: Final = _LAYOUT.operations
"""Maps an operation to the cell where its counters begin."""
LAYOUT: Final = (
    N_BUCKETS, BOUNDS_NS[0].bit_length() - 1, _LAYOUT.failed, _LAYOUT.total_ns, _LAYOUT.max_ns, _LAYOUT.buckets
)  # fmt: skip
"""The positions of counters, for the native core, which counts requests in many threads at the same time."""
_LAG_S = 0.1
"""Delay between a change and the update of the gauges: an update after each operation would cost more than most
operations."""

_log = logging.getLogger(__name__)


class Counters:
    """The counters of one mount. Counting takes a fraction of a microsecond, and no operation waits for it.

    The native core counts requests. Everything else is counted by threads that hold the tables lock.
    """

    def __init__(self, cells: memoryview) -> None:
        """cells: the counters in the output of `encode_counters`, as writable numbers"""
        self.cells = cells
        self._has_changed = trio.Event()
        self.needs_wake = bytearray(1)
        """Not 0 if `note_change` must be called after a change. The native core reads this, too."""
        self._token: trio.lowlevel.TrioToken | None = None

    @classmethod
    def in_memory(cls) -> Counters:
        """Create counters that no other process can read."""
        return cls(memoryview(bytearray(8 * _LAYOUT.n_cells)).cast("Q"))

    def count_hit(self, kind: CachedKind) -> None:
        self.cells[_LAYOUT.sorts + 2 * kind] += 1

    def count_miss(self, kind: CachedKind) -> None:
        self.cells[_LAYOUT.sorts + 2 * kind + 1] += 1

    def note_change(self) -> None:
        """Record that a gauge may have changed. Any thread may call this."""
        if self.needs_wake[0] and self._token is not None:
            self.needs_wake[0] = 0
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._has_changed.set)

    def set_device(self, device: int) -> None:
        self.cells[_LAYOUT.device] = device

    async def update_gauges(self, read_gauges: Callable[[], Gauges]) -> None:
        """Update the gauges shortly after each change, and regularly while threads work. Sleep while nothing happens.

        Checkpoint  between two updates
        """
        updated_ns = 0
        self._token = trio.lowlevel.current_trio_token()
        while True:
            self._has_changed = trio.Event()
            self.needs_wake[0] = 1  # before the gauges are read, so that a change during the read is noticed
            gauges = read_gauges()
            for cell, value in enumerate(gauges, _LAYOUT.gauges):
                self.cells[cell] = value
            self.cells[_LAYOUT.updated_ns] = updated_ns  # a reader that sees this value sees the new gauges, too
            if not gauges.n_threads and not gauges.n_prefetches:  # otherwise poll, since nothing reports their end
                await self._has_changed.wait()
            await trio.sleep(_LAG_S)
            updated_ns = time.time_ns()


@contextmanager
def open_counters(target: bytes) -> Iterator[Counters]:
    """Create the counters of a new mount, all 0, in a file that other commands can read. Remove it with the mount.

    If the file can't be created, log that, and yield counters that no other process can read.
    """
    path = runtime_dir.path_of(target, runtime_dir.STATS)
    if path is None:
        _log.info("%s: no counters for `trashd status`, because there is no runtime directory", printable(target))
        yield Counters.in_memory()
        return
    try:
        fd = _make_file(path)
    except OSError as error:
        _log.warning("%s: no counters for `trashd status`: %s: %s", printable(target), printable(path), error.strerror)
        yield Counters.in_memory()
        return
    with fd:
        try:
            yield Counters(_map_cells(fd))
        finally:
            if not runtime_dir.is_mounted(target):
                _remove_file(path, fd)


def _make_file(path: bytes) -> Fd:
    """Create the file: all zeros, fully allocated, and locked: so readers can check that we are still running."""
    make_dir(os.path.dirname(path))
    with suppress(FileNotFoundError):
        os.unlink(path + NEW)
    fd = Fd(os.open(path + NEW, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with close_on_error(fd):
        text = encode_counters(CounterTable(version=VERSION, pid=os.getpid(), started_ns=time.time_ns()))
        with open(fd, "wb", closefd=False) as file:
            file.write(text)
        lock_open_file(fd)
        os.fchmod(fd, 0o644)
        os.rename(path + NEW, path)
    return fd


def _map_cells(fd: Fd) -> memoryview:
    mapped = mmap.mmap(fd, 0)
    return memoryview(mapped)[mapped.size() - 8 * _LAYOUT.n_cells :].cast("Q")


def _remove_file(path: bytes, fd: Fd) -> None:
    """Remove our file, and for a user also its directory, unless another daemon has replaced the file."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            os.unlink(path)
            if os.geteuid():  # root's directory is still locked, and has other uses
                os.rmdir(os.path.dirname(path))
