"""Spare space that can be given back at once, where even a rename needs some.

btrfs reserves metadata for every rename, exchange and write, also into preallocated blocks, and refuses them all at
a subvolume's limit; only unlink always works. So the reserve's ready container is out of reach just when it is
needed. What helps there is to unlink something: one file for swap and restore, one for the reaper, which must be
able to claim an orphan after a swap has used up the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from fusefs.core.names import Name
from fusefs.linux.kernel import BTRFS_MAGIC
from fusefs.store.backing_and_mount import FULL
from fusefs.store.layout import RESERVE, UserFolder

T = TypeVar("T")

FOR_USER = Name(b"ballast-user")
FOR_REAPER = Name(b"ballast-reaper")
_ALL = (FOR_USER, FOR_REAPER)
_SIZE_BYTES = 2 << 20
"""Twice what was measured to be enough for a swap (Linux 6.18, 16 KiB nodes)."""


def ensure_spare_space(folder: UserFolder) -> None:
    """Make the spare files that are missing, on filesystems that need any.

    Raises  OSError; FULL errors among them: it comes back when there is room
    """
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        if kernel.filesystem(reserve) != BTRFS_MAGIC:
            return
        for name in set(_ALL) - set(kernel.list(reserve)):
            with suppress(FileExistsError), kernel.create(reserve, name) as fd:
                try:
                    kernel.reserve_blocks(fd, _SIZE_BYTES)
                except OSError:
                    kernel.unlink(reserve, name)
                    raise


def has_spare_space(folder: UserFolder) -> bool:
    """Whether all of it is there, or none is needed."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        return kernel.filesystem(reserve) != BTRFS_MAGIC or set(kernel.list(reserve)).issuperset(_ALL)


def discard_spare_space(folder: UserFolder) -> None:
    """Remove what there is of it."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        for name in _ALL:
            with suppress(FileNotFoundError):
                kernel.unlink(reserve, name)


def with_room(folder: UserFolder, spare: Name, act: Callable[[], T]) -> T:
    """The result of `act`, tried once more without that spare file if there is no room for it."""
    try:
        return act()
    except OSError as error:
        if error.errno not in FULL or not _release(folder, spare):
            raise
    return act()


def _release(folder: UserFolder, name: Name) -> bool:
    """Give a spare file's space back; whether there was any. It counts as free after a commit, hence the syncfs."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        try:
            kernel.unlink(reserve, name)
        except FileNotFoundError:
            return False
        kernel.syncfs(reserve)
    return True
