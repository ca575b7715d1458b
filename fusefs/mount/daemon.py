"""The daemon: from a backing directory to a mount that answers, and to its clean end."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import pyfuse3
import trio

from fusefs.core.errors import Busy, NotPermitted
from fusefs.core.mountstats import Gauges
from fusefs.core.names import printable
from fusefs.linux.capabilities import Capability, drop_capabilities, keep_capabilities_as_others
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import FUSE_MAGIC, Kernel
from fusefs.linux.mountinfo import Mount, read_mounts
from fusefs.linux.notify import Notifier
from fusefs.mount import loop, runtime
from fusefs.mount.adapter import Adapter
from fusefs.mount.attach import Attached, Way, attach, detach, flags_of
from fusefs.mount.gate import Gate
from fusefs.mount.hands import Hands
from fusefs.mount.notifier import Watched, notify, watching
from fusefs.mount.options import Backing, Coherence, Options
from fusefs.mount.points import check, mount_of_device, top_mount
from fusefs.mount.replies import Replies, begin_session
from fusefs.mount.seen import forget_earlier
from fusefs.mount.stats import Stats, kept
from fusefs.mount.trashdir import prepare_store
from fusefs.mount.vfs import Vfs
from fusefs.mount.xattrs import Xattrs

_N_WORKERS = 512
"""Requests under way at a time: those that wait for a slow filesystem must leave room for others. min = max: pyfuse3
must never end one between a reply and the next request."""
_N_THREADS_MAX, _FDS_PER_THREAD = 480, 8
"""Of them may wait; what needs no waiting is answered by the others. A thread may be lent two or three fds."""
_GRACE_S, _GLANCE_S = 2.0, 0.02
_GC_THRESHOLDS = (10_000, 20, 1000)
_EXIT_LOST = 1
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_log = logging.getLogger(__name__)


class _Announcing(Adapter):
    """Tells when the kernel has begun to talk to us: whoever asks the mount from now on is answered."""

    def __init__(self, vfs: Vfs, options: Options, replies: Replies, stats: Stats, ready: Callable[[], None]) -> None:
        xattrs = Xattrs(vfs, are_shown=options.has_xattrs)
        n_fds_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        hands = Hands(vfs.gate, stats, max(1, min(n_fds_max // _FDS_PER_THREAD, _N_THREADS_MAX)))
        super().__init__(vfs, xattrs, hands, replies, stats)
        self._ready = ready

    def init(self) -> None:
        """The answer to INIT goes out when this returns."""
        super().init()
        self._replies.patch_next(begin_session)
        self._ready()


def serve(source: bytes, target: bytes, options: Options, ready: Callable[[], None], *, replaces: bool = False) -> int:
    """Mount and serve until it is unmounted or a signal says stop; the exit code.

    source, target  from points.real_path; the same directory: it is mounted over itself
    ready           called once, when the mount answers
    replaces        a dead mount of ours at the mount point makes way
    Raises          what keeps it from mounting; after that an exception leaves the mount as it is, dead: an empty
                    directory in its place would be taken for the truth
    """
    dead = check(source, target, replaces=replaces)
    is_over_itself = source == target
    if is_over_itself and os.geteuid():
        raise NotPermitted(target, "mounting a directory over itself takes root; name another one to mount it at")
    if dead is not None and is_over_itself:
        detach(dead, Way.LAZY)
        dead = None
    with ExitStack() as stack:
        place = stack.enter_context(runtime.claimed(target)) if os.geteuid() == 0 else None
        root, backing = Fd(os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)), source
        stack.callback(root.close)
        if is_over_itself and place is not None:
            root, backing = runtime.clone(place, target, root)
            stack.callback(root.close)
        n_fds_max = _raise_fd_limit()
        if os.geteuid() == 0:
            _make_store(root, source, options)
            _be_less_than_root()
        stats = stack.enter_context(kept(target))
        vfs = _vfs(root, options, stats, n_fds_max)
        stack.callback(vfs.close)
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # until somebody is there to unmount
        if dead is not None:
            detach(dead, Way.LAZY)
        attached = attach(backing, target, options, options.flags | flags_of(root))
        replies = Replies(attached.fd)
        stack.callback(replies.close)
        ended = trio.Event()
        if not loop.hook(replies.replied, ended.set):
            replies.let_pass()
            vfs.gate.stay_home()  # listings of names alone would be taken for listings with attributes
        forget_earlier(attached.mount)
        stats.mounted(attached.mount.device)
        return _run(attached, vfs, _Announcing(vfs, options, replies, stats, ready), options, ended)


def _vfs(root: Fd, options: Options, stats: Stats, n_fds_max: int) -> Vfs:
    kernel = Kernel()
    is_local, is_fuse = kernel.is_local(root), kernel.filesystem(root) == FUSE_MAGIC
    is_auto = options.backing is Backing.AUTO
    is_slow = not is_local if is_auto else options.backing is Backing.SLOW
    return Vfs(
        root,
        Gate(is_slow=is_slow, is_measured=is_auto and (is_local or is_fuse)),
        stats,
        max_fds=n_fds_max,
        timeout_s=options.timeout_s,
        cache_bytes=options.cache_bytes,
        n_in_flight=options.n_in_flight,
        shows_trash=options.show_trash,
        is_shared=options.coherence is Coherence.SHARED,
        is_flushed=not is_local,
    )


def _raise_fd_limit() -> int:
    """As many fds as we may have without asking; how many that is."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _make_store(root: Fd, source: bytes, options: Options) -> None:
    """Who sees nothing but the mount can't make the store that he needs for `.trashd/drop`."""
    if "ro" not in options.flags | flags_of(root):
        problem = prepare_store(Kernel(), root, source)
        if problem is not None:
            _log.warning("%s: no trash store, so no .trashd/drop: %s", printable(source), problem)


def _be_less_than_root() -> None:
    try:
        drop_capabilities(Capability.SYS_RESOURCE, Capability.FSETID)
        keep_capabilities_as_others()
    except PermissionError as error:
        raise NotPermitted("root's capabilities can't be changed", "the container has to give CAP_SETPCAP") from error


def _run(attached: Attached, vfs: Vfs, adapter: Adapter, options: Options, ended: trio.Event) -> int:
    path = printable(attached.mount.point)
    _collect_garbage_seldom()
    pyfuse3.init(adapter, f"/dev/fd/{int(attached.fd)}", set())
    try:
        with _watching(attached, vfs) if options.coherence is Coherence.SHARED else nullcontext() as watched:
            if watched is not None:
                vfs.keeps_listings, vfs.memory.has_news = True, watched.has_news
            trio.run(_loop, attached.mount, vfs, adapter.stats, watched, ended)
    except BaseException:
        _log.exception("%s: the daemon failed; the mount stays, dead, until trashd mount --replace", path)
        raise
    finally:
        pyfuse3.close(unmount=False)  # that closes the fd; what libfuse did not mount it must not unmount
    if mount_of_device(attached.mount.device):
        _log.error("%s: the connection was aborted; the mount stays, dead, until trashd mount --replace", path)
        return _EXIT_LOST
    return 0


def _collect_garbage_seldom() -> None:
    """A full collection stops everybody for 0.2 s with 300,000 nodes; and what makes cycles here (errors) is young."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def _watching(attached: Attached, vfs: Vfs) -> AbstractContextManager[Watched | None]:
    _major, _, connection = attached.mount.device.partition(b":")
    return watching(vfs.directories.fd_of(vfs.nodes.root), attached.fd, int(connection))


async def _loop(mount: Mount, vfs: Vfs, stats: Stats, watched: Watched | None, ended: trio.Event) -> None:
    """Serve until the mount is gone.

    ended       it is, or is to be
    Checkpoint  everywhere
    """
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_on_signal, mount, ended)
        nursery.start_soon(_wait_no_longer, vfs.gate, ended, nursery.cancel_scope)
        nursery.start_soon(_tell_watchdog)
        nursery.start_soon(stats.keep_gauges, partial(_gauges, vfs))
        if watched is not None:
            nursery.start_soon(notify, vfs, watched)
        await pyfuse3.main(min_tasks=_N_WORKERS, max_tasks=_N_WORKERS)
        nursery.cancel_scope.cancel()


def _gauges(vfs: Vfs) -> Gauges:
    """How much there is at the moment."""
    with vfs.gate.lock:
        return Gauges(
            n_nodes=len(vfs.nodes),
            n_handles=len(vfs.handles),
            n_directory_fds=len(vfs.directories),
            n_cached=len(vfs.memory.cache),
            cache_bytes=vfs.memory.cache.size_bytes if len(vfs.memory.cache) else 0,
            cache_size_bytes=vfs.memory.size_bytes,
            n_threads=vfs.gate.n_inside,
            n_prefetches=vfs.ahead.n_under_way,
            is_slow=int(vfs.gate.is_slow),
        )


async def _tell_watchdog() -> None:
    """Tell systemd, if it watches, that this loop turns: who waits for a hung daemon is only freed by its end.

    Checkpoint  between two words
    """
    notifier = Notifier()
    try:
        period_s = notifier.watchdog_s()
        while period_s is not None:
            notifier.alive()
            await trio.sleep(period_s / 3)
    finally:
        notifier.close()


async def _wait_no_longer(gate: Gate, ended: trio.Event, scope: trio.CancelScope) -> None:
    """In the end, give up operations that wait for a filesystem which hangs; who asked for them gets an error.

    Checkpoint  until the end, and for a while
    """
    await ended.wait()
    with trio.move_on_after(_GRACE_S):
        while gate.n_inside:
            await trio.sleep(_GLANCE_S)
    scope.cancel()


async def _stop_on_signal(mount: Mount, ended: trio.Event, task_status: trio.TaskStatus[None]) -> None:
    """End the service cleanly at the first signal; the second one ends the process.

    Unmounting is a thread's work: the kernel may have to ask us for the last time meanwhile.
    Checkpoint  while waiting for the signal, and for the thread
    """
    with trio.open_signal_receiver(*_STOPS) as signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        task_status.started()
        await anext(signals)
    _log.info("%s: stopping", printable(mount.point))
    await trio.to_thread.run_sync(_leave, mount.device)
    pyfuse3.terminate()
    ended.set()


def _leave(device: bytes) -> None:
    mount = mount_of_device(device)
    if mount is None:
        return
    if top_mount(mount.point, read_mounts()) != mount:
        _log.error("%s: something else is mounted over it, so it stays, dead", printable(mount.point))
        return
    try:
        detach(mount)
    except Busy:
        _log.info("%s: in use; who has something open there gets errors from now on", printable(mount.point))
        detach(mount, Way.LAZY)
