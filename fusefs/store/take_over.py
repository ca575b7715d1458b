"""Takes over containers of other processes on shared filesystems: moves their contents to new ones, and removes them.

The other process may be frozen or disconnected. Later it may continue with its open fds, or the server may execute a
call that it had sent. All such calls then find nothing. A restore, or a change of the retention, takes over the orphan,
too, since a late call may still reach the old container.

Source  docs/internals/decisions/0042-shared-filesystems.md
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress

from fusefs.core.container_states import State
from fusefs.core.errors import BadRecord
from fusefs.core.names import successor_id
from fusefs.core.record import Record
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id, host_id
from fusefs.store.container import (
    ClaimLost,
    HeldContainer,
    create_record,
    dissolve,
    make_container_directory,
    open_record,
    read_record,
    rewrite_record,
    superblock_in,
)
from fusefs.store.layout import (
    OLD_CONTAINER,
    TREE,
)
from fusefs.store.stage import ATTEMPTS, discard_unmade
from fusefs.store.transfer_directory import empty_into, move_parts, remove_transfer_directories
from fusefs.store.victim_rename import grant_temporary_permission, mode_to_restore


def take_over(
    old: HeldContainer, to: State, change: Callable[[Record], Record] = lambda record: record
) -> HeldContainer | ClaimLost:
    """Move the contents of a container into a new one of ours; if several processes try, only one succeeds.

    This closes the old container.
    to      the state of the new container
    change  returns the record with the requested changes
    Raises  OSError; then the process that takes over the new container does the rest
    """
    kernel, folder = old.folder.store.kernel, old.folder
    mode_before = None
    with suppress(FileNotFoundError), kernel.open_beneath(old.fd, TREE) as tree:
        mode_before = mode_to_restore(kernel.fstat(tree))  # moving the tree changes its `..`, so it may need permission
    new = _make_successor(old, to, _record_as_ours(kernel, old.fd, change(old.record), mode_before))
    with close_on_error(new):
        with folder.open(old.state) as source:
            try:
                kernel.rename(source, old.name(), new.fd, OLD_CONTAINER)
            except OSError as error:
                # The error proves nothing: a restarted server may report it for a rename that it made.
                if not kernel.is_named(old.fd, new.fd, OLD_CONTAINER):
                    dissolve(new)
                    if isinstance(error, FileNotFoundError):
                        return ClaimLost.GONE
                    raise
        now = _record_in(new, OLD_CONTAINER) or old.record
        if now != old.record:  # a process whose lock we don't see has changed it
            new = rewrite_record(new, _record_as_ours(kernel, old.fd, change(now), mode_before))
        old.owned.close()  # NFS and libfuse keep an open record under a hidden name
        empty_old_containers(new)
    return new


def _record_as_ours(kernel: Kernel, fd: Fd, record: Record, mode_before: int | None) -> Record:
    """Return the record with this process as its maker, so that another recovery does not consider the maker dead."""
    mode_before = record.lent_mode if mode_before is None else mode_before
    return record._replace(
        host=host_id(), boot=boot_id(), boot_ns=None, superblock=superblock_in(kernel.fstat(fd)), lent_mode=mode_before
    )


def _make_successor(old: HeldContainer, to: State, record: Record) -> HeldContainer:
    folder = old.folder
    for attempt in range(ATTEMPTS):
        called = successor_id(old.id, os.urandom(6))
        with ExitStack() as owned:
            try:
                fd = owned.enter_context(make_container_directory(folder, to, called))
                owned.enter_context(create_record(folder.store, fd, record))
            except OSError as error:
                discard_unmade(folder, to, called)
                if isinstance(error, FileNotFoundError) and attempt < ATTEMPTS - 1:
                    continue  # recovery removed it while it had no record
                raise
            return HeldContainer(folder, old.id, to, fd, record, owned.pop_all(), called)
    raise AssertionError("unreachable: the last attempt either returns or raises an error")


def _record_in(held: HeldContainer, name: bytes) -> Record | None:
    """Read the record of a container that is inside another one; return None if it can't be read."""
    kernel = held.folder.store.kernel
    with (
        suppress(FileNotFoundError, BadRecord),
        kernel.open_dir(held.fd, name) as fd,
        open_record(kernel, fd, held.folder.uid) as record_fd,
    ):
        return read_record(kernel, record_fd, held.folder, held.id)
    return None


def empty_old_containers(held: HeldContainer) -> None:
    """Move the contents of older containers and of transfer directories into our container, and remove these.

    If a process was killed during a takeover, its own container still contains the previous one. Raises  OSError
    """
    kernel = held.folder.store.kernel
    with ExitStack() as opened:
        chain = [held.fd]
        while OLD_CONTAINER in kernel.list_reopened(chain[-1]):
            chain.append(opened.enter_context(kernel.open_dir(chain[-1], OLD_CONTAINER)))
        for lower in chain[1:]:  # the newer first, since its contents were moved out of the older one
            with suppress(FileNotFoundError), kernel.open_beneath(lower, TREE) as tree:
                grant_temporary_permission(held, tree, held.record.lent_mode)  # a killed process may not have done this
            move_parts(kernel, lower, held.fd)
        for upper, lower in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
            empty_into(kernel, lower, upper, OLD_CONTAINER, held.fd)
    remove_transfer_directories(kernel, held.fd, held.fd)
