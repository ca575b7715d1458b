"""Early writeback of a filesystem's metadata, a little at a time.

Unlinks on ext4 leave inode tables, bitmaps and directories to be written. The kernel writes what is older than half a
minute, all of it at once: hundreds of requests, behind which whoever reads or flushes has to wait. So the writeback is
begun a little at a time.
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
    """The block device of a volume, whose pages these are. Nothing is read from it, nor written to it, by us."""

    def __init__(self, fd: Fd) -> None:
        self._fd = fd
        self._used = Lock()
        """Taken while a thread is at it, and for good with the fd's end."""
        self._is_over = False

    @classmethod
    def of(cls, volume_fd: int) -> Self | None:
        """None where a filesystem does this by itself (xfs, btrfs), or we may not open the device."""
        with suppress(OSError):
            dev = os.fstat(volume_fd).st_dev
            if syscalls.statfs_type(volume_fd) == EXT_MAGIC:
                fd = Fd(os.open(_path_of(dev), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
                told = os.fstat(fd)
                if stat.S_ISBLK(told.st_mode) and told.st_rdev == dev:
                    return cls(fd)
                fd.close()
        return None

    def begin(self) -> None:
        """Have written what waits for no commit of the journal any more. It waits for nothing but room in the device's
        queue; in a thread, which may go on when it is closed.
        """
        if self._used.acquire(blocking=False):
            with suppress(OSError):  # unplugged
                syscalls.sync_file_range(self._fd, syscalls.SYNC_FILE_RANGE_WRITE)
            self._used.release()
            self._let_go()

    def close(self) -> None:
        """Let go of the device, at the latest when no thread is at it any more."""
        self._is_over = True
        self._let_go()

    def _let_go(self) -> None:
        if self._is_over and self._used.acquire(blocking=False):
            self._fd.close()


def _path_of(dev: int) -> bytes:
    """By the kernel's own name for a block device, which it has in /dev. Raises  OSError; there may be none"""
    with open(f"{device_directory(dev)}/uevent", "rb") as told:
        names = [line.partition(b"=")[2] for line in told.read().splitlines() if line.startswith(b"DEVNAME=")]
    return os.path.join(b"/dev", *names)
