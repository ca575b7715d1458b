"""What a sweep gathered: the tree in its container, as whoever holds that finds it, fills it or puts it back."""

from __future__ import annotations

import errno
import os

from fusefs.store.container import Held
from fusefs.store.layout import FRESH, TREE

MAKING = FRESH + b"."
"""How the name of a directory begins that is being made for the tree, or for its origin, beside the tree."""


def making() -> bytes:
    """A new one of these names."""
    return MAKING + os.urandom(6).hex().encode()


def drop_prepared(held: Held) -> None:
    """Remove the directories that a killed sweep, or a restore, was still making."""
    kernel = held.folder.store.kernel
    for name in kernel.list(held.fd):
        if name.startswith(MAKING):
            kernel.rmdir(held.fd, name)


def drop_empty_tree(held: Held) -> bool:
    """Remove the tree if it is empty; whether it is gone."""
    try:
        held.folder.store.kernel.rmdir(held.fd, TREE)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def flush(held: Held) -> None:
    """Make the renames into or out of the tree durable, once the container was moved, or the tree removed, after them.

    That change is the last of all in the journals of ext4 and xfs, so that a flush of the container carries them;
    btrfs writes everything when a directory that was itself moved, or lost one, is flushed (docs/crash.md).
    """
    held.folder.store.kernel.fsync(held.fd)
