"""The lock around the tables: held by one thread at a time, and by none during a call to the backing filesystem.

An operation holds the lock between its calls: it calls the backing filesystem through `call` only, and values read from
the tables before a call may be outdated after it. Requests in the native core take the same lock (see
native/tables_lock.c).
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

from fusefs.core.mount_counters import Latency
from fusefs.linux.fuse_caller import is_killed, unshare_umask
from fusefs.linux.mountinfo import Mount, MountWatch, is_inside, read_mounts
from fusefs.mount.native._core import TablesMutex, close_unused_fds

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
"""Between two tries while another process holds a lease: most leases are released at once, some after 45 seconds."""

_SERVERLESS_TYPES = frozenset({
    b"bcachefs", b"btrfs", b"cgroup2", b"devpts", b"devtmpfs", b"erofs", b"exfat", b"ext2", b"ext3", b"ext4", b"f2fs",
    b"iso9660", b"jfs", b"mqueue", b"nilfs2", b"ntfs3", b"proc", b"ramfs", b"reiserfs", b"squashfs", b"sysfs", b"tmpfs",
    b"udf", b"vfat", b"xfs", b"zfs",
})  # fmt: skip
"""Filesystem types that never wait for a server. Any other type may."""


class WouldWait(Exception):
    """The request would wait for another process. It has changed nothing yet, and is to be queued with others that
    wait."""


class Submounts:
    """Mounts inside SRC that may never answer: another machine's filesystem, or a program's (FUSE).

    Requests that reach them go to a worker, even if SRC itself is local. Where their server is not asked, statx with
    AT_STATX_DONT_SYNC returns what the kernel knows. For a FUSE mount it does so without the mount's daemon, so a
    directory with such a mount point is listed at once. For others (NFS, autofs) even a lookup of the name may block.
    All of them are known while `keep` runs; before that, none are.
    """

    def __init__(self) -> None:
        self.asks_server = True
        """Whether a statx asks a mount's server or daemon, if it has one; else the kernel's cached attributes are
        returned."""
        self.names: frozenset[bytes] = frozenset()
        """Base names of the mount points where even a lookup may block."""
        self.devices: frozenset[int] = frozenset()
        self.folding: dict[int, bool] = {}
        """By device: whether a name may have other spellings there, as detected by MountState."""
        self._top: bytes | None = None
        self._own_device = -1
        self._known_devices: set[int] = set()
        self.on_change: Callable[[], object] = lambda: None
        """Called by any thread when `names` may have changed."""

    def start(self, top: bytes, device: int) -> None:
        """Watch the mounts below a path, as our mount namespace has it. device: of the directory at that path"""
        self._top, self._own_device = top, device
        self._known_devices = {device}

    def note_device(self, device: int) -> None:
        """Note an inode on that device: the filesystem may have been mounted just now."""
        if device not in self._known_devices and self._top is not None:
            self._known_devices.add(device)
            self._read()

    def are_up_to_date(self, device: int) -> bool:
        """Return whether attributes on a device are up to date with its server, if it has one."""
        self.note_device(device)
        return self.asks_server or device not in self.devices

    async def watch_mounts(self) -> None:
        """Keep track of mounts and unmounts, until cancelled. Checkpoint  everywhere"""
        with MountWatch() as watch:
            while True:
                self._known_devices = {self._own_device}
                self.folding.clear()
                await trio.to_thread.run_sync(self._read)  # takes a while with thousands of mounts
                await trio.lowlevel.wait_readable(watch.fileno())
                watch.acknowledge()

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
    """As a context manager: the calling thread holds the tables, except during its calls."""

    def __init__(self, *, is_slow: bool = False, is_measured: bool = False) -> None:
        """Set up the lock.

        is_slow      whether the backing filesystem is slow
        is_measured  whether response times may change that
        """
        self.mutex = TablesMutex()
        self.n_inside = 0
        """Number of operations that run in threads of their own."""
        self._thread = threading.local()
        self.latency = Latency(is_slow=is_slow) if is_measured else None
        self.mutex.is_slow = is_slow
        self.submounts = Submounts()

    @property
    def is_slow(self) -> bool:
        """Whether the backing filesystem is slow: operations go to workers."""
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
        """Hold the tables, unless the calling thread holds them already."""
        return nullcontext() if self.mutex.is_held else self

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the backing filesystem with the tables released; return the result."""
        if not self.mutex.is_held:
            return function(*args, **kwargs)
        self.mutex.release()
        try:
            return function(*args, **kwargs)
        finally:
            self.mutex.acquire()

    def retry_patiently(self, pid: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Retry a function that fails with EAGAIN instead of waiting, as an open with O_NONBLOCK does for a lease.

        function  calls the backing filesystem by `call`
        pid     of the client's thread: once it is killed, the request need not wait any more
        Raises  WouldWait: this thread must not wait; OSError EINTR: the client was killed
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
        """Note how long the native core has waited for n statx together; by any thread.

        Returns  whether fast ones are to be reported, too
        """
        if self.latency is None:
            return False
        self.latency.record(took_ns / n, n)
        self.mutex.is_slow = self.latency.is_slow
        return self.latency.is_in_doubt

    def run_patient_operation(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation that may wait for another process, as `run` does."""
        self._thread.is_patient = True
        try:
            return self.run_operation(function, *args, **kwargs)
        finally:
            self._thread.is_patient = False

    def run_operation(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation from beginning to end in the calling thread, which is used for operations only."""
        if not hasattr(self._thread, "has_umask"):
            unshare_umask()
            self._thread.has_umask = True
        with self:
            self.n_inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.n_inside -= 1
