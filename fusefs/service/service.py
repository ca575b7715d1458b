"""Run the service, with the objects that all volumes share. It ends within a second, and leaves nothing to repair."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module

import trio

from fusefs.core.errors import BadConfig, Busy
from fusefs.core.events import Event, EventKind
from fusefs.core.printable_names import printable
from fusefs.core.record import quote_path
from fusefs.core.service_status import IDLE_WRITE_S, PassedOver, Status
from fusefs.linux import file_locks
from fusefs.linux.config_files import LoadedConfig
from fusefs.linux.fd import Fd
from fusefs.linux.inotify import InotifyEvent as Noticed
from fusefs.linux.inotify import InotifyMask
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.mountinfo import (
    Mount,
    MountView,
    MountWatch,
    covering_mount_id,
    find_rule_path,
    is_inside,
    mount_of,
    read_mounts,
)
from fusefs.linux.pressure import set_idle_priority
from fusefs.linux.runtime_directories import make_dir, persistent_dir, runtime_dir, state_dir
from fusefs.linux.systemd import SystemdNotifier
from fusefs.service import timers
from fusefs.service.event_outlets import EventOutlets
from fusefs.service.forker import Forker, ForkerLost
from fusefs.service.inotify_watches import InotifyWatches
from fusefs.service.open_volume import StoreInode, all_views, find_id, registered_paths, split_place, volume_paths
from fusefs.service.served_stores import Key, MountPointStores, OwnStoreLimits, RegisteredStores
from fusefs.service.shared_context import ServiceContext, boot_s, in_thread
from fusefs.service.state_files import HeldFiles, Pause, pause_dir, read_pauses, write_status
from fusefs.service.volume_loop import UNSERVED, OwnStore, VolumeLoop
from fusefs.store.registry_lines import STORES, read_own_lines

_LOG = logging.getLogger(__name__)
_IMPORTED_LATE = (
    "fusefs.core.glob", "fusefs.engine.run_slices", "fusefs.linux.backing_fd_socket",
    "fusefs.linux.filesystem_probes", "fusefs.linux.getdents", "fusefs.linux.refused_calls",
    "fusefs.linux.tree_users", "fusefs.linux.xattrs", "fusefs.store.make_store", "hashlib", "statistics",
)  # fmt: skip
"""Modules that shared functions import late. If they were loaded after an upgrade, they would be of the new version."""


class AlreadyRunning(Busy):
    """The user already runs a reaper service"""

    problem = "another reaper service of this user is running"
    hint = "trashd status shows it"


def serve(load: Callable[[], LoadedConfig], volumes: tuple[bytes, ...]) -> None:
    """Run the service until SIGTERM or SIGINT.

    load     reads the configuration. Raises  BadConfig
    volumes  the only volumes to serve; empty: all that have a store
    Raises  AlreadyRunning; BadConfig; ForkerLost; OSError
    """
    for name in _IMPORTED_LATE:
        import_module(name)
    loaded = load()
    with ExitStack() as owned:
        # Start the forker first: it and its children would keep open everything that was opened earlier.
        forker = owned.enter_context(Forker())
        set_idle_priority()
        runtime = make_dir(runtime_dir())
        lock = file_locks.take_lock(runtime)
        if lock is None:
            raise AlreadyRunning(runtime)
        owned.enter_context(lock)
        watcher = owned.enter_context(InotifyWatches())
        mounts = owned.enter_context(MountWatch())
        service = _Service(load, volumes, loaded, runtime, forker, watcher)
        service.context.save_clock()  # so that the next service knows this clock, however this one ends
        try:
            trio.run(service.serve, mounts)
        finally:
            service.context.save_clock()
    if service.failed is not None:
        raise service.failed


class _Service:
    _nursery: trio.Nursery

    def __init__(
        self,
        load: Callable[[], LoadedConfig],
        volumes: tuple[bytes, ...],
        loaded: LoadedConfig,
        runtime: bytes,
        forker: Forker,
        watcher: InotifyWatches,
    ) -> None:
        self.context = ServiceContext(forker, watcher, loaded.config, state_dir(), self.report, self.changed)
        self.failed: ForkerLost | None = None
        self._load = load
        self._volumes = volumes
        self._loaded = loaded
        self._runtime = runtime
        self._held = HeldFiles(runtime)
        self._notifier = SystemdNotifier()
        self._loops: dict[bytes, VolumeLoop] = {}
        self._finder = MountPointStores(self.context.kernel)
        self.outlets = EventOutlets(loaded.config)
        self._changed = trio.Event()
        self._nudged = trio.Event()
        self._reloads = trio.Lock()
        self._finds = trio.Lock()
        self._sent_summary = ""
        self._stores: dict[bytes, StoreInode] = {}  # by the path of a loop, as last found
        self._mounts: dict[bytes, Mount | None] = {}  # the mount that each volume's path leads into
        self._views: list[MountView] = []  # of trashd mounts, as of the last `_find`
        self._own_loops: dict[Key, VolumeLoop] = {}  # users' own stores
        self._own_stores: RegisteredStores | None = None
        self._limits = OwnStoreLimits()
        self._limiter = trio.CapacityLimiter(1)  # for checks of volumes that are not served
        self._passed_over: tuple[PassedOver, ...] = ()

    def report(self, event: Event) -> None:
        is_own = any((loop.owner, loop.path) == (event.uid, event.volume) for loop in self._own_loops.values())
        self.outlets.report(event, is_own=is_own)

    def changed(self) -> None:
        """Request that the status be written again."""
        self._changed.set()

    async def serve(self, mounts: MountWatch) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._handle_signals)
            self._nursery.start_soon(self.context.watcher.dispatch_events)
            self._nursery.start_soon(self._end_with_forker)
            self.outlets.start(self.context.config, self._nursery)
            _log_warnings(self._loaded)
            self._watch_pauses()
            self._watch_registry()
            await self._find()
            self._nursery.start_soon(self._watch_mounts, mounts)
            self._nursery.start_soon(self._handle_nudges)
            self._nursery.start_soon(self._publish_status)
            if os.geteuid() == 0 and not self._volumes:
                self._nursery.start_soon(self._serve_own_stores)
            self.context.report(
                EventKind.STARTED, detail=f"trashd {self.context.version}, {_volumes(len(self._loops))}"
            )
            self._write_status()
            self._notifier.notify_ready(self._summary())
            self._nursery.start_soon(self._stay_alive)
        self.context.report(EventKind.STOPPED)
        self._write_status()
        self.outlets.close()

    async def _end_with_forker(self) -> None:
        """End the service when the forker dies, even if the service is idle, so that systemd restarts it."""
        await self.context.forker.until_lost()
        self._fail(ForkerLost())

    def _fail(self, error: ForkerLost) -> None:
        self.failed = error
        self._nursery.cancel_scope.cancel()

    async def _handle_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGHUP, signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    self._nursery.start_soon(self._reload)
                else:
                    self._notifier.notify_stopping()
                    self._nursery.cancel_scope.cancel()

    async def _reload(self) -> None:
        """Reload the configuration; if it is invalid, log its errors and keep the old one."""
        async with self._reloads:
            self._notifier.notify_reloading()
            try:
                self._loaded = await trio.to_thread.run_sync(self._load)
            except BadConfig as error:
                for problem in error.problems:
                    _LOG.error("configuration: %s", problem)
                self.context.report(
                    EventKind.CONFIGURED, detail="the new configuration has errors, so the old one stays in use"
                )
            else:
                _log_warnings(self._loaded)
                self.context.config = self._loaded.config
                self.outlets.configure(self.context.config, self._nursery)
                files = ", ".join(map(printable, self._loaded.files)) or "defaults"
                self.context.report(EventKind.CONFIGURED, detail=files)
                await self._find()
                for loop in self._all_loops():
                    loop.reconfigure()
            self._notifier.notify_ready(self._summary())

    # Volumes

    async def _find(self) -> None:
        """Find volumes, start loops for new ones, and end those of stores that now have a better path.

        A mount point that does not respond is skipped.
        """
        async with self._finds:  # a search with an old list of mounts must not be the last one
            await self._find_alone()

    async def _find_alone(self) -> None:
        mounts = await trio.to_thread.run_sync(read_mounts)
        named = self._volumes or tuple(volume.path for volume in self.context.config.volumes if volume.is_served)
        paths = named
        self._views = all_views(mounts, self._views)
        if not self._volumes:
            # Our own registry lists root's stores, or the user's own; its paths are checked like all others.
            own_lines = await trio.to_thread.run_sync(read_own_lines)
            paths = (*named, *volume_paths(mounts, self._views), *registered_paths(own_lines, mounts, self._views))
        stores = await self._finder.find((*paths, *self._loops), mounts)
        first_paths: dict[StoreInode, bytes] = {}
        for path, inode in stores.items():
            first_paths.setdefault(inode, path)
        for path in first_paths.values():
            if self.context.config.may_serve(split_place(path)[0]):
                self._start_loop(path, stays=path in named)
        for path in named:
            self._start_loop(path, stays=True)
        self._stores = {path: inode for path, inode in (self._stores | stores).items() if path in self._loops}
        for path, inode in self._stores.items():
            if path not in named and first_paths.get(inode, path) != path:
                self._loops[path].leave()  # a trashd mount shows the store now, or shows it no longer
        for volume in self.context.config.volumes:
            mount = mount_of(volume.path, mounts)
            if volume.path not in self._loops and self._mounts.get(volume.path) != mount:
                self._mounts[volume.path] = mount
                self._nursery.start_soon(self._remember_rules, volume.path, mounts)
        awaited = [view.mount for view in self._views if view.mount not in mounts]  # as in `_watch_mounts`
        for path, loop in self._loops.items():
            mount = mount_of(path, mounts)
            last = self._mounts.get(path, mount)
            if last in awaited:
                continue
            if last != mount:
                loop.check_mount()
            self._mounts[path] = mount
        if self._own_stores is not None:
            self._own_stores.request_read()

    async def _remember_rules(self, path: bytes, mounts: list[Mount]) -> None:
        """Note the rules of a volume even if it is not served: at another path, it must not get the default rules."""
        volume = await in_thread(self._limiter, partial(find_id, self.context.kernel, path, mounts))
        if volume and self.context.config.find_section(path, volume) is not None:
            self.context.volumes.refuse_without_rules(volume, path, self.context.config)

    def _start_loop(self, path: bytes, *, stays: bool) -> None:
        if path not in self._loops:
            loop = self._loops[path] = VolumeLoop(self.context, path, stays=stays)
            loop.set_pause(self._pause_of(loop, read_pauses(self._runtime, time.time())))
            self._nursery.start_soon(self._run_loop, loop)

    async def _serve_own_stores(self) -> None:
        own_stores = self._own_stores = RegisteredStores(self.context)
        try:
            while True:
                await own_stores.read({uid for loop in self._loops.values() for uid in loop.users})
                self._find_own(own_stores)
                await own_stores.wait_for_changes()
        except ForkerLost as error:
            self._fail(error)

    def _find_own(self, own_stores: RegisteredStores) -> None:
        """Start loops for new stores, and end those of stores that are no longer registered."""
        for key in self._own_loops.keys() - own_stores.lines.keys():
            self._own_loops[key].leave()
        mounts, pauses = read_mounts(), read_pauses(self._runtime, time.time())
        # Only `_find` may note that a mount is gone: `_watch_mounts` repeats it until then.
        our_views = all_views(mounts, self._views)
        for key, line_of in own_stores.lines.items():
            uid, path = line_of.uid, line_of.line.path
            own = OwnStore(line_of, find_rule_path(path, mounts, our_views))
            if key in self._own_loops:
                self._own_loops[key].renew(own)
                continue
            limit = self._limits.of(uid, covering_mount_id(path, mounts))
            loop = self._own_loops[key] = VolumeLoop(self.context, path, stays=False, own=own, limit=limit)
            loop.set_pause(self._pause_of(loop, pauses))
            self._nursery.start_soon(self._run_loop, loop)
        self._limits.n_stores = len(self._own_loops)
        passed_over = own_stores.passed_over()
        for one in set(passed_over) - set(self._passed_over):
            _LOG.warning("not served: %s: %s", one.where, one.what)
        self._passed_over = passed_over
        self.changed()

    def _all_loops(self) -> list[VolumeLoop]:
        return [*self._loops.values(), *self._own_loops.values()]

    async def _run_loop(self, loop: VolumeLoop) -> None:
        """Run a volume's loop. A bug in one loop must not end the others."""
        while True:
            try:
                await loop.serve()
                if loop.owner is not None:
                    del self._own_loops[loop.key()]
                    if self._own_stores is not None:
                        self._own_stores.request_read()  # it may have been registered again
                else:
                    del self._loops[loop.path]
                    self._mounts.pop(loop.path, None)
                    self._nudged.set()  # its store may be served at another path, or at this one again
                return
            except ForkerLost as error:
                self._fail(error)
                return
            except Exception:
                _LOG.exception("%s: internal error in trashd", printable(loop.path))
                loop.note_broken("internal error in trashd: see the log")
                await trio.sleep(timers.current.find_pause_s)  # in case it recurs at once

    async def _watch_mounts(self, mounts: MountWatch) -> None:
        """Find volumes when something is mounted, and check the known ones when something is unmounted."""
        while True:
            standing = read_mounts()
            # A trashd mount may be about to be mounted again, or its daemon may be about to end.
            is_awaited = any(view.mount not in standing for view in self._views)
            with trio.move_on_after(timers.current.find_pause_s if is_awaited else self.context.config.poll_s):
                await trio.lowlevel.wait_readable(mounts)
                mounts.acknowledge()
            await self._find()  # a store may have been created, too
            await trio.sleep(timers.current.find_pause_s)

    async def _handle_nudges(self) -> None:
        """Find volumes when a store was created, repaired or registered (`trashd init`)."""
        while True:
            await self._nudged.wait()
            self._nudged = trio.Event()
            for loop in self._all_loops():
                if loop.phase in UNSERVED:
                    loop.retry()
            await self._find()

    # Pauses

    def _watch_pauses(self) -> None:
        mask = InotifyMask.MOVED_TO | InotifyMask.DELETE
        with Fd(os.open(pause_dir(self._runtime), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            self.context.watcher.add(fd, mask, self._set_pauses)

    def _watch_registry(self) -> None:
        """Watch our user's registry, in order to find stores that commands register."""

        def on_event(event: Noticed) -> None:
            if event.name == STORES:
                self._nudged.set()

        # A user without a home directory, or with a read-only one, registers nothing.
        with (
            suppress(OSError),
            Fd(os.open(make_dir(persistent_dir()), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd,
        ):
            self.context.watcher.add(fd, InotifyMask.MOVED_TO, on_event)

    def _set_pauses(self, _event: Noticed) -> None:
        self._nudged.set()
        pauses = read_pauses(self._runtime, time.time())
        for loop in self._all_loops():
            loop.set_pause(self._pause_of(loop, pauses))

    def _pause_of(self, loop: VolumeLoop, pauses: Mapping[bytes | None, Pause]) -> Pause | None:
        """Return a loop's pause. A volume's pause includes users' own stores on it, so that it can be unmounted."""
        if loop.owner is not None:
            by_path = {path: pause for path, pause in pauses.items() if path is not None}
            above = (pause for path, pause in by_path.items() if any(is_inside(one, path) for one in loop.paths()))
            return next(above, pauses.get(None))
        return pauses.get(*loop.paths()) or pauses.get(None)

    # Status

    async def _publish_status(self) -> None:
        """Write the status when it changes, each second during work, and at intervals when idle."""
        while True:
            self._changed = trio.Event()
            self._write_status()
            summary = self._summary()
            if summary != self._sent_summary:
                self._sent_summary = summary
                self._notifier.set_status(summary)
            self.context.save_clock_after_report()
            is_working = any(loop.session is not None for loop in self._all_loops())
            with trio.move_on_after(timers.current.status_pause_s if is_working else IDLE_WRITE_S):
                await self._changed.wait()
            await trio.sleep(timers.current.status_least_pause_s)

    def _write_status(self) -> None:
        status = Status(
            version=self.context.version,
            pid=os.getpid(),
            boot_id=boot_id(),
            host=os.uname().nodename,
            started_ns=self.context.started_ns,
            updated_ns=time.time_ns(),
            config_files=tuple(map(quote_path, self._loaded.files)),
            volumes=tuple(loop.status() for loop in self._all_loops()),
            passed_over=self._passed_over,
        )
        with suppress(OSError):  # /run is full: the next write may succeed
            write_status(self._runtime, status)
            self._held.publish(status)
        self.outlets.publish(status)

    def _summary(self) -> str:
        """Return one line for `systemctl status`."""
        n_due = sum(user.n_due(boot_s()) for loop in self._all_loops() for user in loop.users.values())
        stores = "1 user-owned store" if len(self._own_loops) == 1 else f"{len(self._own_loops)} user-owned stores"
        own = f" and {stores}" if self._own_loops else ""
        return f"{_volumes(len(self._loops))}{own}, {n_due:,} orphans due"

    async def _stay_alive(self) -> None:
        """Notify systemd's watchdog that the event loop is alive."""
        watchdog_s = self._notifier.watchdog_s()
        while watchdog_s is not None:
            self._notifier.reset_watchdog()
            await trio.sleep(watchdog_s / 2)


def _log_warnings(loaded: LoadedConfig) -> None:
    """Log a warning for each key that no longer has an effect."""
    for warning in loaded.warnings:
        _LOG.warning("configuration: %s", warning)


def _volumes(n: int) -> str:
    return "1 volume" if n == 1 else f"{n} volumes"
