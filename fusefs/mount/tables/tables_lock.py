"""The lock around the tables. One thread holds it at a time, and never during a call to the backing filesystem.

An operation calls the backing filesystem only through `call`, and holds the lock between these calls. Values that it
has read from the tables may be outdated after a call. Requests in the native core take the same lock
(mount/native/tables_lock.c).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import ParamSpec, Self, TypeVar, TypeVarTuple

import trio

from fusefs.core.slow_backing import SlownessDetector
from fusefs.linux.fuse_caller import is_killed, unshare_umask
from fusefs.linux.mountinfo import Mount, MountWatch, is_inside, read_mounts
from fusefs.mount.native._core import TablesMutex, close_unused_fds

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
"""Pauses between retries while another process holds a lease. Most leases end at once, some after 45 seconds."""

_SERVERLESS_TYPES = frozenset({
    b"bcachefs", b"btrfs", b"cgroup2", b"devpts", b"devtmpfs", b"erofs", b"exfat", b"ext2", b"ext3", b"ext4", b"f2fs",
    b"iso9660", b"jfs", b"mqueue", b"nilfs2", b"ntfs3", b"proc", b"ramfs", b"reiserfs", b"squashfs", b"sysfs", b"tmpfs",
    b"udf", b"vfat", b"xfs", b"zfs",
})  # fmt: skip
"""Filesystem types that never wait for a server. Any other type may."""


class WouldWait(Exception):
    """The request would have to wait for another process. It has changed nothing yet, and must be queued with others
    that wait."""


class Submounts:
    """Mounts inside SRC that may never answer, because another machine or a FUSE daemon serves them.

    Requests that reach them go to a worker, even if SRC itself is local. Unless `asks_server` is true, statx with
    AT_STATX_DONT_SYNC returns the attributes that the kernel has cached. For a FUSE mount, this does not involve the
    mount's daemon, so a directory with such a mount point is listed at once. For other types (NFS, autofs), even a
    lookup of the name may block. The mounts are known only while `watch_mounts` is running.
    """

    def __init__(self) -> None:
        self.asks_server = True
        """Whether statx asks a mount's server or daemon, if there is one; otherwise, it returns what the kernel has
        cached."""
        self.names: frozenset[bytes] = frozenset()
        """Base names of the mount points where even a lookup may block."""
        self.devices: frozenset[int] = frozenset()
        self.folding: dict[int, bool] = {}
        """Maps a device to whether a name may have other spellings there, as detected by MountState."""
        self._top: bytes | None = None
        self._own_device = -1
        self._known_devices: set[int] = set()
        self.on_change: Callable[[], object] = lambda: None
        """Called, in any thread, when `names` may have changed."""

    def start(self, top: bytes, device: int) -> None:
        """Set the path, in our mount namespace, below which mounts are watched. device: st_dev of that directory"""
        self._top, self._own_device = top, device
        self._known_devices = {device}

    def note_device(self, device: int) -> None:
        """Record that an inode is on this device. If the device is new, read the mounts: it may be a new mount."""
        if device not in self._known_devices and self._top is not None:
            self._known_devices.add(device)
            self._read()

    def are_up_to_date(self, device: int) -> bool:
        """Return whether statx returns current attributes on this device: it asks the server, or there is none."""
        self.note_device(device)
        return self.asks_server or device not in self.devices

    async def watch_mounts(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep track of mounts and unmounts, until cancelled. It has started when the mounts are known.

        Checkpoint  everywhere
        """
        with MountWatch() as watch:
            await self._read_anew()
            task_status.started()
            while True:
                await trio.lowlevel.wait_readable(watch.fileno())
                watch.acknowledge()
                await self._read_anew()

    async def _read_anew(self) -> None:
        self._known_devices = {self._own_device}
        self.folding.clear()
        await trio.to_thread.run_sync(self._read)  # takes a while with thousands of mounts

    def _read(self) -> None:
        with suppress(OSError):  # no /proc: no mounts are known
            blocking = [mount for mount in read_mounts() if self._may_block(mount)]
            self.devices = frozenset(mount.st_dev() for mount in blocking)
            self.names = frozenset(os.path.basename(mount.point) for mount in blocking if not mount.is_fuse())
            self.on_change()

    def _may_block(self, mount: Mount) -> bool:
        top = self._top
        is_below = top is not None and mount.point != top and is_inside(mount.point, top)
        return is_below and mount.fstype not in _SERVERLESS_TYPES


class TablesLock:
    """A context manager: during the block, the calling thread holds the lock, except while it is in `call`."""

    def __init__(self, *, is_slow: bool = False, is_measured: bool = False) -> None:
        """Set up the lock.

        is_slow      whether the backing filesystem is slow
        is_measured  whether measured response times may change `is_slow`
        """
        self.mutex = TablesMutex()
        self.n_inside = 0
        """Number of operations that run in threads of their own."""
        self._thread = threading.local()
        self.latency = SlownessDetector(is_slow=is_slow) if is_measured else None
        self.mutex.is_slow = is_slow
        self.submounts = Submounts()

    @property
    def is_slow(self) -> bool:
        """Whether the backing filesystem is slow, so that operations go to workers."""
        return self.mutex.is_slow

    @is_slow.setter
    def is_slow(self, is_slow: bool) -> None:
        self.mutex.is_slow = is_slow

    def __enter__(self) -> Self:
        self.mutex.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self.mutex.release()
        close_unused_fds()

    def ensure_held(self) -> AbstractContextManager[object]:
        """Return a context manager that holds the lock, unless the calling thread holds it already."""
        return nullcontext() if self.mutex.is_held else self

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the backing filesystem with the lock released; return the result."""
        if not self.mutex.is_held:
            return function(*args, **kwargs)
        self.mutex.release()
        try:
            return function(*args, **kwargs)
        finally:
            self.mutex.acquire()

    def retry_patiently(self, pid: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function, and retry while it fails with EAGAIN, as an open with O_NONBLOCK does during a lease.

        function  calls the backing filesystem only through `call`
        pid       of the client's thread; if that is killed, the request stops waiting
        Raises    WouldWait: this thread must not wait; OSError EINTR: the client was killed
        """
        pause_s = _SHORTEST_PAUSE_S
        while True:
            try:
                return function(*args, **kwargs)
            except BlockingIOError:
                if not getattr(self._thread, "is_patient", False):
                    raise WouldWait from None
            self.call(time.sleep, pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            if self.call(is_killed, pid):
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    def note_latency(self, took_ns: int, n: int) -> bool:
        """Record how long the native core waited for n statx calls in total. Any thread may call this.

        Returns  whether fast calls are to be reported, too
        """
        if self.latency is None:
            return False
        self.latency.record(took_ns / n, n)
        self.mutex.is_slow = self.latency.is_slow
        return self.latency.is_in_doubt

    def run_patient_operation(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation as `run_operation` does, but let it wait for another process."""
        self._thread.is_patient = True
        try:
            return self.run_operation(function, *args, **kwargs)
        finally:
            self._thread.is_patient = False

    def run_operation(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a whole operation in the calling thread, which must be used only for operations."""
        if not hasattr(self._thread, "has_umask"):
            unshare_umask()
            self._thread.has_umask = True
        with self:
            self.n_inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.n_inside -= 1
