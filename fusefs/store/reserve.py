"""The reserve: a ready container per user, so that a swap needs neither a block nor an inode of a full volume."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, Name
from fusefs.core.record import RECORD_MAX_BYTES
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.container import RECORD_NEW
from fusefs.store.layout import FRESH, RECORD, RESERVE, TREE, UserFolder

READY = Name(b"ready")
SPARE = Name(b"spare")
_MAKING = Name(b"making")
FULL = (errno.ENOSPC, errno.EDQUOT)


def ensure_reserve(folder: UserFolder) -> bool:
    """Make the reserve if it is not there; whether it is there now. Full volumes are no error: it comes later."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        if _is_complete(kernel, reserve):
            return True
        try:
            _discard(kernel, reserve, READY)
            _discard(kernel, reserve, _MAKING)
            _make(kernel, reserve)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
    return True


def _make(kernel: Kernel, reserve: Fd) -> None:
    kernel.mkdir(reserve, _MAKING)
    with kernel.open_dir(reserve, _MAKING) as fd:
        kernel.mkdir(fd, TREE)
        with kernel.create(fd, SPARE) as spare:
            with suppress(OSError):
                # Where blocks can't be reserved (some network filesystems) the inodes are still worth having.
                kernel.reserve_blocks(spare, RECORD_MAX_BYTES)
            kernel.fsync(spare)
    kernel.rename(reserve, _MAKING, reserve, READY)


def is_stocked(folder: UserFolder) -> bool:
    """Whether the reserve is there."""
    with folder.open(RESERVE) as reserve:
        return _is_complete(folder.store.kernel, reserve)


def _is_complete(kernel: Kernel, reserve: Fd) -> bool:
    try:
        with kernel.open_dir(reserve, READY) as fd:
            return sorted(kernel.list(fd)) == [SPARE, TREE]
    except FileNotFoundError:
        return False


def _discard(kernel: Kernel, reserve: Fd, name: Name) -> None:
    """Remove what is left of a reserve: only ever empty directories and our own files."""
    try:
        fd = kernel.open_dir(reserve, name)
    except FileNotFoundError:
        return
    with fd:
        for directory in (TREE, FRESH):
            with suppress(FileNotFoundError):
                kernel.rmdir(fd, directory)
        for file in (SPARE, RECORD, RECORD_NEW):
            with suppress(FileNotFoundError):
                kernel.unlink(fd, file)
    kernel.rmdir(reserve, name)


def open_reserve(folder: UserFolder) -> Fd | None:
    """The ready container, or None if there is none. It becomes ours when its spare file is locked as the record."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve:
        try:
            return kernel.open_dir(reserve, READY)
        except FileNotFoundError:
            return None


def move_to_stage(folder: UserFolder, container: ContainerId) -> None:
    """The ready container, with its record, becomes a staged one by one rename."""
    kernel = folder.store.kernel
    with folder.open(RESERVE) as reserve, folder.open(State.STAGE) as stage:
        kernel.rename(reserve, READY, stage, os.fsencode(container))
