"""Who does an operation: the loop's own thread at once, or, where the backing filesystem is slow, another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import trio

from fusefs.mount.gate import Gate
from fusefs.mount.stats import Stats

P = ParamSpec("P")
R = TypeVar("R")

_PART = 256
"""Half a millisecond's work."""


class Hands:
    """The threads of one mount; they are given up, not waited for, when it ends."""

    def __init__(self, gate: Gate, stats: Stats, n_threads: int) -> None:
        """Begin with none. n_threads: that may be at work at a time"""
        self._gate = gate
        self._stats = stats
        self._limiter = trio.CapacityLimiter(n_threads)

    async def do(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation of the vfs, by whom it suits. Checkpoint  if it goes to a thread"""
        if self._gate.is_slow:
            return await self.wait_for(act, *args, **kwargs)
        with self._gate.lock:
            return act(*args, **kwargs)

    async def wait_for(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation that takes its time on any filesystem. Checkpoint"""
        self._stats.changed()

        def run() -> R:
            return self._gate.run(act, *args, **kwargs)

        return await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._limiter)

    def recall(self, act: Callable[P, R | None], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """What the vfs remembers of a slow filesystem; of a local one it remembers nothing."""
        if not self._gate.is_slow:
            return None
        with self._gate.lock:
            return act(*args, **kwargs)

    async def forget(self, act: Callable[[int, int], None], forgotten: Sequence[tuple[int, int]]) -> None:
        """Let go of nodes, of which the kernel may name tens of thousands at a time. Checkpoint  between parts"""
        for at in range(0, len(forgotten), _PART):
            if at:
                await trio.lowlevel.checkpoint()
            with self._gate.lock:
                for nodeid, n in forgotten[at : at + _PART]:
                    act(nodeid, n)
