"""Which stores a service serves: those that are found at mount points, and those that users' registries name.

How many of each user's own are open at a time, and how many orphans of them are remembered: a user with a thousand
stores, or with a disk that hangs, delays no other.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from fusefs.core.service_status import PassedOver
from fusefs.linux.fd import Fd
from fusefs.linux.inotify import InotifyEvent, InotifyMask
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount
from fusefs.service import timers
from fusefs.service.messages import UserRegistry
from fusefs.service.open_volume import find_stores
from fusefs.service.shared_context import ServiceContext, boot_s, in_thread
from fusefs.store.registry_lines import STORES
from fusefs.store.store_registry import LineOf

_LOG = logging.getLogger(__name__)
_AT_ONCE = 16
_MOST_NAMED = 5_000
"""How many users' registries are read that the accounts need not list."""

Key = tuple[int, bytes]
"""A user, and the path of a store that this user registered: others may register it as well, which says nothing."""
_Which = tuple[int, int]
_OF_USER, _OF_MOUNT = 2, 16
"""Stores that are open at a time, of one user and on one mount."""
_THREADS = 3
"""That may wait for a user's disks."""
_MOST_REMEMBERED, _LEAST_REMEMBERED = 20_000, 100
"""Orphans whose due time is remembered, of all these stores together, and of one at least."""


class MountPointStores:
    """Looks for stores at mount points; some of them may be on disks that don't answer."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._asked: set[bytes] = set()  # by threads that have not come back

    async def find(self, paths: Sequence[bytes], mounts: list[Mount]) -> list[bytes]:
        """The places of the stores in directories, each store once, by the first path that leads to it.

        What does not answer is passed over; it keeps one thread, not one for each look.
        Checkpoint  yes
        """
        found: dict[bytes, dict[bytes, _Which]] = {}
        limiter = trio.CapacityLimiter(_AT_ONCE)
        with trio.move_on_after(timers.current.mounts_limit_s):
            async with trio.open_nursery() as nursery:
                for path in dict.fromkeys(paths):
                    if path not in self._asked:
                        nursery.start_soon(self._look, path, mounts, limiter, found)
        stores: dict[_Which, bytes] = {}
        for path in paths:
            for place, which in found.get(path, {}).items():
                stores.setdefault(which, place)
        return list(stores.values())

    async def _look(
        self, path: bytes, mounts: list[Mount], limiter: trio.CapacityLimiter, found: dict[bytes, dict[bytes, _Which]]
    ) -> None:
        found[path] = await in_thread(limiter, partial(self._ask, path, mounts))

    def _ask(self, path: bytes, mounts: list[Mount]) -> dict[bytes, _Which]:
        self._asked.add(path)
        try:
            return find_stores(self._kernel, path, mounts)
        finally:
            self._asked.discard(path)


class RegisteredStores:
    """Users' own stores: what their registries name, read when they change and every now and then."""

    def __init__(self, context: ServiceContext) -> None:
        """Nothing is known yet."""
        self.words: dict[Key, LineOf] = {}
        self._n_more: dict[int, int] = {}
        self._context = context
        self._watches: dict[int, int] = {}
        self._news = trio.Event()
        self._began_s = 0.0

    def look(self) -> None:
        """Something was mounted, or a user may have registered a store: look soon."""
        self._news.set()

    async def news(self) -> None:
        """Wait until it is time to read again, once what was read has been acted on. Checkpoint"""
        took_s = boot_s() - self._began_s
        await trio.sleep(max(timers.current.registries_pause_s, timers.current.registries_pauses * took_s))
        with trio.move_on_after(self._context.config.poll_s):
            await self._news.wait()

    async def read(self, users: Iterable[int]) -> None:
        """Bring `words` up to date. Raises  ForkerLost. Checkpoint

        users  with a folder in a store that is served, whom the accounts need not list
        """
        self._news = trio.Event()
        self._began_s = boot_s()
        uids = [uid for uid in users if uid][:_MOST_NAMED]
        heard: set[int] = set()

        def take(home: UserRegistry, directory: Fd | None) -> None:
            heard.add(home.uid)
            self._forget(home.uid)
            self.words |= {(home.uid, word.line.store()): word for word in home.words if word.uid == home.uid}
            self._n_more[home.uid] = home.n_more
            self._watch(home.uid, directory)

        try:
            is_whole = await self._context.forker.read_registries(uids, take, timers.current.registries_limit_s)
        except OSError as error:
            _LOG.warning("the registries of users can't be read: %s", error.strerror)
            is_whole = False
        if is_whole:  # a user of whom nothing was heard has no store any more
            for uid in self._n_more.keys() - heard:
                self._forget(uid)

    def _forget(self, uid: int) -> None:
        self.words = {key: word for key, word in self.words.items() if key[0] != uid}
        self._n_more.pop(uid, None)
        watch = self._watches.pop(uid, None)
        if watch is not None:
            self._context.watcher.remove(watch)

    def _watch(self, uid: int, directory: Fd | None) -> None:
        """Hear of it when the user registers another one."""

        def on_event(event: InotifyEvent) -> None:
            if event.happened & (InotifyMask.IGNORED | InotifyMask.UNMOUNT):
                self._watches.pop(uid, None)
            if event.name == STORES or not event.name:
                self._news.set()

        if directory is not None:
            try:
                self._watches[uid] = self._context.watcher.add(directory, InotifyMask.MOVED_TO, on_event)
            except OSError as error:
                _LOG.warning("the registry of uid %d can't be watched: %s", uid, error.strerror)

    def passed_over(self) -> tuple[PassedOver, ...]:
        """The users who have more stores than are served."""
        return tuple(
            PassedOver(f"uid {uid}", f"{n:,} of the stores in the user's registry", "trashd reap deletes their orphans")
            for uid, n in sorted(self._n_more.items())
            if n
        )


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
