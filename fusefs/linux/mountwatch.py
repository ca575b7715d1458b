"""An fd that says when something was mounted or unmounted."""

from __future__ import annotations

import os
import select
from typing import Self

from fusefs.linux.fd import Fd

_MOUNTINFO = "/proc/self/mountinfo"


class MountWatch:
    """Readable, as poll(2) and its kin see it, when the mounts of our namespace have changed since the last `seen`.

    The kernel tells it as an exceptional condition of mountinfo, which an event loop does not ask for: so there is an
    epoll in between.
    Source  proc_pid_mounts(5)
    """

    def __init__(self) -> None:
        self._file = Fd(os.open(_MOUNTINFO, os.O_RDONLY | os.O_CLOEXEC))
        self._epoll = select.epoll()
        self._epoll.register(self._file, select.EPOLLPRI)
        self.seen()

    def fileno(self) -> int:
        """What to wait for."""
        return self._epoll.fileno()

    def seen(self) -> None:
        """Wait for the next change from now on."""
        self._epoll.poll(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._epoll.close()
        self._file.close()
