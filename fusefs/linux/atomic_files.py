"""Small files that others read while we write them: the old text or the new one, never a part."""

from __future__ import annotations

import os

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
) -> None:
    """Put a text into a file of that name, at once or not at all.

    whatever_umask  others are to read it though our umask is strict
    is_durable      before it has the name, so that a power failure leaves no empty file
    owner           uid of whom it is to be, by root
    Raises          OSError; an unfinished file beside it is overwritten by the next one
    """
    fd = os.open(path + NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        if owner is not None:
            os.fchown(fd, owner, -1)
        if whatever_umask:
            os.fchmod(fd, mode)
        file.write(text)
        if is_durable:
            file.flush()
            os.fsync(fd)
    os.rename(path + NEW, path)
