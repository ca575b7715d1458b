"""A removal, or a walk, in the foreground at a pace: the user's limits alone, or what others on the disk feel.

The latter needs no privilege: every user can read the pressure, and the probe is written to the user's own folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fusefs.core.pacing import Backlog, RateCaps, WorkDone
from fusefs.core.slice_budget import Speed
from fusefs.engine.pressure_pacer import PressurePacer
from fusefs.engine.slice_pace import ConstantSpeed, SetsSpeed
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel


@contextmanager
def pacer_in(
    kernel: Kernel, directory: Fd, most: Speed, tell: Callable[[str], None] | None, *, may_write: bool = True
) -> Iterator[SetsSpeed]:
    """Who leads a removal on a filesystem.

    directory  on it, of any kind; files without a name are made there, if that is permitted and may_write
    most       that it may be
    tell       called with a sentence when it begins to yield to others, and when it ends; None: it does not yield
    """
    if tell is None:
        yield ConstantSpeed(most)
        return
    from fusefs.engine.pressure_pacer import PressurePacer  # most are not asked to make way
    from fusefs.linux.low_priority import be_idle

    be_idle()
    pacer = PressurePacer(kernel, directory, RateCaps(most.entries_per_s, most.bytes_per_s), may_write=may_write)
    try:
        yield ForegroundPacer(pacer, tell)
    finally:
        pacer.close()


class ForegroundPacer:
    """Looks by itself, whenever the engine asks or waits (engine.slice_pace.SetsSpeed)."""

    def __init__(self, pacer: PressurePacer, tell: Callable[[str], None]) -> None:
        """tell: called with a sentence when we begin to yield, and when we end."""
        self._pacer = pacer
        self._tell = tell
        self._done = WorkDone()
        self._was_yielding = False
        self._next_s = 0.0
        self._tempo = self._tick()

    def tempo(self) -> Speed:
        """How fast it may be now."""
        return self._tick() if time.monotonic() >= self._next_s else self._tempo

    def done(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        """A slice did so much."""
        done = self._done
        self._done = WorkDone(done.n_entries + n_entries, done.n_bytes + n_bytes, done.busy_s + busy_s)

    def wait(self, seconds: float) -> None:
        """Wait that long, or until the tempo changes."""
        before, until_s = self._tempo, time.monotonic() + seconds
        while (now := time.monotonic()) < until_s and self.tempo() == before:
            time.sleep(max(min(until_s, self._next_s) - now, 0.0))

    def _tick(self) -> Speed:
        if self._pacer.wants_probe():
            self._pacer.probe()
        if self._pacer.wants_write_back():
            self._pacer.write_back()
        self._tempo = self._pacer.tick(self._done, Backlog())
        self._next_s = time.monotonic() + self._pacer.next_tick_s()
        if self._pacer.is_yielding() != self._was_yielding:
            self._was_yielding = not self._was_yielding
            self._tell(self._pacer.why())
        return self._tempo
