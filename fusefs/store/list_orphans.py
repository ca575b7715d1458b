"""What the stores hold, for lists: read from records, without walking a tree."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

from fusefs.core.errors import BadRecord
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, Name, is_container_id
from fusefs.core.orphan_age import Now
from fusefs.core.printable_names import printable, show
from fusefs.core.record import RECORD_MAX_BYTES, Failure, Invocation, Method, Record, TreeSize
from fusefs.core.record_decoding import decode
from fusefs.core.report import WORDS
from fusefs.linux.batched_calls import read_on
from fusefs.linux.fd import Fd
from fusefs.linux.file_locks import flock_holders
from fusefs.linux.kernel import Kernel
from fusefs.store.claim import open_record
from fusefs.store.layout import UserFolder
from fusefs.store.store_registry import is_vouched


class ListedContainer(NamedTuple):
    """One container as a list shows it.

    path      its directory
    origin    full path that the tree came from; None for what was dropped
    problem   why its record can't be read; the other fields are then empty
    failures  why it is in quarantine, as far as the record had room; `n_failed` of them
    partial     the reaper has begun on it
    is_stopped  and no process is at it now; never said where locks of other hosts are not seen
    expires_ns, clock_set_ns  as the wall clock runs now, which was set forward by so much since it came
    is_proven   whether its folder is: only its user reaps it otherwise
    is_vouched  whether its store is vouched for, so that it is no copy: only by its ID it is reaped otherwise
    invocation  the command that took it away; None: not told
    size        what it takes, as far as that is known; None once a reaper has begun on it
    """

    id: ContainerId
    uid: int
    state: State
    path: bytes
    origin: bytes | None = None
    method: Method | None = None
    created_ns: int = 0
    expires_ns: int | None = None
    note: str = ""
    partial: bool = False
    n_failed: int = 0
    problem: str = ""
    failures: tuple[Failure, ...] = ()
    clock_set_ns: int = 0
    is_proven: bool = True
    is_vouched: bool = True
    is_stopped: bool = False
    invocation: Invocation | None = None
    size: TreeSize | None = None

    def base_path(self) -> bytes:
        """The directory that holds the store."""
        return os.path.dirname(self.store_path())

    def store_path(self) -> bytes:
        """The path of the store."""
        return self.path.rsplit(b"/", 4)[0]  # STORE/AREA/FOLDER/STATE/ID

    def left_s(self, now_ns: int) -> int | None:
        """Seconds until its term ends, negative if it has; None: never by itself."""
        return None if self.expires_ns is None else (self.expires_ns - now_ns) // 1_000_000_000

    def age_s(self, now_ns: int) -> int:
        """Seconds since it came."""
        return (now_ns - self.created_ns - self.clock_set_ns) // 1_000_000_000

    def is_served_by(self, uid: int) -> bool:
        """Whether it may go when that user asks for all that is due; as UserFolder has it."""
        return self.is_proven or self.uid == uid != 0


def entries(folder: UserFolder, now: Now) -> Iterator[ListedContainer]:
    """The containers of one user in all states, oldest first; to be run as that user."""
    vouched = is_vouched(folder.store)
    for entry in _entries(folder, now):
        yield entry._replace(is_vouched=vouched)


def _entries(folder: UserFolder, now: Now) -> Iterator[ListedContainer]:
    for state in State:
        names = folder.list(state)
        if not names:
            continue
        with folder.open(state) as state_fd:
            for name in names:
                entry = _look(folder, state, state_fd, name, now)
                if entry is not None:
                    yield entry


def entries_in_no_order(folder: UserFolder, now: Now) -> Iterator[ListedContainer]:
    """As `entries`, in the directories' own order, however many; whether the store is vouched for is not said.

    One whose state changes meanwhile may come twice.
    """
    kernel = folder.store.kernel
    for state in State:
        try:
            state_fd = kernel.open_dir(folder.fd, Name(state.value.encode()))
        except FileNotFoundError:
            continue
        with state_fd:
            while (block := read_on(kernel, state_fd)) is not None:
                for name in map(os.fsencode, block.names):
                    entry = _look(folder, state, state_fd, name, now)
                    if entry is not None:
                        yield entry


def _look(folder: UserFolder, state: State, state_fd: Fd, name: bytes, now: Now) -> ListedContainer | None:
    """What has a name in the directory of a state; None if that is no container, or not any more."""
    text = name.decode("ascii", "replace")
    if not is_container_id(text):
        return None
    kernel = folder.store.kernel
    try:
        with kernel.open_dir(state_fd, name) as fd, open_record(kernel, fd, folder.uid) as record_fd:
            record = decode(kernel.read(record_fd, RECORD_MAX_BYTES + 1))
            is_stopped = state is State.REAPING and _is_left(kernel, record_fd)
        return _entry(folder, state, ContainerId(text), record, now)._replace(is_stopped=is_stopped)
    except FileNotFoundError:
        return None  # moved meanwhile, or being made
    except (BadRecord, OSError) as error:
        told = error.message() if isinstance(error, BadRecord) else str(error.strerror)
        return unreadable(folder, state, name, told)


def _is_left(kernel: Kernel, record_fd: Fd) -> bool:
    """Whether no process holds a record, without taking it even for a moment."""
    return kernel.is_local(record_fd) and not flock_holders(kernel.fstat(record_fd))


def _entry(folder: UserFolder, state: State, container: ContainerId, record: Record, now: Now) -> ListedContainer:
    base = folder.store.base_path
    return ListedContainer(
        id=container,
        uid=folder.uid,
        state=state,
        path=folder.path_to(state, container.encode()),
        origin=None if record.origin is None else os.path.join(base, record.origin) if record.origin else base,
        method=record.method,
        created_ns=record.created_ns,
        expires_ns=record.expires_ns(now),
        note=record.note,
        partial=record.partial or state is State.REAPING,
        n_failed=len(record.failures),
        failures=record.failures,
        clock_set_ns=record.clock_set_ns(now),
        is_proven=folder.is_proven,
        invocation=record.invocation,
        size=None if record.partial or state is State.REAPING else record.size,
    )


def unreadable(folder: UserFolder, state: State, name: bytes, problem: str) -> ListedContainer:
    """The entry of what has a name in the directory of a state, and whose record can't be, or was not, read."""
    container, path = ContainerId(printable(name)), folder.path_to(state, name)
    return ListedContainer(container, folder.uid, state, path, problem=problem, is_proven=folder.is_proven)


def explain_failure(failure: Failure) -> str:
    """A reason for a quarantine, in words. They may be a user's own: any number, any text."""
    if failure.call in WORDS:
        return f"{printable(failure.name)}: {WORDS[failure.call]}"
    known = failure.errno in errno.errorcode
    reason = os.strerror(failure.errno) if known else f"error {failure.errno}"
    return f"{show(failure.call)} {printable(failure.name or b'.')}: {reason}"


def explain_first(failure: Failure | None, n_failed: int) -> str:
    """The first of so many things that could not be removed, in words, and how many more; nothing without one."""
    if failure is None:
        return ""
    why = explain_failure(failure)
    return why if n_failed == 1 else f"{why}, and {n_failed - 1:,} more"
