"""Makes containers with complete, durable, locked records, moves them between states, and claims them."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from enum import Enum
from functools import partial
from typing import NamedTuple, Self

from fusefs.core.container_states import LEGAL_MOVES, State
from fusefs.core.errors import BadRecord
from fusefs.core.names import ContainerId, Name, RelPath, join_path, make_id, may_be_same_container
from fusefs.core.record import RECORD_MAX_BYTES, Record, TreeSize, encode_record
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.syscalls import NO_TMPFILE
from fusefs.store.backing_and_mount import DIRECTORY, BackingAndMount, add_mounted_side, suppress_errno
from fusefs.store.layout import (
    BEGUN,
    HIDDEN_PREFIXES,
    RECORD,
    RECORD_NEW,
    REPLACEMENT,
    TREE,
    Store,
    UserFolder,
    is_container_file,
    make_unique,
)

UNFINISHED_PREFIX = REPLACEMENT + b"."
"""Prefix of the directories that a sweep or restore makes next to the tree and then moves to their final place."""
GONE_ERRNOS = (errno.ENOENT, errno.ESTALE)
"""Errors that a server may report for an entry that another node has removed."""
_N_RMDIR_TRIES, _PAUSE_S = 100, 0.01
_TICK_S = 0.001


class HeldContainer(NamedTuple):
    """A container whose record we have locked: no other process moves or changes it until the last fd is closed.

    fd      the container's directory, open for reading
    record  the record as it is on disk
    owned   closes the fds that hold the lock; several HeldContainers may share it, and one of them must be closed
    stored_as  the name in the state's directory if the container took another one's place; None: the ID is the name
    """

    folder: UserFolder
    id: ContainerId
    state: State
    fd: Fd
    record: Record
    owned: ExitStack
    stored_as: ContainerId | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.owned.close()

    def name(self) -> bytes:
        return (self.stored_as or self.id).encode()

    def relative_path(self) -> RelPath:
        """Return the container's path relative to the directory that holds the store."""
        return self.folder.relative_path_to(self.state, self.name())


def open_inside(held: HeldContainer, name: Name) -> BackingAndMount:
    """Open a directory in a container, on both sides if one of our mounts shows it. Raises  OSError"""
    store = held.folder.store
    fd = store.kernel.open_beneath(held.fd, name, DIRECTORY)
    return add_mounted_side(store.kernel, fd, store.base.mounted, join_path(held.relative_path(), name))


def new_id(kernel: Kernel, victim: bytes) -> ContainerId:
    now_ns = kernel.now_ns()
    utc = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ns // 1_000_000_000))
    return make_id(utc, now_ns // 1_000_000 % 1000, victim, os.urandom(6))


def make_container_directory(folder: UserFolder, state: State, container: ContainerId) -> Fd:
    kernel, name = folder.store.kernel, container.encode()
    with folder.open(state) as parent:
        make_unique(kernel, parent, name)
        return kernel.open_dir(parent, name)


def superblock_in(st: os.stat_result) -> str:
    """Return a mounted filesystem's "major:minor" in this kernel. Processes that see the same number share its locks.

    The number is reused only after the filesystem is unmounted and all its locks are gone.
    """
    return f"{os.major(st.st_dev)}:{os.minor(st.st_dev)}"


def is_taken_over(held: HeldContainer) -> bool:
    """Return whether another node has assumed that our process is dead, and taken over the container's contents."""
    return held.folder.store.is_shared() and has_lost_record(held.folder.store.kernel, held.fd)


def has_lost_record(kernel: Kernel, container: Fd) -> bool:
    """Return whether the server reports that a container's record, or the container itself, is gone."""
    try:
        kernel.stat(container, RECORD)
    except OSError as error:
        return error.errno in GONE_ERRNOS
    return False


def read_fs_clock_ns(kernel: Kernel, fd: Fd) -> int:
    """Return the time by the filesystem's clock: a container's ctime after a chmod that does not change its mode."""
    kernel.chmod(fd, 0o700)
    return max(0, kernel.fstat(fd).st_ctime_ns)


def create_record(store: Store, container_fd: Fd, record: Record) -> Fd:
    """Create a container's first record and return its locked fd. The record appears complete and durable.

    Raises  FileNotFoundError if recovery removed the container before it had a record: the caller should start again
    """
    kernel = store.kernel
    if store.volume.unnamed is not True or store.volume.filesystem != store.filesystem:
        # It is not proven that files created without a name persist on this filesystem.
        return replace_record(kernel, container_fd, record)
    try:
        fd = kernel.create_unnamed(container_fd)
    except OSError as error:
        if error.errno not in NO_TMPFILE:
            raise
        return replace_record(kernel, container_fd, record)
    return _publish(kernel, fd, record, partial(kernel.link_unnamed, fd, container_fd, RECORD))


def replace_record(kernel: Kernel, container_fd: Fd, record: Record) -> Fd:
    """Replace a container's record, if any, and return the new record's locked fd. Raises  as for `create_record`"""
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
    """Lock, write and flush a file, then give it its name, so that no process sees an unlocked or incomplete record."""
    with close_on_error(fd):
        if not kernel.lock(fd):
            raise FileNotFoundError(errno.ENOENT, "another process is already recovering this container")
        fill_record(kernel, fd, record)
        appear()
    return fd


def fill_record(kernel: Kernel, fd: Fd, record: Record) -> None:
    """Write a record durably into a file that we have locked."""
    try:
        text = encode_record(record)
    except ValueError as error:
        # Only an origin can make a record too long: one with about 20,000 bytes of names that have to be quoted.
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)) from error
    kernel.write(fd, text)
    kernel.fsync(fd)


def move_to_state(held: HeldContainer, to: State) -> HeldContainer:
    """Move the container to its next state with one rename, which is the only way to change a state (I4)."""
    assert (held.state, to) in LEGAL_MOVES, (held.state, to)
    kernel = held.folder.store.kernel
    with held.folder.open(held.state) as source, held.folder.open(to) as target:
        kernel.rename(source, held.name(), target, held.id.encode())
    return held._replace(state=to, stored_as=None)


def rewrite_record(held: HeldContainer, record: Record) -> HeldContainer:
    """Replace the container's record. The new record is durable and locked before the old one's lock is released.

    The container's last move is flushed first. Otherwise btrfs could write the new record, with its name, into the
    container at its old place, where recovery never searches for the remains of a killed command
    (docs/internals/crash-windows.md).
    """
    kernel = held.folder.store.kernel
    kernel.fsync(held.fd)
    held.owned.enter_context(replace_record(kernel, held.fd, record))
    return held._replace(record=record)


def mark_complete(held: HeldContainer, size: TreeSize | None) -> HeldContainer:
    """Mark a sweep's container as complete: entries that are moved into it later count as late arrivals.

    If the record can't be rewritten, directories that other users could have moved there earlier count as late, too.
    size  the tree's size, if known; recording it takes no additional write
    """
    kernel = held.folder.store.kernel
    with suppress(OSError):
        last_ns = now_ns = read_fs_clock_ns(kernel, held.fd)
        for _ in range(_N_RMDIR_TRIES):
            if now_ns > last_ns:
                break
            time.sleep(_TICK_S)
            now_ns = read_fs_clock_ns(kernel, held.fd)
        return rewrite_record(held, held.record._replace(moved_ns=now_ns, size=size))
    return held


def flush_directory(held: HeldContainer, fd: Fd) -> None:
    """Flush the names in a directory on the container's filesystem; the fd need not be readable."""
    kernel = held.folder.store.kernel
    try:
        readable = kernel.open_dir(fd)
    except PermissionError:
        kernel.syncfs(held.fd)  # we may change the directory, but not list it
        return
    with readable:
        kernel.fsync(readable)


def dissolve(held: HeldContainer) -> None:
    """Remove a container that contains nothing but its record.

    Raises  OSError ENOTEMPTY if it contains other entries; then the record is kept, to describe them
    """
    kernel = held.folder.store.kernel
    is_shared = held.folder.store.is_shared()
    names = kernel.list_reopened(held.fd) if is_shared else kernel.list(held.fd)
    for name in names:
        if name.startswith(UNFINISHED_PREFIX):  # from a check, or from a mkdir that the server executed twice
            kernel.rmdir(held.fd, name)
    kept = (UNFINISHED_PREFIX, *HIDDEN_PREFIXES)
    others = {name for name in names if not (is_container_file(name) or name.startswith(kept))}
    if others:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), min(others))
    _drop_new(kernel, held.fd)
    for name in names:
        if is_container_file(name) and name not in (RECORD, RECORD_NEW):
            kernel.unlink(held.fd, name)
    kernel.unlink(held.fd, RECORD)
    # Without a record, no process owns the container: recovery may have removed it by now.
    with held.folder.open(held.state) as state, suppress(FileNotFoundError):
        if is_shared:
            _rmdir_after_unlock(held, state)
        else:
            kernel.rmdir(state, held.name())


def _rmdir_after_unlock(held: HeldContainer, state: Fd) -> None:
    """Remove the container after closing its fds: until then, libfuse and NFS keep unlinked files under other names."""
    kernel = held.folder.store.kernel
    held.owned.close()
    for n in range(_N_RMDIR_TRIES):
        try:
            if n == _N_RMDIR_TRIES // 2:
                _drop_hidden(kernel, state, held.name())  # left by a client that died
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
    return UNFINISHED_PREFIX + os.urandom(6).hex().encode()


def drop_unfinished(held: HeldContainer) -> None:
    """Remove the directories with UNFINISHED_PREFIX that a killed sweep or restore left."""
    kernel = held.folder.store.kernel
    for name in kernel.list_reopened(held.fd):
        if name.startswith(UNFINISHED_PREFIX):
            kernel.rmdir(held.fd, name)


def drop_empty_tree(held: HeldContainer) -> bool:
    """Remove the tree if it is empty; return whether it is gone."""
    with suppress_errno(errno.ENOTEMPTY, errno.EEXIST):
        with suppress(FileNotFoundError):
            held.folder.store.kernel.rmdir(held.fd, TREE)
        return True
    return False


def flush(held: HeldContainer) -> None:
    """Flush the renames into or out of the tree, after the container was moved or the tree was removed.

    On ext4 and xfs, that later change is the last one in the journal, so flushing the container flushes the earlier
    renames, too. btrfs writes everything when it flushes a directory that was itself moved or lost an entry
    (docs/internals/crash-windows.md).
    """
    held.folder.store.kernel.fsync(held.fd)


_N_LOCK_TRIES, _LOCK_RETRY_S = 20, 0.025
"""How often, and at what interval, locking an orphan is retried: rewriting a record takes two flushes."""


class ClaimLost(Enum):
    """The reason why a container could not be locked. Losing a race is a result, not an error."""

    GONE = "gone"
    BUSY = "busy"
    CHANGED = "changed"


def open_record(kernel: Kernel, container_fd: Fd, uid: int) -> Fd:
    """Open a container's record without locking it; read-only if the volume is read-only.

    The record may have a second hard link, since some backup programs make such links. In a folder that only its owner
    can enter, only that user and root can have put the record there, and trashd never changes a record in place.
    Raises  FileNotFoundError if there is no record; BadRecord unless it is a small regular file that belongs to
            `uid` and that no other user can change through another link. The user may have put a FIFO, a link to
            another user's file, or a gigabyte there
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
            raise BadRecord(f"record.json is not a regular file ({error.strerror})") from error
        raise
    with close_on_error(fd):
        st = kernel.fstat(fd)
        # A link count of 0 is not an attack: the record was just replaced or removed, which locking it detects.
        is_others_too = st.st_nlink > 1 and st.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(st.st_mode) or is_others_too or st.st_uid != uid or st.st_size > RECORD_MAX_BYTES:
            raise BadRecord(f"record.json is not a small regular file that belongs to uid {uid}")
    return fd


def read_record(kernel: Kernel, record_fd: Fd, folder: UserFolder, container: ContainerId) -> Record:
    """Read a record from its fd; the ID and volume in it must be those of the container. Raises  BadRecord"""
    return decode_record(kernel.read(record_fd, RECORD_MAX_BYTES + 1), folder, container)


def decode_record(text: bytes, folder: UserFolder, container: ContainerId) -> Record:
    """Decode a container's record.json. Raises  BadRecord, as for `read_record`"""
    from fusefs.core.record_decoding import (
        decode_record,  # late: importing msgspec takes longer than the rest of a swap
    )

    record = decode_record(text)
    if not may_be_same_container(container, record.id):
        raise BadRecord(f"it contains the record of {record.id}")
    if record.volume != folder.store.volume.id:
        raise BadRecord("it comes from another volume's trash store")
    return record


def read_record_unlocked(folder: UserFolder, state: State, container: ContainerId) -> Record:
    """Read a container's current record without a lock. Raises  FileNotFoundError if it is gone; BadRecord, OSError"""
    kernel = folder.store.kernel
    with (
        folder.open(state) as state_fd,
        kernel.open_dir(state_fd, container.encode()) as fd,
        open_record(kernel, fd, folder.uid) as record_fd,
    ):
        return read_record(kernel, record_fd, folder, container)


def hold(
    folder: UserFolder, state: State, container: ContainerId, ended_boots: Collection[str] = ()
) -> HeldContainer | ClaimLost:
    """Lock a container and return it, or the reason why that failed.

    ended_boots  IDs of other boots that the administrator declared ended. On shared filesystems, their locks are
            ignored, because a server may keep a dead client's lock for a day (MooseFS). Several processes may then
            hold the container at the same time, so this is only for takeovers
    Raises  BadRecord; FileNotFoundError if the container exists but has no record
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
                return ClaimLost.GONE  # removed on another node
            if not isinstance(error, FileNotFoundError) or _still_has_name(folder, fd, state_fd, name):
                raise
            return ClaimLost.GONE  # another process took it, and has removed it by now
        if not kernel.lock(record_fd) and not _is_of_ended_boot(folder, record_fd, container, ended_boots):
            return ClaimLost.BUSY
        # The process that held the lock before us may have moved the container or replaced its record.
        if not (kernel.is_named(fd, state_fd, name) and kernel.is_named(record_fd, fd, RECORD)):
            return ClaimLost.GONE
        record = read_record(kernel, record_fd, folder, container)
        stored_as = None if container == record.id else container
        return HeldContainer(folder, record.id, state, fd, record, owned.pop_all(), stored_as)


def hold_soon(folder: UserFolder, state: State, container: ContainerId) -> HeldContainer | ClaimLost:
    """Like `hold`, but retry for a moment if an orphan is locked, as another process may be recording its size."""
    for _ in range(_N_LOCK_TRIES if state is State.ORPHANS else 0):
        held = hold(folder, state, container)
        if held is not ClaimLost.BUSY:
            return held
        time.sleep(_LOCK_RETRY_S)
    return hold(folder, state, container)


def _is_of_ended_boot(folder: UserFolder, record_fd: Fd, container: ContainerId, ended_boots: Collection[str]) -> bool:
    if not ended_boots or not folder.store.is_shared():
        return False
    boot = read_record(folder.store.kernel, record_fd, folder, container).boot
    return boot in ended_boots and boot != boot_id()


def _still_has_name(folder: UserFolder, fd: Fd, state_fd: Fd, name: bytes) -> bool:
    """Return whether a container without a record still has its name, even if a cache is out of date."""
    kernel = folder.store.kernel
    return kernel.is_named(fd, state_fd, name) and (
        not folder.store.is_shared() or name in kernel.list_reopened(state_fd)
    )


def _always(_record: Record) -> bool:
    return True


def _mark_begun(held: HeldContainer, still_applies: Callable[[Record], bool]) -> HeldContainer | ClaimLost:
    """On shared filesystems, mark a container that was moved to reaping/ as begun, or make it an orphan again.

    A lock may be lost there, and the server may execute a claim only after the claiming process has ended. In the
    meantime, another command may have prolonged the retention, so the record is checked again.
    """
    kernel = held.folder.store.kernel
    if held.folder.store.is_shared() and BEGUN not in kernel.list_reopened(held.fd):
        with open_record(kernel, held.fd, held.folder.uid) as fd:
            record = read_record(kernel, fd, held.folder, held.id)
        if not still_applies(record):
            move_to_state(held, State.ORPHANS)
            held.owned.close()
            return ClaimLost.CHANGED
        kernel.create(held.fd, BEGUN).close()
    return held


def claim(
    folder: UserFolder,
    source: State,
    container: ContainerId,
    still_applies: Callable[[Record], bool] = _always,
) -> HeldContainer | ClaimLost:
    """Lock a container and move it to reaping/ with one rename; only one of several claims succeeds (I5).

    still_applies  whether the record still permits the claim; if not, the container is not claimed. This is called
              while no other process can change the record. On shared filesystems, where a lock may be lost, it is
              called again after the move
    """
    held = hold(folder, source, container)
    if isinstance(held, ClaimLost):
        return held
    try:
        if not still_applies(held.record):
            held.owned.close()
            return ClaimLost.CHANGED
        moved = move_to_state(held, State.REAPING)
        return _mark_begun(moved, still_applies if source is State.ORPHANS else _always)
    except BaseException as error:
        held.owned.close()
        if isinstance(error, FileNotFoundError):
            return ClaimLost.GONE
        raise


def resume(
    folder: UserFolder, container: ContainerId, still_applies: Callable[[Record], bool]
) -> HeldContainer | ClaimLost:
    """Lock a container that a reaper left in reaping/.

    still_applies  as for `claim`: on shared filesystems, the container may have been claimed but not checked again
    Raises    as for `hold`
    """
    held = hold(folder, State.REAPING, container)
    if isinstance(held, ClaimLost):
        return held
    with close_on_error(held):
        return _mark_begun(held, still_applies)


def record_size(folder: UserFolder, container: ContainerId, size: TreeSize) -> None:
    """Record the size of an orphan's tree; to be run as the folder's owner.

    Do nothing if another process holds the orphan, the orphan is gone, or the volume is full or read-only.
    """
    with suppress(OSError, BadRecord):
        held = hold(folder, State.ORPHANS, container)
        if isinstance(held, HeldContainer):
            with held:
                held = rewrite_record(held, held.record._replace(size=size))
                read_fs_clock_ns(folder.store.kernel, held.fd)  # notifies the service, which watches orphans/


def drop_recorded_size(held: HeldContainer) -> HeldContainer:
    """Drop the recorded size before entries are moved out of the tree; on a full volume, the old size remains."""
    with suppress(OSError):
        if held.record.size is not None:
            held = rewrite_record(held, held.record._replace(size=None))
    return held
