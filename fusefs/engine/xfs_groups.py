"""Allocation groups of an xfs: a worker has one for itself while it unlinks there.

Each unlink and each freeing of an inode takes its group's lock for a moment, and sleeps if another has it: two
workers in one group take more than twice the time of one, in different ones half of it (docs/performance.md).
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

_XFS_IOC_FSGEOMETRY_V1 = 0x80705864
_GEOMETRY_BYTES = 112
_GEOMETRY = struct.Struct("=7I")
"""The first fields: blocksize, rtextsize, agblocks, agcount, logblocks, sectsize, inodesize."""
_MOST_PASSED_OVER = 8


def group_shift(kernel: Kernel, fd: Fd) -> int | None:
    """How many low bits of an inode's number are its place in its group; None if there are no groups, or no telling.

    fd  opened for reading
    """
    buffer = bytearray(_GEOMETRY_BYTES)
    try:
        kernel.ioctl(fd, _XFS_IOC_FSGEOMETRY_V1, buffer)
    except OSError:
        return None  # without it the work is slower, not wrong
    block_bytes, _, group_blocks, n_groups, _, _, inode_bytes = map(int, _GEOMETRY.unpack_from(buffer))
    if n_groups < 2:
        return None
    return (group_blocks - 1).bit_length() + (block_bytes // inode_bytes).bit_length() - 1


class AllocationGroups:
    """A lock for each group, shared with the processes that are forked after it was made."""

    def __init__(self, kernel: Kernel, shift: int | None) -> None:
        """shift: as group_shift says; None: there are no groups, and no worker is in another's way."""
        self._kernel = kernel
        self._shift = shift
        self._locks = None if shift is None else Fd(os.memfd_create("groups"))
        self._n_passed_over = 0

    def __enter__(self) -> Self:
        """Own the locks for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of them."""
        if self._locks is not None:
            self._locks.close()

    @contextmanager
    def alone_in(self, fd: Fd) -> Iterator[None]:
        """Have the group of a directory for the block. A lock ends with its process: one that is killed blocks none."""
        if self._locks is None:
            yield
            return
        group = self._of(fd)
        fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, group)
        try:
            yield
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, group)

    def is_crowded(self, fd: Fd) -> bool:
        """Whether another directory had better be taken first: another worker is in the group of this one.

        Only some are passed over in a row: all that are left may be in one group.
        """
        if self._locks is None or self._n_passed_over == _MOST_PASSED_OVER:
            self._n_passed_over = 0
            return False
        group = self._of(fd)
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, group)
        except BlockingIOError:
            self._n_passed_over += 1
            return True
        fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, group)
        self._n_passed_over = 0
        return False

    def _of(self, fd: Fd) -> int:
        """The group of a directory, and of its files as long as there is room in it."""
        assert self._shift is not None
        return self._kernel.fstat(fd).st_ino >> self._shift
