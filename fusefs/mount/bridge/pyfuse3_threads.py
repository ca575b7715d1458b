"""Which thread does an operation: the loop's own at once, or a worker where the backing filesystem is slow."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

import trio

from fusefs.mount.places.counters import Counters
from fusefs.mount.requests.fuse_operations import PART
from fusefs.mount.tables.tables_lock import TablesLock, WouldWait

P = ParamSpec("P")
R = TypeVar("R")

_N_WAITS_OF_ONE, _N_WAITS = 120, 400
"""Operations that wait for another process: of one user's, of all users'."""


class Pyfuse3Threads:
    """The threads of one mount; they are given up, not waited for, when it ends."""

    def __init__(self, lock: TablesLock, stats: Counters, n_threads: int) -> None:
        """Begin with none. n_threads: that may be at work at a time"""
        self.lock = lock
        self.stats = stats
        self._limiter = trio.CapacityLimiter(n_threads)
        self._waits = trio.CapacityLimiter(max(2, n_threads // 2))
        self._waiting: Counter[int | None] = Counter()
        """Operations that wait for another process, by the uid that has asked for them."""
        self._forgetting = trio.Lock()

    async def do(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation of the vfs, by a suitable thread; its caller is the last argument. Checkpoint  in a thread"""
        if self.lock.is_slow:
            return await self.wait_for(act, *args, **kwargs)
        try:
            with self.lock:
                return act(*args, **kwargs)
        except WouldWait:
            pass
        return await self.outwait(act, *args, **kwargs)

    async def wait_for(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation that takes its time on any filesystem. Checkpoint"""
        self.stats.changed()
        run = partial(self.lock.run, act, *args, **kwargs)
        try:
            return await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._limiter)
        except WouldWait:
            pass
        return await self.outwait(act, *args, **kwargs)

    async def finish(self, act: Callable[[int], None], fh: int) -> None:
        """Let a handle go: that can't be refused. Checkpoint  if it goes to a thread"""
        if self.lock.is_slow:
            await self.wait_for(act, fh)
            return
        try:
            with self.lock:
                act(fh)
        except WouldWait:
            await self._wait_out(act, fh)

    def finish_soon(self, act: Callable[[int], None], fh: int) -> None:
        """Let a handle go, at once if that need not wait, else in a task of its own."""
        try:
            with self.lock:
                act(fh)
        except WouldWait:
            trio.lowlevel.spawn_system_task(self._wait_out, act, fh)

    async def outwait(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation that waits for another process, perhaps for ever. Its caller, if known, is the last argument.

        It has threads of its own, and no more than some of pyfuse3's workers: others need the rest.
        Raises      OSError EAGAIN: too many of that user's, or of all, are waiting
        Checkpoint
        """
        uid = getattr(args[-1], "uid", None) if args else None
        if self._waiting[uid] >= _N_WAITS_OF_ONE or self._waiting.total() >= _N_WAITS:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self._waiting[uid] += 1
        try:
            return await self._wait_out(act, *args, **kwargs)
        finally:
            self._waiting -= Counter((uid,))

    async def _wait_out(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Checkpoint"""
        self.stats.changed()
        run = partial(self.lock.run_patiently, act, *args, **kwargs)
        return await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._waits)

    def recall(self, act: Callable[P, R | None], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """What the vfs remembers of a slow filesystem; of a local one it remembers nothing."""
        if not self.lock.is_slow:
            return None
        with self.lock:
            return act(*args, **kwargs)

    async def forget(self, act: Callable[[int, int], None], forgotten: Sequence[tuple[int, int]]) -> None:
        """Let go of nodes, of which the kernel may name tens of thousands at a time, several times in a row.

        Checkpoint  if there are many: between parts, so that other requests wait for one part at most
        """
        if len(forgotten) <= PART:
            self._forget(act, forgotten)
            return
        async with self._forgetting:
            for at in range(0, len(forgotten), PART):
                self._forget(act, forgotten[at : at + PART])
                await trio.lowlevel.checkpoint()

    def _forget(self, act: Callable[[int, int], None], forgotten: Sequence[tuple[int, int]]) -> None:
        with self.lock:
            for nodeid, n in forgotten:
                act(nodeid, n)
