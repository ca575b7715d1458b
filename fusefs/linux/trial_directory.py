"""A directory in which something is tried, and its end: whatever a killed trial left in it has one beginning of a name.

Who may write above it could give its name to any directory of ours: nothing else in it is removed, and it stays then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

TRIAL = b"trial-"
_MAX_DEPTH = 4


def trial(name: str) -> Name:
    """A name for something that is tried."""
    return Name(TRIAL + name.encode())


@contextmanager
def trial_directory(kernel: Kernel, dir_fd: int, name: Name) -> Iterator[Fd]:
    """A new directory of ours alone, gone again at the end. What a killed one left there is removed first.

    Raises  OSError
    """
    discard_trial_directory(kernel, dir_fd, name)
    kernel.mkdir(dir_fd, name)
    try:
        with kernel.open_dir(dir_fd, name) as fd:
            yield fd
    finally:
        discard_trial_directory(kernel, dir_fd, name)


def discard_trial_directory(kernel: Kernel, dir_fd: int, name: Name) -> None:
    """Remove one, if it is there. Raises  OSError; ENOTEMPTY if there is something else in it"""
    with suppress(FileNotFoundError):
        _discard(kernel, dir_fd, name, _MAX_DEPTH)


def _discard(kernel: Kernel, dir_fd: int, name: bytes, depth: int) -> None:
    try:
        kernel.unlink(dir_fd, name)
    except (IsADirectoryError, PermissionError):  # POSIX allows either for a directory
        if depth:
            with kernel.open_dir(dir_fd, name) as fd:
                for inner in kernel.list(fd):
                    if inner.startswith(TRIAL):
                        with suppress(FileNotFoundError):
                            _discard(kernel, fd, inner, depth - 1)
        kernel.rmdir(dir_fd, name)
