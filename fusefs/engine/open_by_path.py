"""Directories of one tree by their paths, as a machine finds them that did not open them first.

One component at a time, each asked for: what others could have put on the way is not gone through (I6). Those used last
stay open, so that a path costs what is new of it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from fusefs.core.names import join
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.8
"""Between two looks: each is twice as long as the one before."""

T = TypeVar("T")


def seen_in_time(look: Callable[[], T], most_s: float, *unseen: type[Exception]) -> T:
    """What a look finds, which is had again as long as it is not seen; the last one is after most_s at the earliest.

    unseen  what a look raises then
    Raises  what the last look does; anything else at once
    """
    ends_s, pause_s = time.monotonic() + most_s, _PAUSE_S
    while True:
        try:
            return look()
        except unseen:
            if time.monotonic() >= ends_s:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


_MOST_OPEN = 256
_PATIENCE_S = 1.5
"""How long a name is looked for that another machine has just made: caches of names last a second, mostly."""
_UNSEEN = (errno.ENOENT, errno.ESTALE)


class DirectoriesByPath:
    """The open directories below one; in any thread."""

    def __init__(self, kernel: Kernel, top: Fd, takes: Callable[[Fd, bytes], bool], most: int = _MOST_OPEN) -> None:
        """Have none open.

        top    stays its owner's
        takes  asked of each directory when it is opened, with its path below the top: whether it may be entered
        """
        self._kernel = kernel
        self._top = top
        self._takes = takes
        self._most = most
        self._open: dict[bytes, Fd] = {}  # the last used at the end
        self._lock = threading.Lock()

    def open(self, path: bytes) -> Fd:
        """A directory, readable, for the caller to close.

        Raises  OSError: ENOENT if it is not seen here, after some patience; EPERM if it may not be entered
        """
        return seen_in_time(lambda: self._look(path), _PATIENCE_S, FileNotFoundError)

    def _look(self, path: bytes) -> Fd:
        try:
            return self._find(path)
        except OSError as error:
            if error.errno not in _UNSEEN:
                raise
            self._forget(path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error

    def keep(self, path: bytes, fd: Fd) -> None:
        """Own a directory that was opened and asked for, as long as there is room."""
        with self._lock:
            before = self._open.pop(path, None)
            self._open[path] = fd
            dropped = [] if before is None else [before]
            while len(self._open) > self._most:
                dropped.append(self._open.pop(next(iter(self._open))))
        for one in dropped:
            one.close()

    def close(self) -> None:
        """Close all that is open."""
        with self._lock:
            dropped = [*self._open.values()]
            self._open.clear()
        for one in dropped:
            one.close()

    def _find(self, path: bytes) -> Fd:
        at, fd = self._nearest(path)
        try:
            for name in path[len(at) :].strip(b"/").split(b"/") if at != path else ():
                inner, at = self._kernel.open_dir(fd, name), join(at, name)
                fd.close()
                fd = inner
                if not self._takes(fd, at):
                    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), at)
                self.keep(at, Fd(os.dup(fd)))
        except BaseException:
            fd.close()
            raise
        return fd

    def _nearest(self, path: bytes) -> tuple[bytes, Fd]:
        """The longest part of a path that is open, and a new fd for that."""
        with self._lock:
            at = path
            while at and at not in self._open:
                at = at.rpartition(b"/")[0]
            if not at:
                return b"", Fd(os.dup(self._top))
            fd = self._open.pop(at)
            self._open[at] = fd
            return at, Fd(os.dup(fd))

    def _forget(self, path: bytes) -> None:
        """Close what is open on the way: it may be another directory by now."""
        with self._lock:
            on_way = [at for at in self._open if path == at or path.startswith(at + b"/")]
            dropped = [self._open.pop(at) for at in on_way]
        for one in dropped:
            one.close()
