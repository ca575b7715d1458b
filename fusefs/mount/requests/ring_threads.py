"""The threads that serve requests over io_uring; native/ring_threads.c contains their loops.

Each online core has its own set of threads. All cores that may come online later share one set.

If a core's threads ended, the clients on that core would wait forever. So if a thread fails for any reason, the
connection is aborted.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from fusefs.linux.fuse_caller import unshare_umask
from fusefs.linux.uring_facts import split_cores
from fusefs.mount.native._core import N_RING_THREADS, Core, CoreRings

_N_FDS = 5
"""How many fds the rings of one core need."""
_START_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class RingThreads:
    def __init__(self, device: int, abort: Callable[[], None], n_fds: int) -> None:
        """Set up, without starting a thread.

        device  /dev/fuse
        abort   ends the connection, whatever its state
        n_fds   how many fds the rings of all threads may use
        """
        self._device = device
        self._abort = abort
        self._n_fds = n_fds
        self._core: Core | None = None
        """Answers requests; None: there is nothing to serve."""
        self._may_register = tuple(threading.Event() for _ in range(N_RING_THREADS))
        self._threads: list[threading.Thread] = []
        self._reports: SimpleQueue[Exception | None] = SimpleQueue()

    def prepare(self) -> None:
        """Create rings and threads for all possible cores. Must be called before the reply to INIT.

        Raises  OSError, RuntimeError: they can't be created
        """
        own, others = split_cores()
        try:
            if _N_FDS * len(own) > self._n_fds:
                raise OSError(errno.EMFILE, f"the rings of {len(own)} cores need {_N_FDS * len(own)} open files")
            for cores in (*([core] for core in own), *([others] if others else [])):
                rings = CoreRings(self._device, cores, cores is not others)
                for number in range(N_RING_THREADS):
                    thread = threading.Thread(target=self._run_thread, args=(rings, number), daemon=True, name="ring")
                    thread.start()
                    self._threads.append(thread)
            self._await_reports(len(self._threads))
        except BaseException:
            self.give_up()
            raise

    def serve(self, core: Core) -> None:
        """Start serving requests. Must be called after the reply to INIT.

        Raises  OSError: the kernel refuses io_uring, and continues with /dev/fuse
        """
        self._core = core
        for number, may_register in enumerate(self._may_register):  # the dispatchers first: see native/ring_threads.c
            may_register.set()
            try:
                self._await_reports(len(self._threads) // N_RING_THREADS)
            except OSError as error:
                if not number:
                    self._core = None
                    self.give_up()
                    raise
                _log.warning("a thread can't register its io_uring entry for requests: %s", error.strerror)

    def give_up(self) -> None:
        """Let the waiting threads end, since there is nothing to serve."""
        for may_register in self._may_register:
            may_register.set()

    def wait_for_end(self, limit_s: float) -> None:
        """Wait for the threads to end, as they do when the connection ends. Wait no longer than limit_s, since a thread
        may be in a call that hangs."""
        end_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _await_reports(self, n: int) -> None:
        for error in [self._reports.get(timeout=_START_TIMEOUT_S) for _ in range(n)]:
            if error is not None:
                raise error

    def _run_thread(self, rings: CoreRings, number: int) -> None:
        try:
            unshare_umask()
            rings.prepare(number)
            self._reports.put(None)
            self._may_register[number].wait()
            if self._core is None:
                return
            rings.register(number)
        except OSError as error:
            self._reports.put(error)
            return
        self._reports.put(None)
        try:
            rings.serve(number, self._core)
        except BaseException:
            self._abort()
            _log.exception("a thread that serves requests failed, so the mount ends")
            raise
