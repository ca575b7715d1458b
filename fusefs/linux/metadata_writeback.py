"""Early writeback of a filesystem's metadata, in small parts.

After unlinks on ext4, inode tables, bitmaps and directories must be written. The kernel writes everything that is
older than half a minute at once: hundreds of requests, which delay other processes' reads and flushes. So we begin the
writeback earlier, in small parts.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from threading import Lock
from typing import Self

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import EXT_MAGIC
from fusefs.linux.pressure import device_directory


class MetadataWriteback:
    """A volume's block device, whose page cache holds the metadata. It is opened only to begin writeback."""

    def __init__(self, fd: Fd) -> None:
        self._fd = fd
        self._lock = Lock()
        """Held while a thread uses the fd, and forever once the fd is closed."""
        self._is_over = False

    @classmethod
    def open_for(cls, volume_fd: int) -> Self | None:
        """Open a volume's device; None if that can't be opened, or the filesystem needs no help (xfs, btrfs)."""
        with suppress(OSError):
            dev = os.fstat(volume_fd).st_dev
            if syscalls.statfs_type(volume_fd) == EXT_MAGIC:
                fd = Fd(os.open(_path_of(dev), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
                device_stat = os.fstat(fd)
                if stat.S_ISBLK(device_stat.st_mode) and device_stat.st_rdev == dev:
                    return cls(fd)
                fd.close()
        return None

    def begin(self) -> None:
        """Begin to write metadata that need not wait for a journal commit; wait only for room in the device's queue.

        The method runs in a thread, which may still be running when `close` is called.
        """
        if self._lock.acquire(blocking=False):
            with suppress(OSError):  # unplugged
                syscalls.sync_file_range(self._fd, syscalls.SYNC_FILE_RANGE_WRITE)
            self._lock.release()
            self._close_if_unused()

    def close(self) -> None:
        """Close the device now, or once no thread is using it."""
        self._is_over = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_over and self._lock.acquire(blocking=False):
            self._fd.close()


def _path_of(dev: int) -> bytes:
    """Return a block device's path in /dev, by the kernel's name for it; the path might not exist. Raises  OSError"""
    with open(f"{device_directory(dev)}/uevent", "rb") as uevent:
        names = [line.partition(b"=")[2] for line in uevent.read().splitlines() if line.startswith(b"DEVNAME=")]
    return os.path.join(b"/dev", *names)
