"""Stores within a directory that is to go: what they hold would be carried away with it, and deleted.

What a store holds counts if no other user can have put it there: the store is one of certain owners, as is what it
holds, and none but these can have written there. Where that can't be seen for want of permission, something is there.

No tree is walked to find one. Pointers in upper stores name lower ones, the caller's own or, for root, all users'; the
caller's registry names those in use. What they say leads to a look, and to nothing else, so that a false one is
worth nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from itertools import chain, islice
from typing import NamedTuple

from fusefs.core.lifecycle import State
from fusefs.core.names import STORE, Name, RelPath, is_container_id, join, whose, whose_store
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.store.backing_and_mount import ABSENT, DIRECTORY, FILE_TO_READ, OUT_OF_REACH, READABLE, suppress_errno
from fusefs.store.layout import (
    DROP,
    FOLDER_MODE,
    NEW,
    OLD,
    POINTERS,
    USERS,
    VOLUME,
    VOLUME_MAX_BYTES,
    own_names,
    volume_fields,
)
from fusefs.store.registry_lines import registered
from fusefs.store.user_folders import plain_name

_AREAS = (USERS, NEW)
"""Where users' folders are."""
_MOST_FOLDERS, _MOST_ASKED = 2000, 100
"""Users whose pointers root looks for, and those of them who have any and are asked: the remover stops at the rest."""
_MOST_LOOKED_AT = 200
"""Stores: a user who notes thousands delays no other for long."""
_Noted = tuple[int, RelPath]
"""The user who noted a store, and the directory that holds it, relative to the one that was asked about."""


class Thing(NamedTuple):
    """Something that a store holds.

    uid    of its owner
    folder that user's folder, relative to the store
    state  of the container; None for what lies in `drop/`, or could not be looked at
    name   in the directory of that; empty for what could not be looked at
    """

    uid: int
    folder: RelPath
    state: State | None
    name: bytes

    def way(self) -> RelPath:
        """Its path, relative to the store."""
        return join(self.folder, b"" if self.state is None else self.state.value.encode(), self.name)


def things_in(kernel: Kernel, dir_fd: int, way: bytes, owners: Collection[int]) -> Iterator[Thing]:
    """What the store at a path beneath a directory holds, each when it is asked for; nothing if it is no such store.

    owners  owners that the store may have; in one of root's all things count for root, their own for a user, and in a
            user's own that user's alone, or all where the store has a user's name
    Raises  OSError that says nothing of it, such as EMFILE
    """
    try:
        store = kernel.open_beneath(dir_fd, way, READABLE)
    except OSError as error:
        if error.errno not in OUT_OF_REACH:
            raise
        return
    with store:
        whom = whose_store(os.path.basename(way))
        owner = _owner_of(kernel, store, owners)
        if owner is None or (whom is not None and stat.S_IMODE(kernel.fstat(store).st_mode) != FOLDER_MODE):
            return
        for area in _areas(kernel, store):
            for folder in _list_at(kernel, store, area) or ():
                uid = whose(folder)
                if uid is not None and whom is not None:
                    yield from _things_of(kernel, store, (owner, owner), join(area, folder))
                elif uid is not None and (uid == owner or (owner == 0 and os.geteuid() in (0, uid))):
                    yield from _things_of(kernel, store, (uid, owner), join(area, folder))


def _areas(kernel: Kernel, store: Fd) -> Iterator[RelPath]:
    """Where users' folders are in a store, and in those that were set aside in it."""
    old = [Name(name) for name in _list_at(kernel, store, b".") or () if name.startswith(OLD)]
    for above in ((), *((one,) for one in old)):
        yield from (join(*above, area) for area in _AREAS)


def _owner_of(kernel: Kernel, store: Fd, owners: Collection[int]) -> int | None:
    """The owner of a store, an open directory; None if it is none, or another one's, or others can write to it.

    Looked at before anything is opened: another user's lease on a file, or a FIFO, would hold us or fail us.
    """
    st = kernel.fstat(store)
    with suppress_errno(*OUT_OF_REACH):
        told = kernel.stat(store, VOLUME)
        is_theirs = {st.st_uid, told.st_uid} <= set(owners)
        if not is_theirs or not stat.S_ISREG(told.st_mode) or (st.st_mode | told.st_mode) & OTHERS_WRITE:
            return None
        with kernel.open_beneath(store, VOLUME, FILE_TO_READ) as file:
            return st.st_uid if volume_fields(kernel.read(file, VOLUME_MAX_BYTES)) else None
    return None


def _things_of(kernel: Kernel, store: Fd, owners: tuple[int, int], folder: RelPath) -> Iterator[Thing]:
    """What is in the folder of a user, if it is a directory in which no other user can write.

    owners  the user, and the store's: of a copy all may be the latter's
    """
    uid = owners[0]
    try:
        st = kernel.stat(store, folder)
    except OSError as error:
        if error.errno not in OUT_OF_REACH:
            raise
        return
    if not stat.S_ISDIR(st.st_mode) or st.st_uid not in owners or st.st_mode & OTHERS_WRITE:
        return
    for state in (*State, None):
        names = _list_at(kernel, store, join(folder, DROP if state is None else state.value.encode()))
        if names is None:
            yield Thing(uid, folder, None, b"")
            return
        for name in names:
            if state is None or is_container_id(name.decode("ascii", "replace")):
                yield Thing(uid, folder if state else join(folder, DROP), state, name)


def _list_at(kernel: Kernel, dir_fd: int, way: bytes) -> list[bytes] | None:
    """The names in a directory; none if it is none; None if we may not see them."""
    try:
        with kernel.open_dir(dir_fd, way) as fd:
            return kernel.list(fd)
    except OSError as error:
        if error.errno == errno.EACCES:
            return None
        if error.errno not in ABSENT:
            raise
        return []


def stores_below(kernel: Kernel, root_fd: Fd, root_path: bytes, directory: RelPath) -> Iterator[RelPath]:
    """Directories below a directory that hold a store which holds something: relative to it, one at a time.

    root_fd    the highest directory that is looked at (O_PATH); upper stores lie there, or on the way down
    root_path  of that, for people
    directory  relative to that; a store in itself is not told
    Raises     OSError
    """
    told = set()
    noted = chain(_registered(root_fd, root_path, directory), _pointed(kernel, root_fd, directory))
    for uid, lower in islice(noted, _MOST_LOOKED_AT):
        if lower in told:
            continue
        way, names = join(directory, lower), [STORE]
        with suppress_errno(*OUT_OF_REACH), kernel.open_beneath(root_fd, way, DIRECTORY) as base:
            names += own_names(kernel, base, uid)
        ways = (join(way, name) for name in names)
        if any(next(things_in(kernel, root_fd, one, {0, os.geteuid(), uid}), None) is not None for one in ways):
            told.add(lower)
            yield lower


def _registered(root_fd: Fd, root_path: bytes, directory: RelPath) -> Iterator[_Noted]:
    """What the caller's registry has, by the path there is without a mount of ours, or by that of one over itself."""
    lines = registered()
    if lines:
        with suppress(OSError):  # it has no path that could be told
            for root in dict.fromkeys((os.readlink(root_fd.path()), root_path)):
                top = os.path.join(root, directory).rstrip(b"/") + b"/"
                for line in lines:
                    if line.path.startswith(top):
                        yield os.geteuid(), RelPath(line.path[len(top) :])


def _pointed(kernel: Kernel, root_fd: Fd, directory: RelPath) -> Iterator[_Noted]:
    """What the pointers of the stores above say of stores below; each directory is opened from the one above it."""
    names = directory.split(b"/") if directory else []
    rest = directory + b"/"
    with ExitStack() as owned:
        here = root_fd
        for name in names:
            for uid, lower in _pointed_from(kernel, here):
                if lower.startswith(rest):
                    yield uid, RelPath(lower[len(rest) :])
            rest = rest[len(name) + 1 :]
            if not rest:
                return
            try:
                following = kernel.open_beneath(here, name, DIRECTORY)
            except OSError as error:
                if error.errno not in OUT_OF_REACH:
                    raise
                return  # it was moved
            owned.close()
            here = owned.enter_context(following)


def _pointed_from(kernel: Kernel, base_fd: Fd) -> Iterator[_Noted]:
    """What those of the stores in one directory say: of root's, and of the caller's own."""
    names = [STORE]
    with suppress_errno(*OUT_OF_REACH):
        names += own_names(kernel, base_fd, os.geteuid())
    for name in names:
        yield from _pointed_from_store(kernel, base_fd, name)


def _pointed_from_store(kernel: Kernel, base_fd: Fd, name: Name) -> Iterator[_Noted]:
    try:
        store = kernel.open_beneath(base_fd, name, DIRECTORY)
    except OSError as error:
        if error.errno not in OUT_OF_REACH:
            raise
        return
    with store:
        n_asked = 0
        for uid, folder in islice(_folders(kernel, store), _MOST_FOLDERS):
            with suppress_errno(*OUT_OF_REACH), kernel.open_dir(store, join(folder, POINTERS)) as pointers:
                if kernel.is_empty(pointers):
                    continue
                n_asked += 1
                if n_asked > _MOST_ASKED:
                    return
                from fusefs.store.pointers import read_pointers  # hardly any user has one

                for lower in read_pointers(kernel, pointers, uid):
                    yield uid, lower


def _folders(kernel: Kernel, store: Fd) -> Iterator[tuple[int, RelPath]]:
    """The caller's folders in a store by their names alone; for root every user's."""
    uid = os.geteuid()
    for area in _AREAS:
        if uid != 0:
            yield uid, join(area, plain_name(uid))
            continue
        for name in _list_at(kernel, store, area) or ():
            owner = whose(name)
            if owner is not None:
                yield owner, join(area, name)
