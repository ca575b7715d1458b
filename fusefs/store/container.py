"""Containers in the making: a directory in stage/ whose record appears complete, durable and locked in one step."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple, Self

from fusefs.core.lifecycle import LEGAL_MOVES, State
from fusefs.core.names import ContainerId, Name, make_id
from fusefs.core.record import Record, encode
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import RECORD, UserFolder

RECORD_NEW = Name(b"record.json.new")
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)


class Held(NamedTuple):
    """A container whose record we have locked: nobody else moves or changes it until the last fd closes.

    fd      its directory, readable
    record  as it is on disk
    owned   closes what keeps the lock; once, however many values of this hold share it
    """

    folder: UserFolder
    id: ContainerId
    state: State
    fd: Fd
    record: Record
    owned: ExitStack

    def __enter__(self) -> Self:
        """Hold it for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of the lock."""
        self.owned.close()

    def name(self) -> bytes:
        """Its name in the directory of its state."""
        return self.id.encode()


def new_id(kernel: Kernel, victim: bytes) -> ContainerId:
    """An id of now."""
    now_ns = kernel.now_ns()
    utc = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ns // 1_000_000_000))
    return make_id(utc, now_ns // 1_000_000 % 1000, victim, os.urandom(6))


def make_directory(folder: UserFolder, container: ContainerId) -> Fd:
    """The new, still empty container in stage/, readable."""
    kernel = folder.store.kernel
    with folder.open(State.STAGE) as stage:
        kernel.mkdir(stage, container.encode())
        return kernel.open_dir(stage, container.encode())


def create_record(kernel: Kernel, container_fd: Fd, record: Record) -> Fd:
    """The locked fd of a first record, which appears complete and durable.

    Raises  FileNotFoundError if recovery took the container away before it had a record: start again
    """
    try:
        fd = kernel.create_unnamed(container_fd)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        return replace_record(kernel, container_fd, record)
    return _publish(kernel, fd, record, partial(kernel.link_unnamed, fd, container_fd, RECORD))


def replace_record(kernel: Kernel, container_fd: Fd, record: Record) -> Fd:
    """The locked fd of a record that takes the place of the old one, if any; errors as for `create_record`."""
    with suppress(FileNotFoundError):
        kernel.unlink(container_fd, RECORD_NEW)
    fd = kernel.create(container_fd, RECORD_NEW)
    return _publish(kernel, fd, record, partial(kernel.rename, container_fd, RECORD_NEW, container_fd, RECORD))


def _publish(kernel: Kernel, fd: Fd, record: Record, appear: Callable[[], None]) -> Fd:
    """Lock, write and flush a file, then let it appear: in this order a record is never seen unlocked or short."""
    try:
        if not kernel.lock(fd):
            raise FileNotFoundError(errno.ENOENT, "recovery was faster than this record")
        fill_record(kernel, fd, record)
        appear()
    except BaseException:
        fd.close()
        raise
    return fd


def fill_record(kernel: Kernel, fd: Fd, record: Record) -> None:
    """Make a record the durable content of a file that we have locked."""
    kernel.write(fd, encode(record))
    kernel.fsync(fd)


def move(held: Held, to: State) -> Held:
    """The container in its next state; the only way in which a state changes (I4)."""
    assert (held.state, to) in LEGAL_MOVES, (held.state, to)
    kernel = held.folder.store.kernel
    with held.folder.open(held.state) as source, held.folder.open(to) as target:
        kernel.rename(source, held.name(), target, held.name())
    return held._replace(state=to)


def rewrite(held: Held, record: Record) -> Held:
    """The container with another record, durable and locked before the old one's lock goes."""
    kernel = held.folder.store.kernel
    held.owned.enter_context(replace_record(kernel, held.fd, record))
    return held._replace(record=record)


def dissolve(held: Held) -> None:
    """Remove a container that holds nothing but its record.

    Raises  OSError with ENOTEMPTY, and leaves the record, if there is anything else in it: without its record
            nobody would know what that is
    """
    kernel = held.folder.store.kernel
    others = set(kernel.list(held.fd)) - {RECORD, RECORD_NEW}
    if others:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), min(others))
    with suppress(FileNotFoundError):
        kernel.unlink(held.fd, RECORD_NEW)
    kernel.unlink(held.fd, RECORD)
    with held.folder.open(held.state) as state:
        kernel.rmdir(state, held.name())
