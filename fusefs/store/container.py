"""Containers: made with a complete, durable, locked record, moved between states, claimed by one process."""

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
from fusefs.core.names import ContainerId, Name, RelPath, is_of, join, make_id
from fusefs.core.record import RECORD_MAX_BYTES, Record, TreeSize, encode
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.syscalls import NO_TMPFILE
from fusefs.store.backing_and_mount import DIRECTORY, BackingAndMount, both_sides, suppress_errno
from fusefs.store.layout import (
    BEGUN,
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
    if store.volume.unnamed is not True or store.volume.filesystem != store.filesystem:
        # Files made without a name were not seen to last on this filesystem.
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
    try:
        text = encode(record)
    except ValueError as error:
        # Only the origin can be that long: some 20,000 bytes of names that have to be quoted.
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)) from error
    kernel.write(fd, text)
    kernel.fsync(fd)


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
    names = kernel.list_anew(held.fd) if is_shared else kernel.list(held.fd)
    for name in names:
        if name.startswith(UNFINISHED_PREFIX):  # a check's, or what a mkdir that came a second time made
            kernel.rmdir(held.fd, name)
    kept = (UNFINISHED_PREFIX, *HIDDEN_PREFIXES)
    others = {name for name in names if not (is_own_file(name) or name.startswith(kept))}
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
            raise BadRecord(f"record.json is not a regular file ({error.strerror})") from error
        raise
    with closed_on_error(fd):
        st = kernel.fstat(fd)
        # No name at all is no attack: it was replaced or removed meanwhile, which is seen when it is locked.
        is_others_too = st.st_nlink > 1 and st.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(st.st_mode) or is_others_too or st.st_uid != uid or st.st_size > RECORD_MAX_BYTES:
            raise BadRecord(f"record.json is not a small regular file of uid {uid}")
    return fd


def read_record(kernel: Kernel, record_fd: Fd, folder: UserFolder, container: ContainerId) -> Record:
    """The record behind an fd, whose id and volume must be the container's.

    Raises  BadRecord
    """
    return decode_record(kernel.read(record_fd, RECORD_MAX_BYTES + 1), folder, container)


def decode_record(text: bytes, folder: UserFolder, container: ContainerId) -> Record:
    """The record in the bytes of a container's record.json. Raises  BadRecord, as `read_record`"""
    from fusefs.core.record_decoding import decode  # late: msgspec takes a plain swap longer than all else

    record = decode(text)
    if not is_of(container, record.id):
        raise BadRecord(f"it contains the record of {record.id}")
    if record.volume != folder.store.volume.id:
        raise BadRecord("it comes from the trash store of another volume")
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
