"""Threads that read requests from /dev/fuse: one at a time, and another as soon as that one is held up in a request.

Which call to the backing filesystem will wait can't be foretold. So a watch looks every two milliseconds whether a
thread, of these or of the rings, is in the same request as before, and is held up there. If so another thread reads
from then on. The request goes on; the thread that serves it replies, and ends, as it is not the reader any more. While
no request comes, the watch sleeps.

Source  docs/decisions/0061-one-mutex.md
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
from fusefs.linux.fuse_caller import have_own_umask
from fusefs.linux.thread_progress import ThreadProgress
from fusefs.mount.native._core import Core, CoreDevice, CoreRing
from fusefs.mount.requests.fuse_requests import FuseRequests, RequestReader

_LOOK_S, _SELDOM_S = 0.002, 0.02
_N_IN_VAIN = 3
"""Times that the watch saw no request before it sleeps."""
_N_ACTIVE = 4
"""Readers held up at a time; with more, the one that reads does nothing itself that may take long."""

_log = logging.getLogger(__name__)

DeviceOf = Callable[[RequestReader, Fd], CoreDevice]
"""Makes a thread's, which stops waiting when the fd can be read."""


class ServingThread:
    """A thread that serves requests, as the watch sees it; made by that thread."""

    def __init__(self, worker: CoreDevice | CoreRing, was_held_up: Callable[[], object]) -> None:
        """was_held_up: called by the watch, each time that it is"""
        self.worker = worker
        self.was_held_up = was_held_up
        self.progress = ThreadProgress()
        self.seen_ns = 0
        """When the request began that it was in at the last look."""


class HeldUpWatch:
    """What looks after the threads that serve one mount's requests."""

    def __init__(self) -> None:
        """Begin with none."""
        self.wake = Fd(os.eventfd(0, os.EFD_CLOEXEC))
        """Written to by the native core when a request begins while the watch sleeps."""
        self._threads: list[ServingThread] = []
        self._has_ended = False

    def add(self, thread: ServingThread) -> None:
        """Look after one more; by any thread."""
        self._threads = [*self._threads, thread]

    def remove(self, thread: ServingThread) -> None:
        """It ends; by any thread."""
        self._threads = [one for one in self._threads if one is not thread]

    def end(self) -> None:
        """Look no more."""
        self._has_ended = True
        os.eventfd_write(self.wake, 1)

    def run(self, core: Core) -> None:
        """Look, until the end."""
        n_in_vain = 0
        while not self._has_ended:
            time.sleep(_LOOK_S if n_in_vain < _N_IN_VAIN else _SELDOM_S)
            n_in_vain = 0 if self._look() else n_in_vain + 1
            if n_in_vain > _N_IN_VAIN:
                core.sleep()
                if not self._look() and not self._has_ended:
                    os.eventfd_read(self.wake)
                    n_in_vain = 0

    def _look(self) -> bool:
        """Find the threads that are held up; whether any is in a request in which it was not at the last look."""
        goes_on = False
        for thread in self._threads:
            worker = thread.worker
            began_ns = worker.began_ns
            if began_ns != thread.seen_ns:
                thread.seen_ns = began_ns
                if began_ns:
                    thread.progress.note()
                    goes_on = True
            elif began_ns and not worker.is_held_up:
                goes_on = True
                if thread.progress.is_held_up():
                    worker.is_held_up = True
                    thread.was_held_up()
        return goes_on


class DeviceReaders:
    """Those of one mount."""

    def __init__(
        self,
        requests: FuseRequests,
        watch: HeldUpWatch,
        core: Core,
        device_of: DeviceOf,
        gone: Callable[[], object],
    ) -> None:
        """Begin with none. gone: called by a thread that finds the connection gone"""
        self._requests = requests
        self._watch = watch
        self._core = core
        self._device_of = device_of
        self._gone = gone
        self._wake = Fd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._threads: list[threading.Thread] = []
        self._reading: ServingThread | None = None
        """The thread that reads. It is not the reader any more when it finds another one here."""
        self._held_up: set[ServingThread] = set()
        self._has_ended = False

    def begin(self) -> None:
        """Read from now on. Raises  RuntimeError: no more threads for us"""
        self._start(self._read)
        self._start(self._look_after)

    def end(self, limit_s: float) -> None:
        """Let the threads end; one in a call that hangs stays, after that long."""
        self._has_ended = True
        os.eventfd_write(self._wake, 1)
        self._watch.end()
        end_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _look_after(self) -> None:
        self._watch.run(self._core)

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True, name=run.__name__.strip("_"))
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _read(self) -> None:
        try:
            have_own_umask()
            reader = RequestReader()
            device = self._device_of(reader, self._wake)
        except (OSError, MemoryError) as error:
            _log.warning("a thread that was to read /dev/fuse can't: %s", error)
            if self._reading is None:  # else that one goes on when its call is over
                self._end_mount()
            return
        thread = ServingThread(device, self._replace)
        if self._reading is not None and not self._reading.worker.is_held_up:
            return  # it is back already
        device.hands_out = len(self._held_up) > _N_ACTIVE
        self._reading = thread
        self._watch.add(thread)
        self._answer(device, reader, thread)

    def _answer(self, device: CoreDevice, reader: RequestReader, thread: ServingThread) -> None:
        requests = self._requests
        try:
            while not self._has_ended:
                n_before = requests.n_unfinished
                size = device.read(not n_before)
                # The core may have come upon something that takes several steps, and read no further.
                is_idle = not size and requests.n_unfinished == n_before
                if size:
                    requests.answer_read(reader, size, hands_out=device.hands_out)
                if device.is_held_up:
                    self._held_up.discard(thread)
                    if self._reading is not thread:
                        return
                    device.is_held_up = False
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
            self._held_up.discard(thread)
            self._watch.remove(thread)

    def _replace(self) -> None:
        """The reader is held up: another one is to read; by the watch."""
        if self._reading is not None:
            self._held_up.add(self._reading)
            with suppress(RuntimeError):  # no more threads for us: that one goes on when its call is over
                self._start(self._read)

    def _end_mount(self) -> None:
        self._has_ended = True
        with suppress(trio.RunFinishedError):
            self._gone()
