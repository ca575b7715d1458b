"""Adoption of what no swap brought: things dropped into `drop/`, and what was written into a fresh directory."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import NamedTuple

from fusefs.core.container_states import DEFAULT_RETENTION_S, State
from fusefs.core.errors import ELSEWHERE, WAY_OUT, TrashdError, from_os
from fusefs.core.names import ContainerId, Name, RelPath
from fusefs.core.printable_names import printable
from fusefs.core.record import Method
from fusefs.linux.fd import Fd
from fusefs.store.container import dissolve, move
from fusefs.store.layout import DROP, TREE, UserFolder
from fusefs.store.stage import identify_at, record_now, stage_new
from fusefs.store.victim_rename import lend, loan, take_back


class AdoptionProblem(NamedTuple):
    """Something that was found and kept: where, what, and what a person can do about it."""

    where: str
    what: str
    hint: str


def refused(folder: UserFolder, where: str, error: OSError) -> AdoptionProblem:
    """What the kernel would not have done with a container."""
    hint = ELSEWHERE if folder.store.is_shared() else WAY_OUT
    return AdoptionProblem(where, from_os(error, where).message(), hint)


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

    lent    its mode before a loan that was made already; this ends it
    Raises  OSError; the thing is where it was then
    """
    kernel = folder.store.kernel
    with ExitStack() as owned:
        fd = owned.enter_context(kernel.open_beneath(dir_fd, name))
        lent = loan(kernel.fstat(fd)) if lent is None else lent
        method = Method.DROPPED if origin is None else Method.REMOVED
        victim = identify_at(kernel, dir_fd, name)
        record = record_now(folder, method, origin, victim)
        record = record._replace(retention_s=retention_s, note=note, lent_mode=lent)
        called = name if origin is None else os.path.basename(origin)
        held = owned.enter_context(stage_new(folder, called, record)).held
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


def adopt_dropped(folder: UserFolder) -> tuple[list[ContainerId], list[AdoptionProblem]]:
    """Make orphans of all that lies in `drop/`; what can't be taken stays there and is told."""
    adopted: list[ContainerId] = []
    problems: list[AdoptionProblem] = []
    names = folder.list(DROP)
    if not names:
        return [], []
    with folder.open(DROP) as drop:
        for name in names:
            where = printable(os.path.join(folder.path(), DROP, name))
            try:
                adopted.append(take_in(folder, drop, Name(name), origin=None, retention_s=DEFAULT_RETENTION_S, note=""))
            except FileNotFoundError:
                continue  # its user took it back, or another command was faster
            except (OSError, TrashdError) as error:
                told = from_os(error, where)
                problems.append(AdoptionProblem(where, told.message(), told.hint))
    return adopted, problems
