"""The lock around the tables: held by one thread at a time, and by none while a call to the backing filesystem waits.

The code of an operation has the tables between its calls: whatever asks the backing filesystem goes through `call`, and
what was read from the tables before it may be old after it. Requests of the native core have the same lock
(mount/native/lock.c).
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
from fusefs.linux.fuse_caller import have_own_umask, is_killed
from fusefs.linux.mountinfo import Mount, MountWatch, is_inside, read_mounts
from fusefs.mount.native._core import TablesMutex, close_unused

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
"""Between two tries of what another process keeps: most leases are given up at once, some after 45 seconds."""

_ANSWERS = frozenset({
    b"bcachefs", b"btrfs", b"cgroup2", b"devpts", b"devtmpfs", b"erofs", b"exfat", b"ext2", b"ext3", b"ext4", b"f2fs",
    b"iso9660", b"jfs", b"mqueue", b"nilfs2", b"ntfs3", b"proc", b"ramfs", b"reiserfs", b"squashfs", b"sysfs", b"tmpfs",
    b"udf", b"vfat", b"xfs", b"zfs",
})  # fmt: skip
"""Types of filesystems that need no server; all that is not known may."""


class WouldWait(Exception):
    """A request waits for another process, and has changed nothing yet: it is to be queued among those that do."""


class Submounts:
    """What is mounted inside SRC and may never answer: another machine's filesystem, or a program's (FUSE).

    Whatever asks it goes to a thread, wherever SRC itself is. Where it is asked nothing, the kernel knows it well
    enough: statx with AT_STATX_DONT_SYNC tells what a mount of FUSE is without its daemon, so that a directory with
    such a mount point in it is listed at once. Of others (NFS, autofs) the name alone may wait. All are known as long
    as `keep` runs; none before.
    """

    def __init__(self) -> None:
        self.asks = True
        """Whether a statx asks another machine, or a daemon, if it takes one; else what the kernel knows is replied."""
        self.names: frozenset[bytes] = frozenset()
        """The last names of those of their mount points where even a look may wait."""
        self.devices: frozenset[int] = frozenset()
        self.folding: dict[int, bool] = {}
        """By device: whether a name may have other spellings there, as MountState has found it."""
        self._top: bytes | None = None
        self._own = -1
        self._known: set[int] = set()
        self.tell: Callable[[], object] = lambda: None
        """Called when `names` may be others, by any thread."""

    def begin(self, top: bytes, device: int) -> None:
        """Know those below a path, as our mount namespace has it. device: of what is there itself"""
        self._top, self._own = top, device
        self._known = {device}

    def meet(self, device: int) -> None:
        """What was found is on that device: it may have been mounted just now."""
        if device not in self._known and self._top is not None:
            self._known.add(device)
            self._read()

    def are_asked(self, device: int) -> bool:
        """Whether attributes on a device are those that its server has, if it has one."""
        self.meet(device)
        return self.asks or device not in self.devices

    async def keep(self) -> None:
        """See what is mounted and unmounted, until cancelled. Checkpoint  everywhere"""
        with MountWatch() as watch:
            while True:
                self._known = {self._own}
                self.folding.clear()
                await trio.to_thread.run_sync(self._read)  # of thousands of mounts it takes its time
                await trio.lowlevel.wait_readable(watch.fileno())
                watch.seen()

    def _read(self) -> None:
        with suppress(OSError):  # no /proc: none are known
            waiting = [mount for mount in read_mounts() if self._may_wait(mount)]
            self.devices = frozenset(mount.st_dev() for mount in waiting)
            self.names = frozenset(os.path.basename(mount.point) for mount in waiting if not mount.is_fuse())
            self.tell()

    def _may_wait(self, mount: Mount) -> bool:
        top = self._top
        is_below = top is not None and mount.point != top and is_inside(mount.point, top)
        return is_below and mount.fstype not in _ANSWERS


class TablesLock:
    """`with` it: the calling thread has the tables, but for its calls."""

    def __init__(self, *, is_slow: bool = False, is_measured: bool = False) -> None:
        """Begin with no thread inside.

        is_slow      whether the backing filesystem is
        is_measured  until its answers tell otherwise
        """
        self.mutex = TablesMutex()
        self.n_inside = 0
        """Operations in threads of their own."""
        self._own = threading.local()
        self.latency = Latency(is_slow=is_slow) if is_measured else None
        self.mutex.is_slow = is_slow
        self.submounts = Submounts()

    @property
    def is_slow(self) -> bool:
        """Whether operations go to threads now."""
        return self.mutex.is_slow

    @is_slow.setter
    def is_slow(self, is_slow: bool) -> None:
        self.mutex.is_slow = is_slow

    def __enter__(self) -> Self:
        self.mutex.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self.mutex.release()
        close_unused()

    def held(self) -> AbstractContextManager[object]:
        """Have the tables, unless the calling thread has them already."""
        return nullcontext() if self.mutex.is_held else self

    def call(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a call to the backing filesystem returns; others have the tables meanwhile."""
        if not self.mutex.is_held:
            return act(*args, **kwargs)
        self.mutex.release()
        try:
            return act(*args, **kwargs)
        finally:
            self.mutex.acquire()

    def patiently(self, pid: int, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a function returns that says EAGAIN instead of waiting, as an open with O_NONBLOCK does for a lease.

        act     asks the backing filesystem by `call`
        pid     of the thread that asks for it: once killed, it need not wait any more
        Raises  WouldWait: unless this thread is one that may wait; OSError EINTR: the client was killed
        """
        pause_s = _SHORTEST_PAUSE_S
        while True:
            try:
                return act(*args, **kwargs)
            except BlockingIOError:
                if not getattr(self._own, "is_patient", False):
                    raise WouldWait from None
            self.call(time.sleep, pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            if self.call(is_killed, pid):
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    def took(self, took_ns: int, n: int) -> bool:
        """How long the native core has waited for so many statx together, as it reports; by any thread.

        Returns  whether quick ones are to be reported, too
        """
        if self.latency is None:
            return False
        self.latency.took(took_ns / n, n)
        self.mutex.is_slow = self.latency.is_slow
        return self.latency.is_in_doubt

    def run_patiently(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, of an operation that may wait for another process."""
        self._own.is_patient = True
        try:
            return self.run(act, *args, **kwargs)
        finally:
            self._own.is_patient = False

    def run(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An operation in a thread of its own, from beginning to end."""
        if not hasattr(self._own, "has_umask"):
            have_own_umask()
            self._own.has_umask = True
        with self:
            self.n_inside += 1
            try:
                return act(*args, **kwargs)
            finally:
                self.n_inside -= 1
