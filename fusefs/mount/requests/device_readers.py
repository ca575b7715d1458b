"""Threads that read requests from /dev/fuse. One thread reads at a time; if a request holds it up, another takes over.

It can't be known in advance which call to the backing filesystem will block. So a watch thread checks every two
milliseconds whether the reader is still in the same request, and blocked there. If so, another thread becomes the
reader. The blocked thread completes its request, replies and ends, since it is no longer the reader. While no requests
arrive, the watch thread sleeps. If requests arrive over io_uring, only FORGET and INTERRUPT are read here.

Source  docs/internals/decisions/0060-how-requests-travel.md
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import trio

from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import unshare_umask
from fusefs.linux.thread_progress import ThreadProgress
from fusefs.mount.native._core import Core, CoreDevice
from fusefs.mount.requests.fuse_requests import FuseRequests

_CHECK_INTERVAL_S, _IDLE_CHECK_INTERVAL_S = 0.002, 0.02
_N_IDLE_CHECKS = 3
"""After this many checks without a request, the watch thread sleeps."""
_N_HELD_UP_MAX = 4
"""If more readers than this are held up, the next one passes all requests to workers."""

_log = logging.getLogger(__name__)


class _Reader:
    """The state of a reader thread, created by that thread."""

    def __init__(self, device: CoreDevice) -> None:
        self.device = device
        self.progress = ThreadProgress()
        self.checked_began_ns = 0
        """Start time of the request that the reader was in at the last check."""


class DeviceReaders:
    def __init__(self, requests: FuseRequests, core: Core, on_gone: Callable[[], object]) -> None:
        """Set up, without starting a thread. on_gone: called by a thread that finds the connection closed"""
        self._requests = requests
        self._core = core
        self._on_gone = on_gone
        self._rest_ms = 0
        self._watch_wake = Fd(os.eventfd(0, os.EFD_CLOEXEC))
        """The core writes to it when a request begins while the watch thread sleeps."""
        core.connect(requests.device, self._watch_wake, requests)
        self._threads: list[threading.Thread] = []
        self._reading: _Reader | None = None
        """The current reader. A thread that finds another one here has been replaced."""
        self._held_up: set[_Reader] = set()
        self._has_ended = False

    def begin(self, rest_ms: int = 0) -> None:
        """Start reading requests.

        rest_ms  how long requests may wait; with io_uring, no client waits for those in /dev/fuse
        Raises   RuntimeError: no more threads are allowed
        """
        self._rest_ms = rest_ms
        self._start(self._read)
        self._start(self._watch)

    def end(self, limit_s: float) -> None:
        """End the threads. Wait for them no longer than limit_s, since one may be in a call that hangs."""
        self._has_ended = True
        os.eventfd_write(self._requests.wake, 1)
        os.eventfd_write(self._watch_wake, 1)
        end_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True, name=target.__name__.strip("_"))
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    # The reader thread.

    def _read(self) -> None:
        try:
            unshare_umask()
            reader = _Reader(CoreDevice(self._core, self._requests.wake, self._rest_ms))
        except (OSError, MemoryError) as error:
            _log.warning("a thread can't start reading /dev/fuse: %s", error)
            if self._reading is None:  # otherwise the current reader continues when its call returns
                self._end_mount()
            return
        if self._reading is not None and not self._reading.device.is_held_up:
            return  # the reader has returned from its call in the meantime
        if len(self._held_up) > _N_HELD_UP_MAX:
            reader.device.pass_to_workers()
        self._reading = reader
        try:
            self._serve_requests(reader)
        except OSError as error:
            if error.errno != errno.ENODEV:
                _log.exception("/dev/fuse can't be read")
            self._end_mount()
        except BaseException:
            _log.exception("a thread that answers requests failed, so the mount ends")
            self._end_mount()
            raise
        finally:
            self._held_up.discard(reader)
            if self._reading is reader:
                self._reading = None

    def _serve_requests(self, reader: _Reader) -> None:
        device, requests = reader.device, self._requests
        while not self._has_ended:
            is_idle = device.read(not requests.n_unnumbered)
            if device.is_held_up:
                self._held_up.discard(reader)
                if self._reading is not reader:
                    return
                device.is_held_up = False
            if requests.n_unnumbered:
                requests.retry_numbers(is_idle=is_idle)

    def _end_mount(self) -> None:
        self._has_ended = True
        with suppress(trio.RunFinishedError):
            self._on_gone()

    # The watch thread.

    def _watch(self) -> None:
        n_idle_checks = 0
        while not self._has_ended:
            time.sleep(_CHECK_INTERVAL_S if n_idle_checks < _N_IDLE_CHECKS else _IDLE_CHECK_INTERVAL_S)
            n_idle_checks = 0 if self._check_reader() else n_idle_checks + 1
            if n_idle_checks > _N_IDLE_CHECKS:
                self._core.note_watch_sleeps()
                if not self._check_reader() and not self._has_ended:
                    os.eventfd_read(self._watch_wake)
                    n_idle_checks = 0

    def _check_reader(self) -> bool:
        """Replace the reader if it is held up. Returns whether it is in a request, and was not held up before."""
        reader = self._reading
        if reader is None or reader.device.is_held_up:
            return False
        began_ns = reader.device.began_ns
        if began_ns != reader.checked_began_ns:
            reader.checked_began_ns = began_ns
            reader.progress.begin_period()
        elif began_ns and reader.progress.is_held_up():
            reader.device.is_held_up = True
            self._held_up.add(reader)
            with suppress(RuntimeError):  # no more threads are allowed: the reader continues when its call returns
                self._start(self._read)
        return bool(began_ns)
