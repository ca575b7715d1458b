"""Stores that root set aside when taking a volume over: each owner takes their own folder out, by their own right.

Which user moved what into such a store, or the whole, can't be told any more. So root takes nothing from there:
it lies in the new store, where no user can move it, and its users' next commands empty it. What they take is kept
until they ask for its end by name: that it lay there is no word of theirs, and none but they may act on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from fusefs.core.container_states import State
from fusefs.core.errors import BadRecord, TrashdError
from fusefs.core.names import ContainerId, Name, is_container_id, join
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import DIRECTORY, FULL, READABLE, suppress_errno
from fusefs.store.container import ClaimLost, HeldContainer, hold, rewrite
from fusefs.store.layout import (
    CACHEDIR_TAG,
    DROP,
    FOLDERS,
    LOCK,
    NEW,
    NODES,
    OLD,
    REAPER_LOCK,
    REGISTRY,
    RESERVE,
    USERS,
    VOLUME,
    Store,
    UserFolder,
    open_areas,
)
from fusefs.store.make_folder import discard_folder, make_user
from fusefs.store.recover import take_in
from fusefs.store.reserve import FOR_USER, with_room
from fusefs.store.standing import Standing, names_in, open_user

WAITS = "it waits for its owner's next command"
STAYS = "root's name in it proves nothing: whoever made that store could put it there"
_NOTE = "from a store that root set aside"
_BECOMES = {Name(State.REAPING.value.encode()): Name(State.QUARANTINE.value.encode())}
"""What a reaper had begun: in `reaping/` the next one would go on with it."""
_STATES = frozenset(state.value.encode() for state in State)


def old_stores(store: Store) -> list[Name]:
    """What was set aside in a store. Raises  OSError"""
    return [Name(name) for name in store.kernel.list_anew(store.fd) if name.startswith(OLD)]


def waiting(store: Store, only: int | None = None) -> list[Standing]:
    """The folders that wait there for their owners, of all users or of one. Raises  OSError"""
    kernel, told = store.kernel, []
    for old in old_stores(store):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError), ExitStack() as owned:
            fd = owned.enter_context(kernel.open_beneath(store.fd, old, READABLE))
            areas = owned.enter_context(open_areas(kernel, fd))
            for area, area_fd in areas.all():
                for uid, names in names_in(kernel, area_fd).items():
                    if only not in (None, uid):
                        continue
                    why = WAITS if uid else STAYS
                    told += [Standing(Name(join(old, area)), name, uid, None, why) for name in names]
    return told


def take_own(store: Store) -> None:
    """Move what the caller has in old stores into their folder of this one, by their own right, container by container.

    What a process works on at this moment is left for the next time.
    Raises  OSError
    """
    uid = os.geteuid()
    olds = old_stores(store) if uid else []
    if not olds:
        return
    from fusefs.store.make_store import remove_folder  # hardly a store has any

    for old in olds:
        with _own_in(store, old, uid) as found:
            if found is not None:
                with open_user(store, uid) or make_user(store) as folder:
                    for part in FOLDERS:
                        if part != RESERVE:
                            _move(found, part, folder)
                with suppress(PermissionError):  # of root's: root removes it when it is empty
                    remove_folder(found, found.store.fd)


@contextmanager
def _own_in(store: Store, old: Name, uid: int) -> Iterator[UserFolder | None]:
    """A user's folder in an old store that only that user and root could change; None if there is none."""
    kernel = store.kernel
    with ExitStack() as owned:
        found = None
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            fd = owned.enter_context(kernel.open_beneath(store.fd, old, READABLE))
            areas = owned.enter_context(open_areas(kernel, fd))
            owners = {kernel.fstat(one).st_uid for one in (fd, *(area for _name, area in areas.all()))}
            if owners <= {0, uid}:
                found = open_user(store._replace(areas=areas), uid)
        if found is None:
            yield None
            return
        owned.enter_context(found.fd)
        inner = store._replace(fd=dict(areas.all())[found.area])  # what is opened by it goes no further than the folder
        yield UserFolder(inner, uid, Name(join(old, found.area)), found.name, found.fd, is_proven=False)


def _move(old: UserFolder, part: Name, folder: UserFolder) -> None:
    """Move what is in one part of a folder to the same part of another one of its user's; what was due is not."""
    kernel = folder.store.kernel
    for name in old.list(part):
        with ExitStack() as owned, suppress(FileNotFoundError, FileExistsError):
            if is_container_id(text := name.decode("ascii", "replace")) and part in _STATES:
                with suppress(BadRecord):
                    held = hold(old, State(part.decode()), ContainerId(text))
                    if held is ClaimLost.BUSY:
                        continue
                    if not isinstance(held, ClaimLost):
                        owned.enter_context(held)
                        if not _keep(held, folder):
                            continue
            source = owned.enter_context(kernel.open_dir(old.fd, part))
            if part == DROP:
                with suppress(OSError, TrashdError):  # it stays, and is told
                    take_in(folder, source, Name(name), origin=None, retention_s=None, note=_NOTE)
            else:
                place = owned.enter_context(folder.open(_BECOMES.get(part, part)))
                kernel.rename_free(source, name, place, name)


def _keep(held: HeldContainer, folder: UserFolder) -> bool:
    """Have a container of an old store kept until it is asked for; whether there was room to note that.

    folder  where it goes
    """
    is_begun = held.record.partial or held.state is State.REAPING
    record = held.record._replace(retention_s=None, partial=is_begun)
    with suppress_errno(*FULL):
        if record != held.record:
            with_room(folder, FOR_USER, partial(rewrite, held, record))
        return True
    return False


def discard_emptied(store: Store) -> None:
    """Remove from a store of root's the old ones in which no user has anything left, as far as it is ours; needs root.

    On one that is read-only that is done later.
    Raises  OSError
    """
    if not store.is_roots_to_keep() or store.is_unknown() or store.kernel.is_read_only(store.fd):
        return
    kernel, olds = store.kernel, old_stores(store)
    if not olds:
        return
    from fusefs.core.node_beats import is_beat_name  # hardly a store has any

    for old in olds:
        with suppress(OSError), kernel.open_dir(store.fd, old) as fd:
            for area in (USERS, NEW):
                with suppress(FileNotFoundError):
                    _discard_folders(kernel, fd, area)
                    kernel.rmdir(fd, area)
            with suppress(FileNotFoundError), kernel.open_dir(fd, REGISTRY) as registry:
                for name in kernel.list(registry):
                    kernel.unlink(registry, name)
            with suppress(FileNotFoundError), kernel.open_dir(fd, NODES) as nodes:
                for name in filter(is_beat_name, kernel.list(nodes)):
                    kernel.unlink(nodes, name)
            for directory in (REGISTRY, NODES):
                with suppress(FileNotFoundError):
                    kernel.rmdir(fd, directory)
            for file in (VOLUME, CACHEDIR_TAG, LOCK, REAPER_LOCK):
                with suppress(FileNotFoundError):
                    kernel.unlink(fd, file)
            kernel.rmdir(store.fd, old)


def _discard_folders(kernel: Kernel, store_fd: Fd, area: Name) -> None:
    """Remove the users' folders in an area of an old store that are empty, by rmdir alone. Raises  OSError"""
    with kernel.open_dir(store_fd, area) as area_fd:
        for name in (name for names in names_in(kernel, area_fd).values() for name in names):
            with suppress(OSError), kernel.open_beneath(area_fd, name, DIRECTORY) as fd:
                discard_folder(kernel, area_fd, name, fd)
