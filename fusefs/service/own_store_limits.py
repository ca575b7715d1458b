"""How many of each user's own stores the service serves, and how many orphans it remembers of them: a user with a
thousand stores, or with a disk that hangs, delays no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

MOST_STORES = 100
"""Of one user that are served."""
_OF_USER, _OF_MOUNT = 2, 16
"""Stores that are open at a time, of one user and on one mount."""
_THREADS = 3
"""That may wait for a user's disks."""
_MOST_REMEMBERED, _LEAST_REMEMBERED = 20_000, 100
"""Orphans whose due time is remembered, of all these stores together, and of one at least."""


class OwnStoreLimit:
    """What one store may take, together with the other stores of its user and of its mount."""

    def __init__(
        self, limits: OwnStoreLimits, threads: trio.CapacityLimiter, turns: tuple[trio.Semaphore, ...]
    ) -> None:
        """threads: those that touch the disks of its user; one that hangs counts until it comes back."""
        self.threads = threads
        self._limits = limits
        self._turns = turns

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for its turn, and have it for the block. Checkpoint"""
        user, mount = self._turns
        async with user, mount:
            yield

    def is_wanted(self) -> bool:
        """Whether another store waits until this one is let go."""
        return any(turn.statistics().tasks_waiting for turn in self._turns)

    def most_remembered(self) -> int:
        """How many of its orphans may be remembered."""
        return max(_MOST_REMEMBERED // max(self._limits.n_stores, 1), _LEAST_REMEMBERED)


class OwnStoreLimits:
    """All of them."""

    def __init__(self) -> None:
        self.n_stores = 0  # that are kept, as the service counts them
        self._threads: dict[int, trio.CapacityLimiter] = {}
        self._users: dict[int, trio.Semaphore] = {}
        self._mounts: dict[int, trio.Semaphore] = {}

    def of(self, uid: int, mnt_id: int) -> OwnStoreLimit:
        """That of one more store of a user's on a mount."""
        threads = self._threads.setdefault(uid, trio.CapacityLimiter(_THREADS))
        user = self._users.setdefault(uid, trio.Semaphore(_OF_USER))
        return OwnStoreLimit(self, threads, (user, self._mounts.setdefault(mnt_id, trio.Semaphore(_OF_MOUNT))))
