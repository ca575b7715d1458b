"""File descriptors that are closed by their owner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Self, TypeVar

T = TypeVar("T", bound=AbstractContextManager[object])


class Fd(int):
    """An open fd that a `with` block closes at its end; usable as an int."""

    _is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def path(self) -> bytes:
        """Return a path to the open file, whatever its name is now, for calls that don't accept fds or O_PATH fds."""
        return b"/proc/self/fd/%d" % self

    def close(self) -> None:
        """Close the fd, unless it is closed already: its number may have been reused for another file.

        Linux frees the number even if close(2) fails.
        """
        if not self._is_closed:
            self._is_closed = True
            os.close(self)


class CountedFd(Fd):
    """An fd that several operations may share: it is closed when the last of them has closed its instance."""

    _use: object

    def __new__(cls, number: int, use: object) -> Self:
        """use: an object that closes the fd when nothing refers to the object any more"""
        self = super().__new__(cls, number)
        self._use = use
        return self

    def close(self) -> None:
        """Stop using the fd."""
        self._is_closed = True
        self._use = None


@contextmanager
def close_on_error(opened: T) -> Iterator[T]:
    """Close an object if the block raises; otherwise it stays open and belongs to the caller."""
    try:
        yield opened
    except BaseException as error:
        opened.__exit__(type(error), error, error.__traceback__)
        raise


def read_fdinfo(fd: int) -> dict[str, str]:
    """Read the kernel's data about an open fd, without access to its filesystem.

    Source  proc_pid_fdinfo(5): pos, flags and mnt_id; ino since Linux 5.14
    """
    with open(f"/proc/self/fdinfo/{int(fd)}") as lines:
        pairs = (line.split() for line in lines)
        return {pair[0].rstrip(":"): pair[1] for pair in pairs if len(pair) == 2}
