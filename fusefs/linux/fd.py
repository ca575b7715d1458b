"""File descriptors with an owner."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T", bound=AbstractContextManager[object])


class Fd(int):
    """An open fd that closes itself at the end of a `with`; usable wherever an int is."""

    _is_closed = False

    def __enter__(self) -> Self:
        """Own it for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        self.close()

    def path(self) -> bytes:
        """What it holds, whatever it is called: for calls that take no fd, or not one that is O_PATH."""
        return b"/proc/self/fd/%d" % self

    def close(self) -> None:
        """Close it, unless that was done before: by then the number may be another file's.

        Linux frees the number even where close(2) fails.
        """
        if not self._is_closed:
            self._is_closed = True
            os.close(self)


class CountedFd(Fd):
    """An fd that several operations may use: it is closed after the last of them has ended, or closed it."""

    _use: object

    def __new__(cls, number: int, use: object) -> Self:
        """use: an object with whose end it ends"""
        self = super().__new__(cls, number)
        self._use = use
        return self

    def close(self) -> None:
        """Use it no more."""
        self._is_closed = True
        self._use = None


class closed_on_error(Generic[T]):  # noqa: N801 - it is read as a function that gives a block
    """Own something for the block if that raises; otherwise it stays open, and its caller's."""

    def __init__(self, opened: T) -> None:
        self._opened = opened

    def __enter__(self) -> T:
        self._opened.__enter__()
        return self._opened

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._opened.__exit__(kind, error, trace)


def told_of(fd: int) -> dict[str, str]:
    """What the kernel knows of an open fd without asking its filesystem.

    Source  proc_pid_fdinfo(5): pos, flags and mnt_id; ino since Linux 5.14
    """
    with open(f"/proc/self/fdinfo/{int(fd)}") as lines:
        pairs = (line.split() for line in lines)
        return {pair[0].rstrip(":"): pair[1] for pair in pairs if len(pair) == 2}
