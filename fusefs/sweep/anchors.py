"""Directories on a long way down that stay open, so that it is not walked from the top for each directory below it.

That would take the square of its length: minutes for a chain of 10,000 directories.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Self

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

_APART = 1000
"""Bytes of path between two of them, about; a shorter path needs none."""
_MOST = 32
_DIR = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


class Anchors:
    """They, on the way to the directory that was opened last."""

    def __init__(self, kernel: Kernel, root: Fd) -> None:
        """root: where the way begins."""
        self._kernel = kernel
        self._root = root
        self._open: deque[tuple[bytes, Fd]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        while self._open:
            self._open.pop()[1].close()

    def open_dir(self, path: bytes) -> Fd:
        """A directory by its path from the root, readable; empty for the root itself. Raises  OSError"""
        while self._open and not path.startswith(self._open[-1][0] + b"/"):
            self._open.pop()[1].close()
        above, fd = self._open[-1] if self._open else (b"", self._root)
        rest = path[len(above) :].lstrip(b"/")
        while len(rest) > _APART and (cut := rest.find(b"/", _APART)) > 0:
            fd = self._kernel.open_beneath(fd, rest[:cut], _DIR)
            rest = rest[cut + 1 :]
            self._open.append((path[: -len(rest) - 1], fd))
            if len(self._open) > _MOST:
                self._open.popleft()[1].close()
        return self._kernel.open_dir(fd, rest or b".")
