"""An fd that says when something was mounted or unmounted."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from threading import Thread
from typing import Self

from fusefs.linux.fd import Fd

_MOUNTINFO = "/proc/self/mountinfo"


class MountWatch:
    """Readable when the mounts of our namespace have changed since the last `seen`.

    A thread waits for the kernel's word, which the first poll takes away: an event loop asks once when it begins
    to wait and again when it wakes, and an epoll in between does the same, so that changes were lost.
    Source  proc_pid_mounts(5): poll(2) tells a change by POLLPRI
    """

    def __init__(self) -> None:
        self._file = Fd(os.open(_MOUNTINFO, os.O_RDONLY | os.O_CLOEXEC))
        self._changed = Fd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._end = Fd(os.eventfd(0, os.EFD_CLOEXEC))
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLPRI)
        self._poll.register(self._end, select.POLLIN)
        self._poll.poll(0)  # what was mounted until now
        self._thread = Thread(target=self._watch, name="mountwatch", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """What to wait for."""
        return int(self._changed)

    def seen(self) -> None:
        """Wait for the next change from now on."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._changed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for fd in (self._file, self._changed, self._end):
            fd.close()

    def _watch(self) -> None:
        while all(fd != self._end for fd, _event in self._poll.poll()):
            os.eventfd_write(self._changed, 1)
