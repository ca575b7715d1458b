"""Staging: the container with its durable record, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple, Self

from fusefs.core.container_states import DEFAULT_RETENTION_S, State
from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.names import ContainerId, RelPath
from fusefs.core.record import Invocation, Method, NewOwner, Record
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id, host_id
from fusefs.linux.mountinfo import below
from fusefs.store.backing_and_mount import FULL
from fusefs.store.container import (
    UNFINISHED_PREFIX,
    HeldContainer,
    create_record,
    fill_record,
    make_directory,
    new_id,
    superblock_in,
    touch,
    unfinished_name,
)
from fusefs.store.layout import FRESH, RECORD, TREE, WATCH_PREFIXES, UserFolder, make_unique
from fusefs.store.reserve import (
    FOR_USER,
    SPARE,
    ensure_reserve,
    ensure_spare_space,
    move_to_stage,
    take_reserve,
    with_room,
)
from fusefs.store.victim import Victim
from fusefs.store.victim_rename import loan

ATTEMPTS = 8
_NEEDS_FRESH = (Method.EXCHANGE, Method.TWO_RENAME, Method.SWEEP)

Draft = Callable[[ContainerId, Fd | None], Record]
"""Writes the record of a container with that id and that prepared directory."""


class TakenContainer(NamedTuple):
    """What root knows itself of a user's container that it takes over.

    born_ns  when it was made: its tree came later, and this can't be set
    uid      of its user; None if it is not that user's alone, so that others can have put something there
    """

    born_ns: int
    uid: int | None


class SwapOptions(NamedTuple):
    """What a person may ask of swap and rm.

    retention_s  seconds until it may be reaped; None for never unless asked
    unlike       accept a fresh directory that is not quite like the old one
    keep         globs of top entries that a swap leaves in view
    taken        not asked for: the victim is a user's container (store/as_owner.py)
    heir         uid of the user for whom root swaps: the heir's then, and kept until handed over
    invocation   the command, if a person gave one
    """

    retention_s: int | None = DEFAULT_RETENTION_S
    note: str = ""
    unlike: bool = False
    keep: tuple[str, ...] = ()
    taken: TakenContainer | None = None
    heir: int | None = None
    invocation: Invocation | None = None


class Staged(NamedTuple):
    """A container in stage/ with its record locked; `fresh` is the prepared directory, None for a removal.

    For a sweep that is its own `tree`, which things are put into.
    """

    held: HeldContainer
    fresh: Fd | None

    def __enter__(self) -> Self:
        """Own its fds for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close them, the lock with them."""
        self.held.owned.close()


def stage(folder: UserFolder, victim: Victim, method: Method, options: SwapOptions) -> Staged:
    """A container for the victim, made new or, on a full volume, from the reserve, or in place of the spare file.

    Raises  OSError; nothing is left behind then
    """
    return stage_as(folder, victim.name, method, partial(_record, folder, victim, method, options))


def stage_as(folder: UserFolder, name: bytes, method: Method, draft: Draft) -> Staged:
    """A container for whatever the record says, as `stage` makes one.

    name    goes into the id
    Raises  OSError; nothing is left behind then
    """
    return with_room(folder, FOR_USER, lambda: _stage(folder, name, method, draft))


def _stage(folder: UserFolder, name: bytes, method: Method, draft: Draft) -> Staged:
    try:
        return stage_new(folder, name, method, draft)
    except OSError as error:
        if error.errno not in FULL:
            raise
        staged = _stage_reserve(folder, name, method, draft)
        if staged is None:
            raise
        return staged


def stage_new(folder: UserFolder, name: bytes, method: Method, draft: Draft) -> Staged:
    """A container made now for whatever the record says, not from the reserve or the spare file."""
    kernel = folder.store.kernel
    for attempt in range(ATTEMPTS):
        container = new_id(kernel, name)
        with ExitStack() as owned:
            try:
                fd = owned.enter_context(make_directory(folder, State.STAGE, container))
                fresh = None
                if method in _NEEDS_FRESH:
                    fresh = owned.enter_context(_make_fresh(folder, fd, method))
                record = _told(kernel, fd, container, fresh, draft)
                owned.enter_context(create_record(folder.store, fd, record))
            except BaseException as error:
                discard_unmade(folder, State.STAGE, container)
                # Recovery may sweep away a container that has no record yet: its maker starts again.
                if isinstance(error, FileNotFoundError) and attempt < ATTEMPTS - 1:
                    continue
                raise
            return Staged(HeldContainer(folder, container, State.STAGE, fd, record, owned.pop_all()), fresh)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _told(kernel: Kernel, fd: Fd, container: ContainerId, fresh: Fd | None, draft: Draft) -> Record:
    """A first record, with what the container itself tells: its superblock, and the time before anything came.

    Of a tree that came into the store before the draft tells when: that counts.
    fd  in which something was just made or changed
    """
    record = draft(container, fresh)
    st = kernel.fstat(fd)
    moved_ns = max(0, st.st_ctime_ns) if record.moved_ns is None else record.moved_ns
    return record._replace(superblock=superblock_in(st), moved_ns=moved_ns)


def _make_fresh(folder: UserFolder, container_fd: Fd, method: Method) -> Fd:
    kernel, name = folder.store.kernel, FRESH if method is Method.TWO_RENAME else TREE
    if folder.store.is_shared():
        new = unfinished_name()  # a mkdir that comes a second time makes nothing that has the name of the tree
        make_unique(kernel, container_fd, new)
        kernel.rename(container_fd, new, container_fd, name)
    else:
        kernel.mkdir(container_fd, name)
    return kernel.open_dir(container_fd, name)


def discard_unmade(folder: UserFolder, state: State, container: ContainerId) -> None:
    """Remove what there is of a container that never got its record, as recovery would; it may have done so."""
    kernel = folder.store.kernel
    with suppress(OSError), folder.open(state) as parent:
        unmake(kernel, parent, container.encode())


def unmake(kernel: Kernel, state: Fd, name: bytes) -> None:
    """Remove a container without a record: by rmdir alone, which refuses if it holds anything.

    Raises  OSError if it does
    """
    with kernel.open_dir(state, name) as fd:
        names = kernel.list_anew(fd)
        for directory in (TREE, FRESH, *(name for name in names if name.startswith(UNFINISHED_PREFIX))):
            with suppress(FileNotFoundError):
                kernel.rmdir(fd, directory)
        for note in (name for name in names if name.startswith(WATCH_PREFIXES)):
            kernel.unlink(fd, note)
    kernel.rmdir(state, name)


def _stage_reserve(folder: UserFolder, name: bytes, method: Method, draft: Draft) -> Staged | None:
    """A container made of the reserve, or None if there is none or another command has it."""
    kernel = folder.store.kernel
    with ExitStack() as owned:
        taken = take_reserve(folder, owned)
        if taken is None:
            return None
        fd, spare = taken
        fresh = owned.enter_context(kernel.open_dir(fd, TREE))
        container = new_id(kernel, name)
        prepared = fresh if method in _NEEDS_FRESH else None
        if method is Method.TWO_RENAME:
            kernel.rename(fd, TREE, fd, FRESH)
        elif prepared is None:
            kernel.rmdir(fd, TREE)
        touch(kernel, fd)  # it was made long ago
        record = _told(kernel, fd, container, prepared, draft)
        fill_record(kernel, spare, record)
        kernel.rename(fd, SPARE, fd, RECORD)
        move_to_stage(folder, container)
        return Staged(HeldContainer(folder, container, State.STAGE, fd, record, owned.pop_all()), prepared)


def record_now(
    folder: UserFolder,
    container: ContainerId,
    method: Method,
    origin: RelPath | None,
    victim: Identity | None,
    parent: Identity | None = None,
) -> Record:
    """A record of what is taken at this moment, kept until asked for; what only some records say is to be added."""
    kernel = folder.store.kernel
    return Record(
        id=container,
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


def _record(
    folder: UserFolder,
    victim: Victim,
    method: Method,
    options: SwapOptions,
    container: ContainerId,
    fresh: Fd | None,
) -> Record:
    kernel, origin = folder.store.kernel, RelPath(below(victim.path(), folder.store.base_path))
    parent, identity = kernel.identify(victim.parent.sides.fd), kernel.identify(victim.fd)
    return record_now(folder, container, method, origin, identity, parent)._replace(
        fresh=None if fresh is None else _known(kernel, fresh),
        retention_s=options.retention_s if options.heir is None else None,
        note=options.note,
        lent_mode=loan(victim.stat),
        heir=None if options.heir is None else NewOwner(options.heir, options.retention_s),
        kept=None if victim.staying is None else victim.staying.directories,
        moved_ns=None if options.taken is None else options.taken.born_ns,
        taken_from=None if options.taken is None else options.taken.uid,
        invocation=options.invocation,
    )


def _known(kernel: Kernel, fresh: Fd) -> Identity:
    """The identity of a fresh directory, which is marked if its filesystem gives it none that proves anything."""
    identity = kernel.identify(fresh)
    if compare(identity, identity) is Likelihood.UNKNOWN:
        kernel.mark(fresh)
        identity = kernel.identify(fresh)
    return identity


def restock(folder: UserFolder) -> None:
    """Fill the reserve up again if it can be had; a failure shows in `trashd doctor`, not in a swap that worked."""
    with suppress(OSError):
        ensure_reserve(folder)
        ensure_spare_space(folder)


def identify_at(kernel: Kernel, dir_fd: Fd, name: bytes) -> Identity | None:
    """The identity of what a name means; None if nothing has it."""
    try:
        with kernel.open_beneath(dir_fd, name) as fd:
            return kernel.identify(fd)
    except FileNotFoundError:
        return None
