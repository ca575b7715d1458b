"""Claiming a container that is there: its record opened with distrust, locked, and looked at again."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from enum import Enum

from fusefs.core.errors import BadRecord
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, is_of
from fusefs.core.record import RECORD_MAX_BYTES, Record, TreeSize
from fusefs.core.record_decoding import decode
from fusefs.linux.boot_id import boot_id
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.store.container import HeldContainer, move, rewrite, touch
from fusefs.store.layout import BEGUN, RECORD, UserFolder

_NOTING, _NOTING_S = 20, 0.025
"""How often, and how far apart, what is locked is tried: a record that is rewritten is flushed twice."""


class ClaimLost(Enum):
    """Why a container could not be had: a race lost is a value, not an error."""

    GONE = "gone"
    BUSY = "busy"
    CHANGED = "changed"


def open_record(kernel: Kernel, container_fd: Fd, uid: int) -> Fd:
    """The record's fd, not locked yet; to be read only where the volume is read-only.

    It may have another name, as a backup by hard links gives it: in a folder that only its owner can enter only
    that user and root can have put it there; and a changed record is a new file.
    Raises  FileNotFoundError if there is none; BadRecord unless it is a regular file of that user that no other
            can write to by such a name: the user may have put a FIFO, a link to another's file, or a gigabyte there
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            fd = kernel.open_beneath(container_fd, RECORD, flags | os.O_RDWR)
        except OSError:
            if not kernel.is_read_only(container_fd):
                raise
            fd = kernel.open_beneath(container_fd, RECORD, flags | os.O_RDONLY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EXDEV, errno.ENXIO, errno.EISDIR, errno.ENOTDIR, errno.EACCES):
            raise BadRecord(f"not an ordinary file ({error.strerror})") from error
        raise
    with closed_on_error(fd):
        st = kernel.fstat(fd)
        # No name at all is no attack: it was replaced or removed meanwhile, which is seen when it is locked.
        is_others_too = st.st_nlink > 1 and st.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(st.st_mode) or is_others_too or st.st_uid != uid or st.st_size > RECORD_MAX_BYTES:
            raise BadRecord(f"not an ordinary small file of uid {uid}")
    return fd


def read_record(kernel: Kernel, record_fd: Fd, folder: UserFolder, container: ContainerId) -> Record:
    """The record behind an fd, whose id and volume must be the container's.

    Raises  BadRecord
    """
    record = decode(kernel.read(record_fd, RECORD_MAX_BYTES + 1))
    if not is_of(container, record.id):
        raise BadRecord(f"it is the record of {record.id}")
    if record.volume != folder.store.volume.id:
        raise BadRecord("it was made in another volume's store")
    return record


def look_at_record(folder: UserFolder, state: State, container: ContainerId) -> Record:
    """What the record of a container says at the moment, whichever process has its lock.

    Raises  FileNotFoundError if it is not there, or not any more; BadRecord, OSError
    """
    kernel = folder.store.kernel
    with (
        folder.open(state) as state_fd,
        kernel.open_dir(state_fd, container.encode()) as fd,
        open_record(kernel, fd, folder.uid) as record_fd,
    ):
        return read_record(kernel, record_fd, folder, container)


def hold(
    folder: UserFolder, state: State, container: ContainerId, ended: Collection[str] = ()
) -> HeldContainer | ClaimLost:
    """The container, locked; or why not.

    ended   other boots that are over, as somebody says. Off local filesystems their locks don't count: a server may
            keep a dead client's for a day (MooseFS). What is done then may be done by several at once: a takeover
    Raises  BadRecord; FileNotFoundError if the container is there and has no record
    """
    kernel = folder.store.kernel
    name = container.encode()
    with folder.open(state) as state_fd, ExitStack() as owned:
        try:
            fd = owned.enter_context(kernel.open_dir(state_fd, name))
        except (FileNotFoundError, NotADirectoryError):
            return ClaimLost.GONE
        try:
            record_fd = owned.enter_context(open_record(kernel, fd, folder.uid))
        except OSError as error:
            if error.errno == errno.ESTALE:
                return ClaimLost.GONE  # as below, on another node
            if not isinstance(error, FileNotFoundError) or _is_there(folder, fd, state_fd, name):
                raise
            return ClaimLost.GONE  # another process took it, and has ended it
        if not kernel.lock(record_fd) and not _is_of_ended(folder, record_fd, container, ended):
            return ClaimLost.BUSY
        # The process that held the lock before us may have moved the container, or replaced its record.
        if not (kernel.is_named(fd, state_fd, name) and kernel.is_named(record_fd, fd, RECORD)):
            return ClaimLost.GONE
        record = read_record(kernel, record_fd, folder, container)
        called = None if container == record.id else container
        return HeldContainer(folder, record.id, state, fd, record, owned.pop_all(), called)


def hold_soon(folder: UserFolder, state: State, container: ContainerId) -> HeldContainer | ClaimLost:
    """As `hold`; where an orphan is locked it waits a moment: somebody may just be noting its size (`keep_size`)."""
    for _ in range(_NOTING if state is State.ORPHANS else 0):
        held = hold(folder, state, container)
        if held is not ClaimLost.BUSY:
            return held
        time.sleep(_NOTING_S)
    return hold(folder, state, container)


def _is_of_ended(folder: UserFolder, record_fd: Fd, container: ContainerId, ended: Collection[str]) -> bool:
    if not ended or not folder.store.is_shared():
        return False
    boot = read_record(folder.store.kernel, record_fd, folder, container).boot
    return boot in ended and boot != boot_id()


def _is_there(folder: UserFolder, fd: Fd, state_fd: Fd, name: bytes) -> bool:
    """Whether a container without a record has its name still: what was moved on another node caches may tell of."""
    kernel = folder.store.kernel
    return kernel.is_named(fd, state_fd, name) and (not folder.store.is_shared() or name in kernel.list_anew(state_fd))


def _always(_record: Record) -> bool:
    return True


def _begun(held: HeldContainer, is_meant: Callable[[Record], bool]) -> HeldContainer | ClaimLost:
    """What was moved to reaping/, marked as begun off local filesystems; or an orphan again.

    There a lock may be lost, and a claim come late, whose caller is gone: who keeps an orphan may have been faster.
    """
    kernel = held.folder.store.kernel
    if held.folder.store.is_shared() and BEGUN not in kernel.list_anew(held.fd):
        with open_record(kernel, held.fd, held.folder.uid) as fd:
            record = read_record(kernel, fd, held.folder, held.id)
        if not is_meant(record):
            move(held, State.ORPHANS)
            held.owned.close()
            return ClaimLost.CHANGED
        kernel.create(held.fd, BEGUN).close()
    return held


def claim(
    folder: UserFolder,
    source: State,
    container: ContainerId,
    is_meant: Callable[[Record], bool] = _always,
) -> HeldContainer | ClaimLost:
    """The container, locked and moved to reaping/ by one rename; one claim wins (I5).

    is_meant  asked about the record, when no other process can change it any more; if not the container stays. Off
              local filesystems a lock may be lost: it is asked again when the container was moved
    """
    held = hold(folder, source, container)
    if isinstance(held, ClaimLost):
        return held
    try:
        if not is_meant(held.record):
            held.owned.close()
            return ClaimLost.CHANGED
        moved = move(held, State.REAPING)
        return _begun(moved, is_meant if source is State.ORPHANS else _always)
    except BaseException as error:
        held.owned.close()
        if isinstance(error, FileNotFoundError):
            return ClaimLost.GONE
        raise


def resume(folder: UserFolder, container: ContainerId, is_meant: Callable[[Record], bool]) -> HeldContainer | ClaimLost:
    """What a reaper left in reaping/, locked; is_meant: asked where it was claimed and, for all that is known, no more.

    Raises  as `hold`
    """
    held = hold(folder, State.REAPING, container)
    if isinstance(held, ClaimLost):
        return held
    with closed_on_error(held):
        return _begun(held, is_meant)


def keep_size(folder: UserFolder, container: ContainerId, size: TreeSize) -> None:
    """Note in an orphan's record what it takes; to be run as the folder's owner.

    Where that can't be (somebody has it, it is gone, the volume is full or read-only) nothing is noted.
    """
    with suppress(OSError, BadRecord):
        held = hold(folder, State.ORPHANS, container)
        if isinstance(held, HeldContainer):
            with held:
                held = rewrite(held, held.record._replace(size=size))
                touch(folder.store.kernel, held.fd)  # the service's watch of orphans/ tells it


def forget_size(held: HeldContainer) -> HeldContainer:
    """The container before something is taken out of its tree. On a full volume what it took stays noted."""
    with suppress(OSError):
        if held.record.size is not None:
            held = rewrite(held, held.record._replace(size=None))
    return held
