"""A kernel that counts how long the paths are by which it opens."""

from __future__ import annotations

import os

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel


class CountedPathBytes(Kernel):
    """`n_bytes` is their sum."""

    n_bytes = 0

    def open_beneath(self, dir_fd: int, path: bytes, flags: int = os.O_PATH | os.O_NOFOLLOW) -> Fd:
        """See Kernel; a path that goes in chunks is counted twice."""
        self.n_bytes += len(path)
        return super().open_beneath(dir_fd, path, flags)
