"""Stages a container: makes it with a durable record, and removes a container that never got its record."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import NamedTuple, Self

from fusefs.core.container_states import DEFAULT_RETENTION_S, State
from fusefs.core.identity import Identity, IdentityMatch, compare
from fusefs.core.names import ContainerId, Name, RelPath, join_path
from fusefs.core.record import Invocation, Method, NewOwner, Record
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id, host_id
from fusefs.linux.mountinfo import relative_to
from fusefs.store.backing_and_mount import NO_SPACE_ERRNOS, suppress_errno
from fusefs.store.container import (
    UNFINISHED_PREFIX,
    HeldContainer,
    create_record,
    fill_record,
    make_container_directory,
    new_id,
    read_fs_clock_ns,
    superblock_in,
    unfinished_name,
)
from fusefs.store.layout import NEW_PREFIX, RECORD, REPLACEMENT, TREE, WATCH_PREFIXES, UserFolder, make_unique
from fusefs.store.reserve import (
    SPARE,
    SPARE_FOR_USER,
    ensure_reserve,
    ensure_spare_space,
    lock_reserve,
    move_to_stage,
    release_spare,
)
from fusefs.store.victim import Victim
from fusefs.store.victim_rename import mode_to_restore

ATTEMPTS = 8
_NEEDS_REPLACEMENT = (Method.EXCHANGE, Method.TWO_RENAME, Method.SWEEP)
"""The methods that need a prepared directory in the container, unless the record's `fresh` shows that it exists."""


class TakenContainer(NamedTuple):
    """What root itself has determined about a user's container that root takes over.

    born_ns  when the container was made, before its tree was moved into it, by a clock that can't be set
    uid      its user; None if other users could enter the container, and so may have put something into it
    """

    born_ns: int
    uid: int | None


class SwapOptions(NamedTuple):
    """The options of swap and rm.

    retention_s  the time until the orphan expires; None: never
    accept_differences  whether to accept a replacement that differs from the old directory
    keep         globs for the top-level entries that a swap keeps in place
    taken_container  set if the victim is a user's container (store/as_owner.py); not an option for users
    heir         the uid for which root swaps; the orphan does not expire until that user has received it
    invocation   the command line, if a user typed one
    """

    retention_s: int | None = DEFAULT_RETENTION_S
    note: str = ""
    accept_differences: bool = False
    keep: tuple[str, ...] = ()
    taken_container: TakenContainer | None = None
    heir: int | None = None
    invocation: Invocation | None = None


class Staged(NamedTuple):
    """A container in stage/ with its record locked.

    replacement  the prepared replacement; None for a removal; for a sweep, the `tree` that the sweep fills
    """

    held: HeldContainer
    replacement: Fd | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.held.owned.close()


def stage(folder: UserFolder, name: bytes, record: Record) -> Staged:
    """Make a container for a record; on a full volume, use the reserve, or delete the spare file to free space.

    name    becomes part of the id
    Raises  OSError; then nothing is left behind
    """
    is_released = False
    while True:
        try:
            return stage_new(folder, name, record)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            with suppress_errno(*NO_SPACE_ERRNOS):
                staged = _stage_reserve(folder, name, record)
                if staged is not None:
                    return staged
            if is_released or not release_spare(folder, SPARE_FOR_USER):
                raise
            is_released = True


def stage_new(folder: UserFolder, name: bytes, record: Record) -> Staged:
    """Make a new container for a record, without using the reserve or the spare file."""
    kernel = folder.store.kernel
    for attempt in range(ATTEMPTS):
        container = new_id(kernel, name)
        with ExitStack() as owned:
            try:
                fd = owned.enter_context(make_container_directory(folder, State.STAGE, container))
                replacement = None
                if record.method in _NEEDS_REPLACEMENT and record.fresh is None:
                    replacement = owned.enter_context(_make_replacement(folder, fd, record.method))
                complete = _complete_record(kernel, fd, container, replacement, record)
                owned.enter_context(create_record(folder.store, fd, complete))
            except BaseException as error:
                discard_unmade(folder, State.STAGE, container)
                # Recovery may have removed the container, which had no record yet: start again.
                if isinstance(error, FileNotFoundError) and attempt < ATTEMPTS - 1:
                    continue
                raise
            return Staged(HeldContainer(folder, container, State.STAGE, fd, complete, owned.pop_all()), replacement)
    raise AssertionError("unreachable: the last attempt either returns or raises an error")


def _complete_record(kernel: Kernel, fd: Fd, container: ContainerId, replacement: Fd | None, record: Record) -> Record:
    """Fill in the fields of a new record that depend on its container.

    If the record already has `moved_ns`, because the tree was moved into the store earlier, that time is kept.
    fd  a directory in which an entry has just been made or changed, which sets its ctime
    """
    if replacement is not None and record.method is Method.SWEEP:
        record = record._replace(victim=kernel.identify(replacement))
    elif replacement is not None:
        identity = kernel.identify(replacement)
        if compare(identity, identity) is IdentityMatch.UNKNOWN:  # its filesystem has no reliable identities
            kernel.mark(replacement)
            identity = kernel.identify(replacement)
        record = record._replace(fresh=identity)
    st = kernel.fstat(fd)
    moved_ns = max(0, st.st_ctime_ns) if record.moved_ns is None else record.moved_ns
    return record._replace(id=container, superblock=superblock_in(st), moved_ns=moved_ns)


def _make_replacement(folder: UserFolder, container_fd: Fd, method: Method) -> Fd:
    kernel, name = folder.store.kernel, REPLACEMENT if method is Method.TWO_RENAME else TREE
    if folder.store.is_shared():
        new = unfinished_name()  # if the server executes the mkdir twice, nothing with the tree's name appears later
        make_unique(kernel, container_fd, new)
        kernel.rename(container_fd, new, container_fd, name)
    else:
        kernel.mkdir(container_fd, name)
    return kernel.open_dir(container_fd, name)


def discard_unmade(folder: UserFolder, state: State, container: ContainerId) -> None:
    """Remove a container that never got its record, as recovery would. Recovery may have removed it already."""
    kernel = folder.store.kernel
    with suppress(OSError), folder.open(state) as parent:
        remove_unrecorded(kernel, parent, container.encode())


def remove_unrecorded(kernel: Kernel, state: Fd, name: bytes) -> None:
    """Remove a container that has no record. Raises  OSError if it holds data: only rmdir is used for directories"""
    with kernel.open_dir(state, name) as fd:
        names = kernel.list_reopened(fd)
        for directory in (TREE, REPLACEMENT, *(name for name in names if name.startswith(UNFINISHED_PREFIX))):
            with suppress(FileNotFoundError):
                kernel.rmdir(fd, directory)
        for note in (name for name in names if name.startswith(WATCH_PREFIXES)):
            kernel.unlink(fd, note)
    kernel.rmdir(state, name)


def _stage_reserve(folder: UserFolder, name: bytes, record: Record) -> Staged | None:
    """Make a container from the reserve; return None if there is no reserve, or another command is using it."""
    kernel = folder.store.kernel
    with ExitStack() as owned:
        taken = lock_reserve(folder, owned)
        if taken is None:
            return None
        fd, spare = taken
        replacement = owned.enter_context(kernel.open_dir(fd, TREE))
        container = new_id(kernel, name)
        prepared = replacement if record.method in _NEEDS_REPLACEMENT and record.fresh is None else None
        if prepared is None:
            kernel.rmdir(fd, TREE)
        elif record.method is Method.TWO_RENAME:
            kernel.rename(fd, TREE, fd, REPLACEMENT)
        read_fs_clock_ns(kernel, fd)  # this updates the ctime: the reserve was made long ago
        record = _complete_record(kernel, fd, container, prepared, record)
        fill_record(kernel, spare, record)
        kernel.rename(fd, SPARE, fd, RECORD)
        move_to_stage(folder, container)
        return Staged(HeldContainer(folder, container, State.STAGE, fd, record, owned.pop_all()), prepared)


def make_record(
    folder: UserFolder,
    method: Method,
    origin: RelPath | None,
    victim: Identity | None,
    parent: Identity | None = None,
) -> Record:
    """Make a record, without a retention, for a tree that is about to be moved into the store.

    The caller adds optional fields, and `_complete_record` adds those that depend on the container.
    """
    kernel = folder.store.kernel
    return Record(
        id=ContainerId(""),
        volume=folder.store.volume.id,
        method=method,
        origin=origin,
        parent=parent,
        fresh=None,
        victim=victim,
        host=host_id(),
        boot=boot_id(),
        created_ns=kernel.now_ns(),
        boot_ns=kernel.boot_ns(),
        retention_s=None,
    )


def make_victim_record(folder: UserFolder, victim: Victim, method: Method, options: SwapOptions) -> Record:
    """Make a victim's record, except for the fields that depend on its container."""
    kernel, origin = folder.store.kernel, RelPath(relative_to(victim.path(), folder.store.base_path))
    parent, identity = kernel.identify(victim.parent.sides.fd), kernel.identify(victim.fd)
    return make_record(folder, method, origin, identity, parent)._replace(
        retention_s=options.retention_s if options.heir is None else None,
        note=options.note,
        lent_mode=mode_to_restore(victim.stat),
        heir=None if options.heir is None else NewOwner(options.heir, options.retention_s),
        kept=None if victim.kept_entries is None else victim.kept_entries.directories,
        moved_ns=None if options.taken_container is None else options.taken_container.born_ns,
        taken_from=None if options.taken_container is None else options.taken_container.uid,
        invocation=options.invocation,
    )


INSIDE = Name(b"inside")
"""An entry that a check on overlayfs puts into its stand-in, so that no rename can replace the stand-in."""


def stand_in(container: ContainerId) -> Name:
    """Return the name of a check's stand-in: an empty directory beside the victim, with which renames are tried."""
    return Name(NEW_PREFIX + container.rpartition("-")[2].encode())


def drop_stand_in(kernel: Kernel, parent: Fd, container: ContainerId) -> None:
    """Remove the stand-in. If this fails, an empty directory stays behind, which does no harm."""
    beside = stand_in(container)
    for name in (join_path(beside, INSIDE), beside):
        with suppress(OSError):
            kernel.rmdir(parent, name)


def restock(folder: UserFolder) -> None:
    """Refill the reserve if possible. Ignore failures, since the swap has succeeded; `trashd doctor` reports them."""
    with suppress(OSError):
        ensure_reserve(folder)
        ensure_spare_space(folder)


def identify_at(kernel: Kernel, dir_fd: Fd, name: bytes) -> Identity | None:
    """Return the identity of the entry with a name, or None if there is none."""
    try:
        with kernel.open_beneath(dir_fd, name) as fd:
            return kernel.identify(fd)
    except FileNotFoundError:
        return None
