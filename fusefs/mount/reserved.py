"""Blocks that a filesystem reserves for root: the daemon is root, and nobody else may get at them through it.

ext2, 3 and 4 (mke2fs -m) give them to whoever writes with root's fsuid, or with that of another user named for it
(tune2fs -u); and to CAP_SYS_RESOURCE, which the daemon has not.
Source  ext4_has_free_clusters in the kernel's fs/ext4/balloc.c
"""

from __future__ import annotations

import os
import stat

from fusefs.linux.attributes import look_at
from fusefs.linux.kernel import EXT_MAGIC
from fusefs.linux.libc import statfs_type

NOBODY = 65_534
_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def writer_of(uid: int, mode: int) -> int:
    """As whom a file is written, whoever writes: its owner; but nobody if it is root's and not root's alone to write.

    All who have a file open are passed through by one id (passthrough.py), which was made with one fsuid.
    """
    return uid or (NOBODY if mode & _FOR_OTHERS else 0)


class Reserved:
    """Which filesystems have such blocks: asked once for each."""

    def __init__(self) -> None:
        """Begin; only root's daemon is somebody else than its clients."""
        self._is_root = os.geteuid() == 0
        self._by_device: dict[int, bool] = {}

    def writer(self, device: int, fd: int, writer: int | None) -> int:
        """As whom a file is to be written; 0: as the daemon.

        device  of the filesystem that it is on
        writer  by `writer_of`; None: unknown
        """
        is_here = self._by_device.get(device)
        if is_here is None:
            is_here = self._by_device[device] = self._is_root and statfs_type(fd) == EXT_MAGIC
        if not is_here:
            return 0
        if writer is None:
            seen = look_at(fd)
            writer = writer_of(seen.uid, seen.mode)
        return writer
