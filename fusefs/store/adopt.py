"""Taking in what nobody swapped: things dropped into `drop/`, and what was written into a fresh directory."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import NamedTuple

from fusefs.core.durations import DEFAULT_RETENTION_S
from fusefs.core.errors import TrashdError, from_os
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, Name, RelPath, printable
from fusefs.core.record import Method, Record
from fusefs.linux.fd import Fd
from fusefs.linux.host import boot_id, host_id
from fusefs.store.container import Held, create_record, dissolve, make_directory, move, new_id
from fusefs.store.layout import DROP, TREE, UserFolder
from fusefs.store.stage import ATTEMPTS, discard_unmade, identify_at, lend, loan, take_back


class Problem(NamedTuple):
    """Something that was found and kept: where, what, and what a person can do about it."""

    where: str
    what: str
    hint: str


def take_in(
    folder: UserFolder,
    dir_fd: Fd,
    name: Name,
    *,
    origin: RelPath | None,
    retention_s: int | None,
    note: str,
    lent: int | None = None,
) -> ContainerId:
    """Make an orphan of what has a name in a directory of the same user: record first, then one rename.

    lent    its mode before a loan that somebody else made already; this ends it
    Raises  OSError; the thing is where it was then
    """
    kernel = folder.store.kernel
    with ExitStack() as owned:
        fd = owned.enter_context(kernel.open_beneath(dir_fd, name))
        lent = loan(kernel.fstat(fd)) if lent is None else lent
        record = Record(
            id=new_id(kernel, name if origin is None else os.path.basename(origin)),
            volume=folder.store.volume.id,
            method=Method.DROPPED if origin is None else Method.REMOVED,
            origin=origin,
            parent=None,
            fresh=None,
            victim=identify_at(kernel, dir_fd, name),
            host=host_id(),
            boot=boot_id(),
            created_ns=kernel.now_ns(),
            retention_s=retention_s,
            note=note,
            lent_mode=lent,
        )
        held = owned.enter_context(_make_container(folder, record))
        try:
            lend(held, fd, lent)
            kernel.rename(dir_fd, name, held.fd, TREE)
        except (OSError, TrashdError):
            take_back(held, fd, lent)
            dissolve(held)
            raise
        take_back(held, fd, lent)
        if origin is not None:
            # Else btrfs may write the move that follows, not this rename; what was dropped is just dropped again.
            kernel.fsync(dir_fd)
        move(held, State.ORPHANS)
    return held.id


def _make_container(folder: UserFolder, record: Record) -> Held:
    """A container in stage/ with that record. Recovery may sweep it away before it has one: then once more."""
    kernel = folder.store.kernel
    for attempt in range(ATTEMPTS):
        with ExitStack() as owned:
            try:
                fd = owned.enter_context(make_directory(folder, record.id))
                owned.enter_context(create_record(kernel, fd, record))
            except BaseException as error:
                discard_unmade(folder, record.id)
                if isinstance(error, FileNotFoundError) and attempt < ATTEMPTS - 1:
                    continue
                raise
            return Held(folder, record.id, State.STAGE, fd, record, owned.pop_all())
    raise AssertionError("unreachable: the last attempt returns or raises")


def adopt_dropped(folder: UserFolder) -> tuple[list[ContainerId], list[Problem]]:
    """Make orphans of all that lies in `drop/`; what can't be taken stays there and is told."""
    kernel = folder.store.kernel
    adopted: list[ContainerId] = []
    problems: list[Problem] = []
    with folder.open(DROP) as drop:
        for name in kernel.list(drop):
            where = printable(os.path.join(folder.path(), DROP, name))
            try:
                adopted.append(take_in(folder, drop, Name(name), origin=None, retention_s=DEFAULT_RETENTION_S, note=""))
            except FileNotFoundError:
                continue  # its user took it back, or another command was faster
            except OSError as error:
                told = from_os(error, where)
                problems.append(Problem(where, told.message(), told.hint))
            except TrashdError as error:
                problems.append(Problem(where, error.message(), error.hint))
    return adopted, problems
