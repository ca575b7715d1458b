"""Find the stores that a service serves: those at mount points, and those in users' registries.

The module also limits how many stores of each user are open at a time, and how many of their orphans are remembered. A
user with a thousand stores, or with a disk that hangs, delays no other user.
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
from fusefs.service.open_volume import StoreInode, find_stores
from fusefs.service.shared_context import ServiceContext, boot_s, in_thread
from fusefs.store.registry_lines import STORES
from fusefs.store.store_registry import UserLine

_LOG = logging.getLogger(__name__)
_AT_ONCE = 16
_MOST_NAMED = 5_000
"""Maximum number of users outside the account database whose registries are read."""

Key = tuple[int, bytes]
"""A user, and the path of a store in that user's registry; other users may register the same path."""
_OF_USER, _OF_MOUNT = 2, 16
"""Maximum number of stores that are open at a time, for one user and on one mount."""
_THREADS = 3
"""Maximum number of threads that wait for one user's disks."""
_MOST_REMEMBERED, _LEAST_REMEMBERED = 20_000, 100
"""Number of orphans whose due time is remembered: the limit for all these stores, and the minimum for each store."""


class MountPointStores:
    """Finds stores at mount points, some of which may be on disks that do not respond."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._busy_paths: set[bytes] = set()  # in use by threads that have not returned

    async def find(self, paths: Sequence[bytes], mounts: list[Mount]) -> dict[bytes, StoreInode]:
        """Return the stores in the given directories by path, in the order of these directories.

        A directory that does not respond is skipped; it occupies only one thread, not one per search.
        Checkpoint  yes
        """
        stores_at: dict[bytes, dict[bytes, StoreInode]] = {}
        limiter = trio.CapacityLimiter(_AT_ONCE)
        with trio.move_on_after(timers.current.mounts_limit_s):
            async with trio.open_nursery() as nursery:
                for path in dict.fromkeys(paths):
                    if path not in self._busy_paths:
                        nursery.start_soon(self._find_at, path, mounts, limiter, stores_at)
        return {place: inode for path in paths for place, inode in stores_at.get(path, {}).items()}

    async def _find_at(
        self,
        path: bytes,
        mounts: list[Mount],
        limiter: trio.CapacityLimiter,
        stores_at: dict[bytes, dict[bytes, StoreInode]],
    ) -> None:
        stores_at[path] = await in_thread(limiter, partial(self._find_in_thread, path, mounts))

    def _find_in_thread(self, path: bytes, mounts: list[Mount]) -> dict[bytes, StoreInode]:
        self._busy_paths.add(path)
        try:
            return find_stores(self._kernel, path, mounts)
        finally:
            self._busy_paths.discard(path)


class RegisteredStores:
    """Users' own stores according to their registries, read after changes and at intervals."""

    def __init__(self, context: ServiceContext) -> None:
        self.lines: dict[Key, UserLine] = {}
        self._n_more: dict[int, int] = {}
        self._context = context
        self._watches: dict[int, int] = {}
        self._has_changed = trio.Event()
        self._began_s = 0.0

    def request_read(self) -> None:
        """Request a new read of the registries, because something was mounted or a user may have registered a store."""
        self._has_changed.set()

    async def wait_for_changes(self) -> None:
        """Wait until the registries should be read again. Call this after the last result was applied. Checkpoint"""
        took_s = boot_s() - self._began_s
        await trio.sleep(max(timers.current.registries_pause_s, timers.current.registries_pauses * took_s))
        with trio.move_on_after(self._context.config.poll_s):
            await self._has_changed.wait()

    async def read(self, users: Iterable[int]) -> None:
        """Bring `lines` up to date. Raises  ForkerLost. Checkpoint

        users  users with a folder in a served store, who may be missing from the account database
        """
        self._has_changed = trio.Event()
        self._began_s = boot_s()
        uids = [uid for uid in users if uid][:_MOST_NAMED]
        read_uids: set[int] = set()

        def on_registry(home: UserRegistry, directory: Fd | None) -> None:
            read_uids.add(home.uid)
            self._forget(home.uid)
            self.lines |= {
                (home.uid, line_of.line.store()): line_of for line_of in home.words if line_of.uid == home.uid
            }
            self._n_more[home.uid] = home.n_more
            self._watch(home.uid, directory)

        try:
            is_whole = await self._context.forker.read_registries(uids, on_registry, timers.current.registries_limit_s)
        except OSError as error:
            _LOG.warning("users' registries can't be read: %s", error.strerror)
            is_whole = False
        if is_whole:  # a user who was not reported no longer has a store
            for uid in self._n_more.keys() - read_uids:
                self._forget(uid)

    def _forget(self, uid: int) -> None:
        self.lines = {key: line_of for key, line_of in self.lines.items() if key[0] != uid}
        self._n_more.pop(uid, None)
        watch = self._watches.pop(uid, None)
        if watch is not None:
            self._context.watcher.remove(watch)

    def _watch(self, uid: int, directory: Fd | None) -> None:
        """Watch a user's registry for new stores."""

        def on_event(event: InotifyEvent) -> None:
            if event.kinds & (InotifyMask.IGNORED | InotifyMask.UNMOUNT):
                self._watches.pop(uid, None)
            if event.name == STORES or not event.name:
                self._has_changed.set()

        if directory is not None:
            try:
                self._watches[uid] = self._context.watcher.add(directory, InotifyMask.MOVED_TO, on_event)
            except OSError as error:
                _LOG.warning("the registry of uid %d can't be watched: %s", uid, error.strerror)

    def passed_over(self) -> tuple[PassedOver, ...]:
        return tuple(
            PassedOver(f"uid {uid}", f"{n:,} of the stores in the user's registry", "trashd reap deletes their orphans")
            for uid, n in sorted(self._n_more.items())
            if n
        )


class OwnStoreLimit:
    """The limits for one store, shared with other stores of the same user and on the same mount."""

    def __init__(
        self, limits: OwnStoreLimits, threads: trio.CapacityLimiter, turns: tuple[trio.Semaphore, ...]
    ) -> None:
        """threads: limits the threads that use the user's disks; a hanging thread counts until it returns"""
        self.threads = threads
        self._limits = limits
        self._turns = turns

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Wait for a free place, and occupy it during the `with` block. Checkpoint"""
        user, mount = self._turns
        async with user, mount:
            yield

    def has_waiters(self) -> bool:
        """Return whether another store waits for this one to close."""
        return any(turn.statistics().tasks_waiting for turn in self._turns)

    def most_remembered(self) -> int:
        """Return how many orphans of the store may be remembered."""
        return max(_MOST_REMEMBERED // max(self._limits.n_stores, 1), _LEAST_REMEMBERED)


class OwnStoreLimits:
    """The limits for all users' own stores."""

    def __init__(self) -> None:
        self.n_stores = 0  # number of served stores, as counted by the service
        self._threads: dict[int, trio.CapacityLimiter] = {}
        self._users: dict[int, trio.Semaphore] = {}
        self._mounts: dict[int, trio.Semaphore] = {}

    def of(self, uid: int, mnt_id: int) -> OwnStoreLimit:
        """Return the limit for one more store of a user on a mount."""
        threads = self._threads.setdefault(uid, trio.CapacityLimiter(_THREADS))
        user = self._users.setdefault(uid, trio.Semaphore(_OF_USER))
        return OwnStoreLimit(self, threads, (user, self._mounts.setdefault(mnt_id, trio.Semaphore(_OF_MOUNT))))
