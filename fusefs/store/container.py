"""Containers: how one is made in stage/, whose record appears complete, durable and locked in one step; how it moves
on, and goes.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple, Self

from fusefs.core.lifecycle import LEGAL_MOVES, State
from fusefs.core.names import ContainerId, Name, RelPath, join, make_id
from fusefs.core.record import Record, TreeSize, encode
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import NO_TMPFILE
from fusefs.store.backing_and_mount import DIRECTORY, BackingAndMount, both_sides, suppress_errno
from fusefs.store.layout import (
    FRESH,
    HIDDEN_PREFIXES,
    RECORD,
    RECORD_NEW,
    TREE,
    Store,
    UserFolder,
    is_own_file,
    make_unique,
)

UNFINISHED_PREFIX = FRESH + b"."
"""How the name of a directory begins that is being made for a sweep's tree, or for its origin, beside the tree."""
GONE = (errno.ENOENT, errno.ESTALE)
"""What a server says of what another node removed."""
_PATIENCE, _PAUSE_S = 100, 0.01
_TICK_S = 0.001


class HeldContainer(NamedTuple):
    """A container whose record we have locked: no other process moves or changes it until the last fd closes.

    fd      its directory, readable
    record  as it is on disk
    owned   closes what keeps the lock; once, however many values of this hold share it
    called  its name in the directory of its state, if it took another container's place; the id's otherwise
    """

    folder: UserFolder
    id: ContainerId
    state: State
    fd: Fd
    record: Record
    owned: ExitStack
    called: ContainerId | None = None

    def __enter__(self) -> Self:
        """Hold it for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of the lock."""
        self.owned.close()

    def name(self) -> bytes:
        """Its name in the directory of its state."""
        return (self.called or self.id).encode()

    def way(self) -> RelPath:
        """Its path relative to the directory that holds the store."""
        return self.folder.way_to(self.state, self.name())


def open_inside(held: HeldContainer, name: Name) -> BackingAndMount:
    """A directory in a container, on both sides if a mount of ours shows it. Raises  OSError"""
    store = held.folder.store
    fd = store.kernel.open_beneath(held.fd, name, DIRECTORY)
    return both_sides(store.kernel, fd, store.base.mounted, join(held.way(), name))


def new_id(kernel: Kernel, victim: bytes) -> ContainerId:
    """An id of now."""
    now_ns = kernel.now_ns()
    utc = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ns // 1_000_000_000))
    return make_id(utc, now_ns // 1_000_000 % 1000, victim, os.urandom(6))


def make_directory(folder: UserFolder, state: State, container: ContainerId) -> Fd:
    """The new, still empty container, readable."""
    kernel, name = folder.store.kernel, container.encode()
    with folder.open(state) as parent:
        make_unique(kernel, parent, name)
        return kernel.open_dir(parent, name)


def superblock_in(st: os.stat_result) -> str:
    """The filesystem that something is on as this kernel has it mounted: processes that see the same one share its
    locks.

    Its number is another's only when it is gone, and with it all locks on it.
    """
    return f"{os.major(st.st_dev)}:{os.minor(st.st_dev)}"


def is_taken_over(held: HeldContainer) -> bool:
    """Whether another node took it for dead, and has moved what it had into a container of its own."""
    return held.folder.store.is_shared() and has_lost_record(held.folder.store.kernel, held.fd)


def has_lost_record(kernel: Kernel, container: Fd) -> bool:
    """Whether a container that had a record has none any more, or is itself gone, as far as the server says."""
    try:
        kernel.stat(container, RECORD)
    except OSError as error:
        return error.errno in GONE
    return False


def touch(kernel: Kernel, fd: Fd) -> int:
    """The filesystem's own clock, ns: by a change of a container that changes nothing else."""
    kernel.chmod(fd, 0o700)
    return max(0, kernel.fstat(fd).st_ctime_ns)


def create_record(store: Store, container_fd: Fd, record: Record) -> Fd:
    """The locked fd of a first record, which appears complete and durable.

    store   the store of the container
    Raises  FileNotFoundError if recovery took the container away before it had a record: start again
    """
    kernel = store.kernel
    if not store.keeps_unnamed():
        return replace_record(kernel, container_fd, record)
    try:
        fd = kernel.create_unnamed(container_fd)
    except OSError as error:
        if error.errno not in NO_TMPFILE:
            raise
        return replace_record(kernel, container_fd, record)
    return _publish(kernel, fd, record, partial(kernel.link_unnamed, fd, container_fd, RECORD))


def replace_record(kernel: Kernel, container_fd: Fd, record: Record) -> Fd:
    """The locked fd of a record that takes the place of the old one, if any; errors as for `create_record`."""
    _drop_new(kernel, container_fd)
    fd = kernel.create(container_fd, RECORD_NEW)
    try:
        return _publish(kernel, fd, record, partial(kernel.rename, container_fd, RECORD_NEW, container_fd, RECORD))
    except OSError:
        with suppress(OSError):
            _drop_new(kernel, container_fd)
        raise


def _drop_new(kernel: Kernel, container_fd: Fd) -> None:
    with suppress(FileNotFoundError):
        kernel.unlink(container_fd, RECORD_NEW)


def _publish(kernel: Kernel, fd: Fd, record: Record, appear: Callable[[], None]) -> Fd:
    """Lock, write and flush a file, then let it appear: in this order a record is never seen unlocked or short."""
    with closed_on_error(fd):
        if not kernel.lock(fd):
            raise FileNotFoundError(errno.ENOENT, "recovery was faster than this record")
        fill_record(kernel, fd, record)
        appear()
    return fd


def fill_record(kernel: Kernel, fd: Fd, record: Record) -> None:
    """Make a record the durable content of a file that we have locked."""
    kernel.write(fd, _encoded(record))
    kernel.fsync(fd)


def _encoded(record: Record) -> bytes:
    try:
        return encode(record)
    except ValueError as error:
        # Only the origin can be that long: some 20,000 bytes of names that have to be quoted.
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)) from error


def move(held: HeldContainer, to: State) -> HeldContainer:
    """The container in its next state; the only way in which a state changes (I4)."""
    assert (held.state, to) in LEGAL_MOVES, (held.state, to)
    kernel = held.folder.store.kernel
    with held.folder.open(held.state) as source, held.folder.open(to) as target:
        kernel.rename(source, held.name(), target, held.id.encode())
    return held._replace(state=to, called=None)


def rewrite(held: HeldContainer, record: Record) -> HeldContainer:
    """The container with another record, durable and locked before the old one's lock goes.

    Its last move becomes durable first: btrfs would write the new record with its name into the container where
    that was before, and recovery never looks there for what a killed command left (docs/crash.md).
    """
    kernel = held.folder.store.kernel
    kernel.fsync(held.fd)
    held.owned.enter_context(replace_record(kernel, held.fd, record))
    return held._replace(record=record)


def come(held: HeldContainer, size: TreeSize | None) -> HeldContainer:
    """The container after all that it was made for came, bit by bit: what is moved from now on was not given.

    Where there is no room for that in its record, what came is in doubt as far as others could have moved it.
    size  of its tree, as far as it is known; it costs no write of its own
    """
    kernel = held.folder.store.kernel
    with suppress(OSError):
        last_ns = now_ns = touch(kernel, held.fd)
        for _ in range(_PATIENCE):
            if now_ns > last_ns:
                break
            time.sleep(_TICK_S)
            now_ns = touch(kernel, held.fd)
        return rewrite(held, held.record._replace(moved_ns=now_ns, size=size))
    return held


def flush_directory(held: HeldContainer, fd: Fd) -> None:
    """Make the names durable of a directory on the container's filesystem, open in any way."""
    kernel = held.folder.store.kernel
    try:
        readable = kernel.open_dir(fd)
    except PermissionError:
        kernel.syncfs(held.fd)  # it may be changed, not listed
        return
    with readable:
        kernel.fsync(readable)


def dissolve(held: HeldContainer) -> None:
    """Remove a container that holds nothing but its record.

    Raises  OSError with ENOTEMPTY, and leaves the record, if there is anything else in it: without its record
            there would be no telling what that is
    """
    kernel = held.folder.store.kernel
    is_shared = held.folder.store.is_shared()
    if is_shared:
        drop_prepared(held)  # what a mkdir that came a second time made
    names = kernel.list_anew(held.fd) if is_shared else kernel.list(held.fd)
    others = {name for name in names if not (is_own_file(name) or name.startswith(HIDDEN_PREFIXES))}
    if others:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), min(others))
    _drop_new(kernel, held.fd)
    for name in names:
        if is_own_file(name) and name not in (RECORD, RECORD_NEW):
            kernel.unlink(held.fd, name)
    kernel.unlink(held.fd, RECORD)
    # Without a record no process owns it any more: recovery may have swept it away by now.
    with held.folder.open(held.state) as state, suppress(FileNotFoundError):
        if is_shared:
            _rmdir_patiently(held, state)
        else:
            kernel.rmdir(state, held.name())


def _rmdir_patiently(held: HeldContainer, state: Fd) -> None:
    """Lock and fds go first: libfuse and NFS keep an unlinked open file under a hidden name until after that."""
    kernel = held.folder.store.kernel
    held.owned.close()
    for n in range(_PATIENCE):
        try:
            if n == _PATIENCE // 2:
                _drop_hidden(kernel, state, held.name())  # a client that died left it
            kernel.rmdir(state, held.name())
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            time.sleep(_PAUSE_S)
        else:
            return
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), held.name())


def _drop_hidden(kernel: Kernel, state: Fd, name: bytes) -> None:
    with kernel.open_dir(state, name) as fd:
        for hidden in kernel.list(fd):
            if hidden.startswith(HIDDEN_PREFIXES):
                kernel.unlink(fd, hidden)


def unfinished_name() -> bytes:
    """A new name for a directory that is being made for a sweep's tree, or for its origin, beside the tree."""
    return UNFINISHED_PREFIX + os.urandom(6).hex().encode()


def drop_prepared(held: HeldContainer) -> None:
    """Remove the directories with such names, which a killed sweep, or a restore, was still making."""
    kernel = held.folder.store.kernel
    for name in kernel.list_anew(held.fd):
        if name.startswith(UNFINISHED_PREFIX):
            kernel.rmdir(held.fd, name)


def drop_empty_tree(held: HeldContainer) -> bool:
    """Remove the tree if it is empty; whether it is gone."""
    with suppress_errno(errno.ENOTEMPTY, errno.EEXIST):
        with suppress(FileNotFoundError):
            held.folder.store.kernel.rmdir(held.fd, TREE)
        return True
    return False


def flush(held: HeldContainer) -> None:
    """Make the renames into or out of the tree durable, once the container was moved, or the tree removed, after them.

    That change is the last of all in the journals of ext4 and xfs, so that a flush of the container carries them;
    btrfs writes everything when a directory that was itself moved, or lost one, is flushed (docs/crash.md).
    """
    held.folder.store.kernel.fsync(held.fd)
