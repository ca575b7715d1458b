"""The daemon: mounts a backing directory, serves the mount, and ends it cleanly."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module

import trio

from fusefs.core.errors import Busy, Exit, NotPermitted, Refused, TrashdError, from_os
from fusefs.core.mount_options import BackingSpeed, EngineMode, MountOptions, PassthroughMode, UringMode
from fusefs.core.printable_names import printable
from fusefs.core.uring_choice import FastPath, find_obstacle
from fusefs.linux.backing_fd_socket import socket_path
from fusefs.linux.credentials import Capability, drop_capabilities, prepare_to_act_as_others
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_device import abort, open_abort
from fusefs.linux.kernel import FUSE_MAGIC, Kernel
from fusefs.linux.mountinfo import Mount, read_mounts
from fusefs.linux.syscalls import name_to_handle_at
from fusefs.linux.systemd import SystemdNotifier
from fusefs.linux.uring_facts import enable_uring, read_facts
from fusefs.mount.life import backing_fd_server
from fusefs.mount.life.init import InitFlag, InitRequest, read_init, reply_to_init, why_too_old
from fusefs.mount.life.root_inode import attach_with_new_root
from fusefs.mount.places import runtime_dir
from fusefs.mount.places.attach import Attached, UnmountMode, attach, attach_later, detach, flag_bits, inherited_flags
from fusefs.mount.places.counters import Counters, open_counters
from fusefs.mount.places.fast_path_states import FastPathStates
from fusefs.mount.places.find_mounts import remove_stale_counters
from fusefs.mount.places.mount_points import check_mount, mount_of_device, top_mount
from fusefs.mount.requests.device_readers import DeviceReaders
from fusefs.mount.requests.fuse_requests import GONE_ERRNOS, FuseRequests
from fusefs.mount.requests.ring_threads import RingThreads
from fusefs.mount.requests.thread_pool import ThreadPool
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.listings import why_opendir_is_needed
from fusefs.mount.tree.mount_state import n_spare_fds
from fusefs.mount.tree.passthrough import stack_depth, why_refused, why_unsupported_on
from fusefs.mount.tree.trashd_dir import prepare_store
from fusefs.mount.tree.vfs import Vfs

_N_THREADS_MAX, _FDS_PER_THREAD = 480, 8
"""A worker may hold two or three fds for an operation."""
_IMPORTED_LATE = (
    "fusefs.core.glob", "fusefs.core.node_heartbeats", "fusefs.core.record_decoding", "fusefs.linux.config_files",
    "fusefs.linux.refused_calls", "fusefs.store.store_registry",
)  # fmt: skip
"""Modules that functions import when called. They are loaded at the start, since an upgrade may replace them later."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_S, _POLL_S = 2.0, 0.02
_REST_MS = 20
"""How long requests in /dev/fuse may wait with io_uring, since each wake-up of a reader takes time from clients."""
_GC_THRESHOLDS = (2000, 5, 20_000)
_SHORT_TIMEOUT_S = 1.0
_SHORT_CACHE_NOTE = "and may write to files behind the new one, so names and attributes are cached for only one second"

_FLAGS = {FastPath.URING: InitFlag.OVER_IO_URING, FastPath.PASSTHROUGH: InitFlag.PASSTHROUGH}

_log = logging.getLogger(__name__)


class _MountDaemon:
    """Runs one mount from INIT to its end."""

    def __init__(
        self,
        vfs: Vfs,
        options: MountOptions,
        attached: Attached,
        states: FastPathStates,
        ready: Callable[[], None],
    ) -> None:
        """ready: called once, when the mount has begun to answer requests"""
        self._vfs = vfs
        self._lock = vfs.lock
        self._options = options
        self._attached = attached
        self._mount = attached.mount
        self._device = attached.fd
        self._states = states
        self._ready = ready
        self._readers: DeviceReaders | None = None
        self._stack = ExitStack()
        self._ended = trio.Event()
        """Set when the mount is unmounted, or has to be unmounted."""
        self._attach_lock = trio.Lock()
        self._refusal: TrashdError | None = None
        """The reason why the mount was unmounted before it was ready."""

    def serve_until_unmounted(self) -> int:
        """Serve until the mount is unmounted; return the exit code. Raises  TrashdError: the mount was never ready"""
        path = printable(self._mount.point)
        _collect_garbage_seldom()
        with self._stack:
            try:
                with _backing_server(self._attached, self._vfs) as queries:
                    trio.run(self._loop, queries)
            except BaseException:
                _log.exception(
                    "%s: the daemon failed; the dead mount stays in place until you run trashd mount --replace", path
                )
                raise
            finally:
                if self._readers is not None:
                    self._readers.end(_GRACE_S)
                self._vfs.passthrough.close()
        if self._refusal is not None:
            raise self._refusal
        if mount_of_device(self._mount.device):
            _log.error(
                "%s: the connection was aborted; the dead mount stays in place until you run trashd mount --replace",
                path,
            )
            return Exit.FAILED
        return 0

    async def _loop(self, queries: socket.socket | None) -> None:
        """Checkpoint  everywhere"""
        async with trio.open_nursery() as nursery:
            await nursery.start(_stop_on_signal, self._mount, self._attach_lock, self._unmount)
            nursery.start_soon(_cancel_hung_operations, self._lock, self._ended, nursery.cancel_scope)
            nursery.start_soon(_notify_watchdog)
            nursery.start_soon(self._vfs.stats.update_gauges, self._vfs.read_gauges)
            await nursery.start(self._lock.submounts.watch_mounts)
            nursery.start_soon(self._vfs.retries.expire_until_cancelled)
            nursery.start_soon(self._vfs.stored_notices.forget_until_cancelled, self._device)
            if queries is not None:
                nursery.start_soon(backing_fd_server.answer_queries, queries, self._vfs)
            try:
                if self._states.is_on(FastPath.ENGINE):
                    self._begin_engine()
                else:
                    await self._begin_plain(nursery)
                await self._report_ready()
            except TrashdError as error:
                self._refusal = error
                await self._unmount()
            except OSError as error:
                if error.errno not in GONE_ERRNOS:
                    raise
                self._ended.set()  # unmounted before it was ready

    # The engine, and plain mode.

    def _begin_engine(self) -> None:
        """Reply to INIT, and start threads that serve all other requests.

        Raises  KernelRefused: the kernel's FUSE is too old; OSError: the mount is gone
        """
        states, vfs, device = self._states, self._vfs, self._device
        init = read_init(device)
        for path, flag in _FLAGS.items():
            if not init.offers(flag):
                states.turn_off(path, "this kernel does not support it")
        rings = self._make_rings() if states.is_on(FastPath.URING) else None
        flags = self._flags(init)
        reply_to_init(
            device, init, flags, has_acls=self._options.default_permissions, stack_depth=stack_depth(vfs.root)
        )
        vfs.nodes.device = device
        pool = ThreadPool(_n_threads())
        vfs.nodes.opens_directories = not flags & InitFlag.NO_OPENDIR_SUPPORT
        requests = FuseRequests(vfs, device, pool)
        on_gone = partial(trio.lowlevel.current_trio_token().run_sync_soon, self._ended.set)
        self._readers = DeviceReaders(requests, vfs.core, on_gone)
        if rings is not None:
            try:
                rings.serve(vfs.core)
            except OSError as error:
                states.turn_off(FastPath.URING, f"the kernel refused it: {error.strerror}")
        rest_ms = _REST_MS if states.is_on(FastPath.URING) else 0
        self._readers.begin(rest_ms)

    def _flags(self, init: InitRequest) -> InitFlag:
        flags = InitFlag(0)
        for path, flag in _FLAGS.items():
            if self._states.is_on(path):
                flags |= flag
        if self._vfs.stable_handle(name_to_handle_at(self._vfs.root)):  # otherwise a link could change unnoticed
            flags |= InitFlag.CACHE_SYMLINKS
        why = why_opendir_is_needed(self._vfs.root, checks_permissions=self._options.default_permissions)
        if why is None and not init.offers(InitFlag.NO_OPENDIR_SUPPORT):
            why = "this kernel does not support it"
        if why is None:
            return flags | InitFlag.NO_OPENDIR_SUPPORT
        self._states.limit(FastPath.LISTINGS, f"the kernel sends requests to open and close directories: {why}")
        return flags

    def _make_rings(self) -> RingThreads | None:
        """Create the rings; return None if that fails. Must be called before the reply to INIT: after that reply, the
        kernel uses only rings."""
        rings = self._stack.enter_context(_open_rings(self._attached, self._device, self._states))
        if rings is not None:
            try:
                rings.prepare()
            except (OSError, RuntimeError) as error:
                self._states.turn_off(FastPath.URING, f"its threads or memory can't be allocated: {error}")
                return None
        return rings

    async def _begin_plain(self, nursery: trio.Nursery) -> None:
        """Have pyfuse3 serve requests. Checkpoint  until the kernel has the reply to INIT"""
        from fusefs.mount.plain.handlers import PlainHandlers, answer_requests, session

        handlers = PlainHandlers(self._vfs, _n_threads(), has_acls=self._options.default_permissions)
        self._vfs.nodes.lists_with_attributes = True
        self._stack.enter_context(session(handlers, self._device))

        async def answer() -> None:
            await answer_requests()
            self._ended.set()

        nursery.start_soon(answer)
        await handlers.has_init_reply.wait()
        self._vfs.nodes.device = self._device

    async def _report_ready(self) -> None:
        """Attach the mount, decide which fast paths are on, and report that the mount is ready.

        Raises      Refused: the mount can't be attached, or lacks a required fast path
        Checkpoint  while the mount is being attached
        """
        states, options = self._states, self._options
        if not await self._attach():
            return
        if states.is_on(FastPath.PASSTHROUGH):
            states.turn_off(FastPath.PASSTHROUGH, why_refused(self._device))
        if states.is_on(FastPath.PASSTHROUGH):
            run_soon = trio.lowlevel.current_trio_token().run_sync_soon  # any thread may have to turn it off
            self._vfs.passthrough.start(lambda why: run_soon(states.turn_off, FastPath.PASSTHROUGH, why))
        elif options.passthrough is PassthroughMode.ON:
            raise Refused(
                f"passthrough=on: {states.why(FastPath.PASSTHROUGH)}", "use passthrough=auto to mount without it"
            )
        if options.uring is UringMode.ON and not states.is_on(FastPath.URING):
            raise Refused(f"uring=on: {states.why(FastPath.URING)}", "use uring=auto to mount without io_uring")
        states.begin()
        self._ready()

    async def _attach(self) -> bool:
        """Attach the mount, if it is unattached.

        Returns     whether users can see it
        Raises      Refused
        Checkpoint  while it is being attached
        """
        mount, mount_fd, vfs = self._mount, self._attached.unattached_fd, self._vfs
        async with self._attach_lock:
            if mount_fd is not None and not self._ended.is_set():
                try:
                    await attach_with_new_root(vfs, mount, mount_fd)
                except OSError as error:
                    hint = "trashd doctor lists the system calls that are refused here"
                    raise Refused(f"{printable(mount.point)}: mounting failed: {error.strerror}", hint) from error
        return not self._ended.is_set()

    async def _unmount(self) -> None:
        """Unmount in a thread, so that requests are still answered. Checkpoint  until the mount is unmounted"""
        await trio.to_thread.run_sync(_unmount_device, self._mount.device)
        self._ended.set()


def serve(
    source: bytes, target: bytes, options: MountOptions, ready: Callable[[], None], *, replaces: bool = False
) -> int:
    """Mount, and serve until the mount is unmounted or a signal stops the daemon; return the exit code.

    source, target  from mount_points.real_path; if they are the same, the directory is mounted over itself
    ready           called once, when the mount has begun to answer requests
    replaces        whether to replace a dead trashd mount at the mount point
    Raises          TrashdError, OSError: SRC can't be mounted. An exception after mounting leaves the dead mount in
                    place, because users would mistake the empty directory below it for the real one
    """
    for name in _IMPORTED_LATE:
        import_module(name)
    why_plain = _why_plain(options)
    dead = check_mount(source, target, replaces=replaces)
    has_replaced = dead is not None
    is_over_itself = source == target
    if is_over_itself and os.geteuid():
        raise NotPermitted(target, "only root can mount a directory over itself; name another directory to mount it on")
    if dead is not None and is_over_itself:
        options = _detach_dead(dead, options)
        dead = None
    with ExitStack() as stack:
        place = stack.enter_context(runtime_dir.lock_directory(target)) if os.geteuid() == 0 else None
        root = Fd(os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        stack.callback(root.close)
        if os.geteuid() == 0:
            _make_store(root, source, options)
        backing = inside = source
        if place is not None and is_over_itself:
            root, inside = runtime_dir.clone_backing_tree(place, root, flag_bits(options.flags))
            stack.callback(root.close)
            backing = inside
        n_fds_max = _raise_fd_limit()
        if os.geteuid() == 0:
            _drop_root_rights()
        stats = stack.enter_context(open_counters(target))
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # until a task handles them by unmounting
        if dead is not None:
            options = _detach_dead(dead, options)
        vfs = _make_vfs(root, options, stats, n_fds_max, is_plain=why_plain is not None)
        stack.callback(vfs.close)
        flags = options.flags | inherited_flags(root)
        if options.uring is UringMode.ON:
            with suppress(OSError):  # in that case, the switch is reported as off
                enable_uring()  # before mounting: INIT, the mount's first request, offers io_uring only if it is on
        starts_unattached = os.geteuid() == 0 and options.default_permissions and why_plain is None
        # If a dead mount was detached, users would see an empty directory until the daemon answers, and mistake it for
        # the real one.
        starts_unattached &= not has_replaced
        attached = _attach_mount(backing, target, options, flags, starts_unattached=starts_unattached)
        stack.callback(attached.fd.close)
        states = stack.enter_context(
            closing(FastPathStates(target, attached.mount.st_dev(), options.disabled_fast_paths()))
        )
        states.turn_off(FastPath.ENGINE, why_plain)
        if states.is_on(FastPath.URING):
            states.turn_off(FastPath.URING, find_obstacle(read_facts(), trusts_all=options.uring is UringMode.ON))
        states.turn_off(FastPath.PASSTHROUGH, why_unsupported_on(root))
        vfs.lock.submounts.start(inside, os.fstat(root).st_dev)
        remove_stale_counters(attached.mount)
        stats.set_device(attached.mount.st_dev())
        return _MountDaemon(vfs, options, attached, states, ready).serve_until_unmounted()


def _why_plain(options: MountOptions) -> str | None:
    """Return why pyfuse3 serves the mount; None if the engine does.

    Raises  Refused: pyfuse3 is needed, but can't be loaded
    """
    why = "engine=plain" if options.engine is EngineMode.PLAIN else why_too_old(os.uname().release)
    if why is not None:
        try:
            import_module("fusefs.mount.plain.handlers")
        except ImportError as error:
            hint = "apt install trashd-mount, or pipx inject trashd pyfuse3 (on Debian: apt install libfuse3-dev first)"
            raise Refused(
                f"the engine is off ({why}), and pyfuse3, which is then needed, can't be loaded ({error})", hint
            ) from error
    return why


def _attach_mount(
    source: bytes, target: bytes, options: MountOptions, flags: frozenset[str], *, starts_unattached: bool
) -> Attached:
    """Mount. starts_unattached: if possible, leave the mount unattached until the daemon answers (root_inode.py)"""
    if starts_unattached:
        try:
            return attach_later(source, target, options, flags)
        except OSError as error:
            _log.info("the mount can't be created unattached, so it is attached at once: %s", error.strerror)
    return attach(source, target, options, flags)


def _detach_dead(dead: Mount, options: MountOptions) -> MountOptions:
    """Detach a dead mount; return the options for the mount that replaces it.

    Clients that have files of the dead mount open in passthrough continue to write to them behind the new mount. As
    long as any client might do so, names and attributes must not be cached for long.
    """
    try:
        detach(dead)
    except Busy:
        detach(dead, UnmountMode.LAZY)
        _log.warning("%s: programs still use the replaced mount, %s", printable(dead.point), _SHORT_CACHE_NOTE)
        return replace(options, timeout_s=min(options.timeout_s, _SHORT_TIMEOUT_S))
    return options


def _make_vfs(root: Fd, options: MountOptions, stats: Counters, n_fds_max: int, *, is_plain: bool) -> Vfs:
    """Create the tables and operations of a mount. In plain mode, each operation may wait in a thread, and nothing is
    cached."""
    kernel = Kernel()
    is_local, is_fuse = kernel.is_local(root), kernel.filesystem(root) == FUSE_MAGIC
    is_auto = options.backing is BackingSpeed.AUTO and not is_plain
    is_slow = not is_local if is_auto else options.backing is BackingSpeed.SLOW and not is_plain
    lock = TablesLock(is_slow=is_slow, is_measured=is_auto and (is_local or is_fuse))
    return Vfs(root, lock, stats, replace(options, cache_bytes=0) if is_plain else options, n_fds_max)


def _raise_fd_limit() -> int:
    """Raise the limit on open fds as far as allowed; return the new limit."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _make_store(root: Fd, source: bytes, options: MountOptions) -> None:
    """Create a trash store if there is none: `.trashd/drop` needs one, and clients that see only the mount can't create
    one."""
    if "ro" not in options.flags | inherited_flags(root):
        problem = prepare_store(Kernel(), root, source)
        if problem is not None:
            error = from_os(problem, source)
            _log.warning("%s: .trashd/drop is not available: %s (%s)", printable(source), error.message(), error.hint)


def _drop_root_rights() -> None:
    try:
        drop_capabilities(Capability.SYS_RESOURCE, Capability.FSETID)
        prepare_to_act_as_others()
    except PermissionError as error:
        raise NotPermitted("changing root's capabilities", "the container must grant CAP_SETPCAP") from error


def _n_threads() -> int:
    """Return how many requests may wait in threads at a time."""
    n_fds_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(n_fds_max // _FDS_PER_THREAD, _N_THREADS_MAX))


def _collect_garbage_seldom() -> None:
    """Collect garbage seldom and in small steps, since each collection stops all threads.

    A full collection takes 0.2 s with 300,000 nodes, and finds little, since objects in cycles (errors) are young here.
    A collection of the middle generation takes 19 ms if it may hold 200,000 objects, and less than 1 ms if it may hold
    10,000; the total time is the same.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


@contextmanager
def _open_rings(attached: Attached, device: int, states: FastPathStates) -> Iterator[RingThreads | None]:
    """Yield the ring threads; None if we could not abort the connection, which we must do if a thread fails."""
    try:
        abort_fd = open_abort(attached.mount.connection())
    except OSError as error:
        states.turn_off(FastPath.URING, f"the daemon can't open the file that aborts its connection: {error.strerror}")
        yield None
        return
    n_fds = n_spare_fds(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) * 3 // 4
    rings = RingThreads(device, partial(abort, abort_fd), n_fds)
    try:
        yield rings
    finally:
        rings.give_up()
        abort(abort_fd)  # otherwise a thread in a call that hangs would keep /dev/fuse open, and clients waiting
        rings.wait_for_end(_GRACE_S)  # the tables that the threads use are closed next
        abort_fd.close()


def _backing_server(attached: Attached, vfs: Vfs) -> AbstractContextManager[socket.socket | None]:
    """Run a server that opens the backing tree for users' commands, if the mount covers SRC, so that they can't."""
    mount, path = attached.mount, socket_path(attached.mount.source)
    return nullcontext() if path is None else backing_fd_server.run_server(path, vfs.root, mount.device)


async def _notify_watchdog() -> None:
    """Report to systemd's watchdog, if enabled, that this loop is running: clients of a hung daemon wait until it ends.

    Checkpoint  between two reports
    """
    notifier = SystemdNotifier()
    try:
        period_s = notifier.watchdog_s()
        while period_s is not None:
            notifier.reset_watchdog()
            await trio.sleep(period_s / 3)
    finally:
        notifier.close()


async def _cancel_hung_operations(lock: TablesLock, ended: trio.Event, scope: trio.CancelScope) -> None:
    """When the mount has ended, give up operations that wait for a hung filesystem; their clients get an error.

    Checkpoint  until the end of the mount, and then for a short time
    """
    await ended.wait()
    with trio.move_on_after(_GRACE_S):
        while lock.n_inside:
            await trio.sleep(_POLL_S)
    scope.cancel()


async def _stop_on_signal(
    mount: Mount, attach_lock: trio.Lock, unmount: Callable[[], Awaitable[None]], task_status: trio.TaskStatus[None]
) -> None:
    """Unmount when a signal arrives, so that the service ends cleanly. A second signal terminates the process.

    attach_lock  while another task holds it, nothing is unmounted
    Checkpoint  while waiting for the signal, and during `unmount`
    """
    with trio.open_signal_receiver(*_STOPS) as signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        task_status.started()
        await anext(signals)
    _log.info("%s: stopping", printable(mount.point))
    async with attach_lock:
        await unmount()


def _unmount_device(device: bytes) -> None:
    """Unmount the mount of a connection, if it exists and is not covered by another mount."""
    mount = mount_of_device(device)
    if mount is None:
        return
    if top_mount(mount.point, read_mounts()) != mount:
        _log.error("%s: another mount covers this one, so the dead mount stays in place", printable(mount.point))
        return
    try:
        detach(mount)
    except Busy:
        _log.info("%s: still in use; programs with open files there get errors from now on", printable(mount.point))
        detach(mount, UnmountMode.LAZY)
