"""The reserve: a ready container for each user, so that a swap needs neither a block nor an inode on a full volume.

There are also spare files, which are deleted if even a rename needs space. btrfs reserves metadata for every rename,
exchange and write, even into preallocated blocks, and refuses all of these at a subvolume's limit; only unlink always
works. XFS with parent pointers reserves blocks for every rename. So the ready container is of no use there when it is
needed, but deleting a file helps. One spare file is for swap and restore, the other for the reaper, which must be able
to claim an orphan after a swap has used the first.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TypeVar

from fusefs.core.container_states import State
from fusefs.core.names import ContainerId, Name
from fusefs.core.record import RECORD_MAX_BYTES
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, XFS_MAGIC, Kernel
from fusefs.store.backing_and_mount import FILE_TO_LOCK, NO_SPACE_ERRNOS, suppress_errno
from fusefs.store.layout import RECORD, REPLACEMENT, RESERVE, TREE, UserFolder

READY = Name(b"ready")
SPARE = Name(b"spare")
_MAKING = Name(b"making")
_BLOCK = 512
"""The unit of st_blocks, in bytes."""


def ensure_reserve(folder: UserFolder) -> None:
    """Make the reserve if it is missing or incomplete. On a full volume, do nothing: a later call makes it."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        if _is_complete(kernel, reserve):
            return
        with suppress_errno(*NO_SPACE_ERRNOS, errno.EEXIST, errno.ENOENT):  # full, or another command is making it
            if all(_discard(kernel, reserve, name) for name in (READY, _MAKING)):
                try:
                    _make(kernel, reserve)
                except OSError as error:
                    if error.errno in NO_SPACE_ERRNOS:  # an incomplete reserve is useless and takes space
                        _discard(kernel, reserve, _MAKING)
                    raise


def _make(kernel: Kernel, reserve: Fd) -> None:
    kernel.mkdir(reserve, _MAKING)
    with kernel.open_dir(reserve, _MAKING) as fd:
        kernel.mkdir(fd, TREE)
        with kernel.create(fd, SPARE) as spare:
            try:
                kernel.reserve_blocks(spare, RECORD_MAX_BYTES)
            except OSError as error:
                if error.errno in NO_SPACE_ERRNOS:
                    raise
                # If blocks can't be reserved (some network filesystems), the inodes are still useful.
    kernel.rename(reserve, _MAKING, reserve, READY)


def is_used(folder: UserFolder) -> bool:
    """Return whether a folder has a container or a reserve; an unused folder needs no reserve."""
    kernel = folder.store.kernel
    for part in (RESERVE, *(state.value.encode() for state in State)):
        with suppress(FileNotFoundError), kernel.open_dir(folder.fd, part) as fd:
            if not kernel.is_empty(fd):
                return True
    return False


def is_stocked(folder: UserFolder) -> bool:
    """Return whether the reserve exists and is complete."""
    with folder.open(RESERVE) as reserve:
        return _is_complete(folder.store.kernel, reserve)


def _is_complete(kernel: Kernel, reserve: Fd) -> bool:
    """Return whether the reserve is unchanged since it was made. A killed swap, for example, may have written to it.

    A spare file with a second link must not be written to. On btrfs, the file may have lost its blocks in a power
    failure if a process flushed only the directory. Some other filesystems can't reserve blocks at all.
    """
    try:
        with kernel.open_dir(reserve, READY) as fd:
            if sorted(kernel.list(fd)) != [SPARE, TREE]:
                return False
            spare = kernel.stat(fd, SPARE)
            has_blocks = spare.st_blocks * _BLOCK >= RECORD_MAX_BYTES or kernel.filesystem(fd) != BTRFS_MAGIC
            return spare.st_size == 0 and spare.st_nlink == 1 and has_blocks
    except FileNotFoundError:
        return False


def _discard(kernel: Kernel, reserve: Fd, name: Name) -> bool:
    """Remove the remains of a reserve: only empty directories and our own files. Return False if this is in use."""
    try:
        fd = kernel.open_dir(reserve, name)
    except FileNotFoundError:
        return True
    with fd, ExitStack() as locks:
        for file in (SPARE, RECORD):
            with suppress(FileNotFoundError):
                if not kernel.lock(locks.enter_context(kernel.open_beneath(fd, file, FILE_TO_LOCK))):
                    return False
        for directory in (TREE, REPLACEMENT):
            with suppress(FileNotFoundError):
                kernel.rmdir(fd, directory)
        for file in (SPARE, RECORD):
            with suppress(FileNotFoundError):
                kernel.unlink(fd, file)
    kernel.rmdir(reserve, name)
    return True


def discard_reserve(folder: UserFolder) -> None:
    """Remove the reserve, unless it is in use, and the spare files."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        for name in (READY, _MAKING):
            _discard(kernel, reserve, name)
        for name in _SPARE_FILES:
            with suppress(FileNotFoundError):
                kernel.unlink(reserve, name)


def lock_reserve(folder: UserFolder, owned: ExitStack) -> tuple[Fd, Fd] | None:
    """Lock the ready container and its spare file, which `owned` closes; return None if that is impossible.

    The holder of the lock owns the reserve; the spare file becomes the container's record.
    """
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        try:
            fd = owned.enter_context(kernel.open_dir(reserve, READY))
            spare = owned.enter_context(kernel.open_beneath(fd, SPARE, FILE_TO_LOCK))
        except FileNotFoundError:
            return None
    # Another command may already have used the spare file as a record, and may even have finished. A file with a second
    # link must not be written in place, because a backup that consists of hard links would get the same record.
    is_ours = kernel.lock(spare) and kernel.is_named(spare, fd, SPARE) and kernel.fstat(spare).st_nlink == 1
    return (fd, spare) if is_ours else None


def move_to_stage(folder: UserFolder, container: ContainerId) -> None:
    """Move the ready container, with its record, to stage/ with one rename."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve, folder.open(State.STAGE) as stage:
        kernel.rename(reserve, READY, stage, container.encode())


T = TypeVar("T")

SPARE_FOR_USER = Name(b"ballast-user")
SPARE_FOR_REAPER = Name(b"ballast-reaper")
_SPARE_FILES = (SPARE_FOR_USER, SPARE_FOR_REAPER)
_SIZE_BYTES = 2 << 20
"""Twice what was measured to be enough for a swap on btrfs (Linux 6.18, 16 KiB nodes)."""


def ensure_spare_space(folder: UserFolder) -> None:
    """Make missing spare files, on filesystems that need them.

    Raises  OSError; after one of NO_SPACE_ERRNOS, a later call can make them when there is space
    """
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        if not _needs_spare_space(kernel, reserve):
            return
        for name in set(_SPARE_FILES) - set(kernel.list(reserve)):
            with suppress(FileExistsError), kernel.create(reserve, name) as fd:
                try:
                    kernel.reserve_blocks(fd, _SIZE_BYTES)
                except OSError:
                    kernel.unlink(reserve, name)
                    raise


def has_spare_space(folder: UserFolder) -> bool:
    """Return whether all spare files exist, or none are needed."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        return not _needs_spare_space(kernel, reserve) or set(kernel.list(reserve)).issuperset(_SPARE_FILES)


def _needs_spare_space(kernel: Kernel, fd: Fd) -> bool:
    """Return whether even a rename needs free space on this filesystem. fd: opened for reading

    Source  xfs_rename in Linux 6.18
    """
    kind = kernel.filesystem(fd)
    if kind != XFS_MAGIC:
        return kind == BTRFS_MAGIC
    from fusefs.linux.filesystem_probes import has_parent_pointers  # late: only XFS

    return has_parent_pointers(kernel, fd)


def call_with_room(folder: UserFolder, spare: Name, call: Callable[[], T]) -> T:
    """Run `call`; if there is no space, delete the spare file and run `call` once more."""
    try:
        return call()
    except OSError as error:
        if error.errno not in NO_SPACE_ERRNOS or not release_spare(folder, spare):
            raise
    return call()


def release_spare(folder: UserFolder, name: Name) -> bool:
    """Delete a spare file; return whether it existed. Calls syncfs: its space counts as free only after a commit."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        try:
            kernel.unlink(reserve, name)
        except FileNotFoundError:
            return False
        kernel.syncfs(reserve)
    return True
