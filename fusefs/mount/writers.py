"""As whom a file's content is written: nobody who has it open is asked, so it is neither him nor root.

A handle's reads and writes are made by the daemon, or by the kernel as who the daemon was when it gave it the file
(passthrough.py): the same for all who have it open, in whatever order they came. So they are the owner's, as he was
then, in no group, and with no capability:

- ext2, 3 and 4 give the blocks that they reserve for root (mke2fs -m) to whoever writes with root's fsuid, or with that
  of another user named for it (tune2fs -u); and to CAP_SYS_RESOURCE.
- Who is in a file's group, or has CAP_FSETID, may leave its set-group-ID bit. The daemon is in root's group.

Source  ext4_has_free_clusters in the kernel's fs/ext4/balloc.c, in_group_or_capable in its fs/inode.c
"""

from __future__ import annotations

import stat

from fusefs.linux.attributes import look_at
from fusefs.linux.identity import ITSELF, Identity, in_no_group
from fusefs.linux.kernel import EXT_MAGIC
from fusefs.linux.libc import statfs_type

NOBODY = 65_534
_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def writer_of(uid: int, mode: int) -> int:
    """Whose blocks a file takes: its owner's; but nobody's if it is root's and not root's alone to write."""
    return uid or (NOBODY if mode & _FOR_OTHERS else 0)


class Writers:
    """Who writes which file. Which filesystems have blocks for root is asked once for each."""

    def __init__(self) -> None:
        """Begin; only root's daemon is somebody else than its clients, and only where it knows all users."""
        self._nobody = in_no_group()
        self._has_reserve: dict[int, bool] = {}

    def of(self, device: int, fd: int, writer: int | None) -> Identity:
        """As whom a file is to be written.

        device  of the filesystem that it is on
        writer  by `writer_of`; None: unknown
        """
        if self._nobody is ITSELF:
            return ITSELF
        has_reserve = self._has_reserve.get(device)
        if has_reserve is None:
            has_reserve = self._has_reserve[device] = statfs_type(fd) == EXT_MAGIC
        if writer is None:
            seen = look_at(fd)
            writer = writer_of(seen.uid, seen.mode)
        return self._nobody._replace(uid=0 if writer == NOBODY and not has_reserve else writer)
