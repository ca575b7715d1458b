"""What is mounted inside SRC and may never answer: another machine's filesystem, or a program's (FUSE).

Whatever asks it goes to a thread, wherever SRC itself is. Where it is asked nothing, the kernel knows it well enough:
statx with AT_STATX_DONT_SYNC tells what a mount of FUSE is without its daemon, so that a directory with such a mount
point in it is listed at once, by a client that doesn't look into that. Of others (NFS, autofs) the name alone may wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import trio

from fusefs.linux.mount_changes import MountWatch
from fusefs.linux.mountinfo import Mount, is_inside, read_mounts

_ANSWERS = frozenset({
    b"bcachefs", b"btrfs", b"cgroup2", b"devpts", b"devtmpfs", b"erofs", b"exfat", b"ext2", b"ext3", b"ext4", b"f2fs",
    b"iso9660", b"jfs", b"mqueue", b"nilfs2", b"ntfs3", b"proc", b"ramfs", b"reiserfs", b"squashfs", b"sysfs", b"tmpfs",
    b"udf", b"vfat", b"xfs", b"zfs",
})  # fmt: skip
"""Types of filesystems that need no server; all that is not known may."""


class Submounts:
    """The mounts inside a directory that may not answer, as long as `keep` runs; none before."""

    def __init__(self) -> None:
        self.asks = True
        """Whether a statx asks another machine, or a daemon, if it takes one; else what the kernel knows is replied."""
        self.names: frozenset[bytes] = frozenset()
        """The last names of those of their mount points where even a look may wait."""
        self.devices: frozenset[int] = frozenset()
        self.folding: dict[int, bool] = {}
        """By device: whether a name may have other spellings there, as NameValidity has found it."""
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
