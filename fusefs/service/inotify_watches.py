"""A single inotify instance for the service, with a callback for each watched directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import trio

from fusefs.linux.fd import Fd
from fusefs.linux.inotify import InotifyEvent, InotifyMask, add_watch, open_inotify, read_events, remove_watch

_BREATH_S, _LONGEST_BREATH_S = 0.02, 0.5
"""Pause between two reads, so that a user who creates and removes files all day does not keep the service busy."""
_N_RESTS = 4
"""The pause is this many times the CPU time that the thread has used since the last pause. However fast the user and
however slow the machine, the load stays below a fifth of a core."""

Notice = Callable[[InotifyEvent], None]


class InotifyWatches:
    """The watched directories and their callbacks."""

    def __init__(self) -> None:
        self._inotify: Fd = open_inotify()
        self._notices: dict[int, Notice] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._inotify.close()

    def add(self, dir_fd: int, mask: InotifyMask, notice: Notice) -> int:
        """Watch a directory, and return the number of the watch.

        notice  called for each event in the directory; OVERFLOW: events were lost, IGNORED: the watch is gone
        Raises  OSError: ENOSPC when the kernel's limit is reached
        """
        number = add_watch(self._inotify, dir_fd, mask)
        self._notices[number] = notice
        return number

    def remove(self, number: int) -> None:
        if self._notices.pop(number, None) is not None:
            with suppress(OSError):
                remove_watch(self._inotify, number)

    async def dispatch_events(self) -> None:
        """Read events, and call the callbacks, until cancelled. Checkpoint"""
        before_s = time.thread_time()
        while True:
            await trio.lowlevel.wait_readable(self._inotify)
            for event in read_events(self._inotify):
                self._dispatch(event)
            now_s = time.thread_time()
            rest_s, before_s = _N_RESTS * (now_s - before_s), now_s
            await trio.sleep(min(max(_BREATH_S, rest_s), _LONGEST_BREATH_S))

    def _dispatch(self, event: InotifyEvent) -> None:
        if event.kinds & InotifyMask.OVERFLOW:
            for notice in list(self._notices.values()):
                notice(event)
            return
        callback = self._notices.get(event.watch)
        if event.kinds & InotifyMask.IGNORED:
            self._notices.pop(event.watch, None)
        if callback is not None:
            callback(event)
