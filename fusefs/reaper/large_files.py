"""Paced removal of large files: each file is looked at before it goes, its bytes counted; a large one is cut in steps.

A large file is cut only when no other process sees it: a write lease says that none has it open, and after the
unlink no link is left. Without the second look a link made in between would lose its content (measured).
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from fusefs.core.freed_space import STAT_BLOCK_BYTES
from fusefs.core.slice_budget import CUT_BYTES, SliceBudget
from fusefs.core.slices import raw
from fusefs.linux.batched_calls import StatxResult
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

_FOR_WRITING = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
_FOR_LOOKING = os.O_PATH | os.O_NOFOLLOW


class UnnamedLargeFile(NamedTuple):
    """A large file that has no name any more and is ours to cut."""

    fd: Fd
    n_bytes: int


class LargeFiles:
    """The bytes of one slice: what went so far, and what is cut."""

    def __init__(self, kernel: Kernel, budget: SliceBudget) -> None:
        self._kernel = kernel
        self._budget = budget
        self.n_bytes = 0

    def n_entries_left(self, n_removed: int) -> int:
        """How many entries may go before the budget is spent."""
        most = self._budget.n_entries
        return 1 << 30 if most is None else max(most - n_removed, 0)

    def is_spent(self, n_removed: int) -> bool:
        """Whether either limit is reached."""
        most = self._budget.n_bytes
        return (most is not None and self.n_bytes >= most) or self.n_entries_left(n_removed) == 0

    def count(self, dir_fd: Fd, seen: StatxResult) -> UnnamedLargeFile | None:
        """Count a file's bytes before it is unlinked; if it is large it may be unlinked here, to be cut."""
        if stat.S_ISDIR(seen.st_mode) or seen.st_nlink != 1:
            return None
        n_bytes = seen.st_blocks * STAT_BLOCK_BYTES
        if stat.S_ISREG(seen.st_mode) and n_bytes > CUT_BYTES:
            fd = self._take(dir_fd, seen)
            if fd is not None:
                return UnnamedLargeFile(fd, seen.st_size)
        self.n_bytes += n_bytes
        return None

    def _take(self, dir_fd: Fd, seen: StatxResult) -> Fd | None:
        """Unlink a file that is to be cut; None if it may not be: its name is left, or gone with the file's content."""
        try:
            fd = self._open(dir_fd, seen.name)
        except OSError:
            return None
        try:
            self._kernel.lease(fd)
            st = self._kernel.fstat(fd)
            if (st.st_dev, st.st_ino) == (seen.st_dev, seen.st_ino) and st.st_nlink == 1:
                self._kernel.unlink(dir_fd, raw(seen.name))
                if self._is_ours(fd):
                    return fd
        except OSError:
            pass  # EAGAIN: it is open elsewhere; EINVAL: no leases here. It goes in one piece.
        fd.close()
        return None

    def _open(self, dir_fd: Fd, name: str) -> Fd:
        try:
            return self._kernel.open_beneath(dir_fd, raw(name), _FOR_WRITING)
        except PermissionError:
            with self._kernel.open_beneath(dir_fd, raw(name), _FOR_LOOKING) as fd:
                if self._kernel.fstat(fd).st_nlink == 1:
                    self._kernel.chmod(fd, stat.S_IRUSR | stat.S_IWUSR)
            return self._kernel.open_beneath(dir_fd, raw(name), _FOR_WRITING)

    def _is_ours(self, fd: Fd) -> bool:
        """Whether a file has no link, and no process waits in open(2) for our lease to end."""
        return self._kernel.fstat(fd).st_nlink == 0 and self._kernel.has_lease(fd)

    def cut(self, fd: Fd, size: int) -> int:
        """Cut one step off the end of a file; the size that is left, 0 when it is done with."""
        left = max(size - CUT_BYTES, 0)
        try:
            if not self._is_ours(fd):
                return 0
            before = self._kernel.fstat(fd).st_blocks
            self._kernel.truncate(fd, left)
            self.n_bytes += max(before - self._kernel.fstat(fd).st_blocks, 0) * STAT_BLOCK_BYTES
        except OSError:
            return 0  # it has no name any more: what is left of it goes with the fd
        return left
