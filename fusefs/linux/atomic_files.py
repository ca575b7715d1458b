"""Small files that others read while we write them: the old text or the new one, never a part."""

from __future__ import annotations

import os
from contextlib import suppress

NEW = b".new"
"""What the name of an unfinished one ends with."""


def replace_file(
    path: bytes,
    text: bytes,
    mode: int,
    *,
    whatever_umask: bool = False,
    is_durable: bool = False,
    owner: int | None = None,
    dir_fd: int | None = None,
) -> None:
    """Put a text into a file of that name, at once or not at all.

    whatever_umask  others are to read it though our umask is strict
    is_durable      before it has the name, so that a power failure leaves no empty file
    owner           uid of whom it is to be, by root
    dir_fd          the directory that the path is relative to
    Raises          OSError; an unfinished file beside it is replaced by the next one
    """
    with suppress(FileNotFoundError):
        os.unlink(path + NEW, dir_fd=dir_fd)
    # Only a new file: what another put there meanwhile may be a pipe, which nobody ever opens for reading.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path + NEW, flags, mode, dir_fd=dir_fd)
    with open(fd, "wb") as file:
        if owner is not None:
            os.fchown(fd, owner, -1)
        if whatever_umask:
            os.fchmod(fd, mode)
        file.write(text)
        if is_durable:
            file.flush()
            os.fsync(fd)
    os.rename(path + NEW, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
