"""Threads that look for walks, where there are no rings, or where these can't: for extended attributes."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

from fusefs.mount.walk import Walk

_N_THREADS_MAX = 256
"""Of all directories together: what hangs in some leaves others the rest, and nobody depends on these alone."""


class Crew:
    """Threads that look for walks: as many as are needed, up to a limit. They end with the process."""

    def __init__(self) -> None:
        self._calls: deque[Walk] = deque()
        self._has_calls = threading.Condition()
        self._n_idle = self._n_threads = 0

    @property
    def is_overloaded(self) -> bool:
        """Whether many calls for help have not been heard yet."""
        return len(self._calls) > _N_THREADS_MAX

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
