"""File descriptors with an owner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Self, TypeVar

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


@contextmanager
def closed_on_error(opened: T) -> Iterator[T]:
    """Own something for the block if that raises; otherwise it stays open, and its caller's."""
    try:
        yield opened
    except BaseException as error:
        opened.__exit__(type(error), error, error.__traceback__)
        raise


def told_of(fd: int) -> dict[str, str]:
    """What the kernel knows of an open fd without asking its filesystem.

    Source  proc_pid_fdinfo(5): pos, flags and mnt_id; ino since Linux 5.14
    """
    with open(f"/proc/self/fdinfo/{int(fd)}") as lines:
        pairs = (line.split() for line in lines)
        return {pair[0].rstrip(":"): pair[1] for pair in pairs if len(pair) == 2}
