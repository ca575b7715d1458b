"""Threads that read requests from /dev/fuse: one at a time, and another as soon as that one is held up in a call.

Which call to the backing filesystem will wait can't be foretold. So a watch looks every two milliseconds whether a
thread, of these or of the native core's, is in the same call as before, and is held up there. If so the watch lets
others have the tables, as any thread does for each call that it makes, and another thread reads from then on. The call
goes on; the thread that made it answers, and ends, as it is not the reader any more. While no call is made, the watch
sleeps.

Source  docs/decisions/0021-stand-ins.md
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import trio

from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import have_own_umask
from fusefs.mount.requests.fuse_operations import WaitClass
from fusefs.mount.requests.fuse_requests import FuseRequests, RequestReader
from fusefs.mount.requests.thread_pool import PoolTask, ThreadPool
from fusefs.mount.tables.tables_lock import TablesLock, Turn

_LOOK_S, _SELDOM_S = 0.002, 0.02
_N_IN_VAIN = 3
"""Times that the watch saw no call before it sleeps."""
_N_ACTIVE = 4
"""Readers held up at a time; with more, the one that reads does nothing itself that may take long."""

_log = logging.getLogger(__name__)


class Device(Protocol):
    """One thread's way to read requests."""

    def read(self, waits: bool, /) -> int:
        """Read a request into the reader's memory.

        waits    for one; else it returns as soon as there is none
        Returns  its size; 0: there is none, or there may be something else to do
        Raises   OSError: the connection is gone
        """


DeviceOf = Callable[[RequestReader, Turn, Fd], Device]
"""Makes a thread's, which stops waiting when the fd can be read."""


class DeviceReaders:
    """Those of one mount, and the watch."""

    def __init__(
        self,
        lock: TablesLock,
        requests: FuseRequests,
        pool: ThreadPool,
        device_of: DeviceOf,
        gone: Callable[[], object],
    ) -> None:
        """Begin with none. gone: called by a thread that finds the connection gone"""
        self._lock = lock
        self._requests = requests
        self._pool = pool
        self._device_of = device_of
        self._gone = gone
        self._wake = Fd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._threads: list[threading.Thread] = []
        self._reading: Turn | None = None
        """The turn of the thread that reads. It is not the reader any more when it finds another's here."""
        self._is_starting = False
        """Whether a thread begins that is to be the reader."""
        self._seen_tasks: set[PoolTask] = set()
        self._has_ended = False

    def begin(self) -> None:
        """Read from now on. Raises  RuntimeError: no more threads for us"""
        self._lock.watch()
        self._start(self._read)
        self._start(self._watch)

    def end(self, limit_s: float) -> None:
        """Let the threads end; one in a call that hangs stays, after that long."""
        self._has_ended = True
        os.eventfd_write(self._wake, 1)
        self._lock.wakes.set()
        end_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True, name=run.__name__.strip("_"))
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _read(self) -> None:
        turn = self._lock.own_turn()
        try:
            have_own_umask()
            reader = RequestReader()
            device = self._device_of(reader, turn, self._wake)
        except (OSError, MemoryError) as error:
            _log.warning("a thread that was to read /dev/fuse can't: %s", error)
            self._is_starting = False
            if self._reading is None:  # else that one goes on when its call is over
                self._end_mount()
            return
        if self._reading is None or self._lock.is_away_from(self._reading):  # else that one is back already
            self._reading = turn
        self._is_starting = False
        self._answer(device, reader, turn)

    def _answer(self, device: Device, reader: RequestReader, turn: Turn) -> None:
        requests = self._requests
        try:
            while self._reading is turn and not self._has_ended:
                turn.hands_out = self._lock.n_away >= _N_ACTIVE
                n_before = requests.n_unfinished
                size = device.read(not n_before)
                # The core may have come upon something that takes several steps, and read no further.
                is_idle = not size and requests.n_unfinished == n_before
                if size:
                    requests.answer_read(reader, size, hands_out=turn.hands_out)
                if requests.n_unfinished:
                    requests.go_on(is_idle=is_idle)
        except OSError as error:
            if error.errno != errno.ENODEV:
                _log.exception("/dev/fuse can't be read")
            self._end_mount()
        except BaseException:
            _log.exception("a thread that answers requests failed; with it the mount ends")
            self._end_mount()
            raise
        finally:
            self._lock.leave(turn)

    def _end_mount(self) -> None:
        self._has_ended = True
        with suppress(trio.RunFinishedError):
            self._gone()

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
        """Take the tables from every thread that is held up, and see that another reads; whether anything goes on."""
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
            elif turn.progress.is_held_up():
                lock.take_away(turn, call)
        if self._reading is not None and lock.is_away_from(self._reading) and not self._is_starting:
            self._is_starting = True
            try:
                self._start(self._read)
            except RuntimeError:  # no more threads for us; perhaps at the next look
                self._is_starting = False
        at_work = self._pool.at_work() if requests.is_careful else set()
        tasks = {task for task in at_work if task.key[1] == WaitClass.CHANGE}
        is_late = not tasks.isdisjoint(self._seen_tasks)
        self._seen_tasks = tasks
        requests.is_careful = lock.is_away or is_late
        return goes_on or bool(tasks)
