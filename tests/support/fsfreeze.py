"""A filesystem that takes no changes for a time: a process that makes one waits, in the kernel, until it does."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878


@contextmanager
def frozen(path: Path) -> Iterator[Callable[[], None]]:
    """The filesystem of a directory, until the end of the block or until what it yields is called."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    is_frozen = True

    def thaw() -> None:
        nonlocal is_frozen
        if is_frozen:
            is_frozen = False
            fcntl.ioctl(fd, _FITHAW, 0)

    try:
        fcntl.ioctl(fd, _FIFREEZE, 0)
        try:
            yield thaw
        finally:
            thaw()
    finally:
        os.close(fd)
