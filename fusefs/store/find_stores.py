"""Finding stores: all those that a command is about, and those inside a directory that is to go.

What an inner store holds counts if no other user can have put it there: the store is one of certain owners, as is what
it holds, and none but these can have written there. Where that can't be seen for want of permission, something is
there.

No tree is walked to find one. Pointers in upper stores name lower ones, the caller's own or, for root, all users'; the
caller's registry names those in use. What they say leads to a check, and to nothing else, so that a false one is
worth nothing.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from fusefs.core.container_states import State
from fusefs.core.errors import BrokenStore, NoBacking, NotPermitted, TrashdError, Untrusted
from fusefs.core.names import STORE, Name, RelPath, is_container_id, join, whose, whose_store
from fusefs.core.printable_names import printable
from fusefs.linux.children import ask_each
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.mountinfo import Mount, covering, read_mounts
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
    Store,
    UserFolder,
    names_of_users,
    open_store,
    own_names,
    trusted_owners,
    volume_fields,
)
from fusefs.store.mounted_paths import open_shown
from fusefs.store.pointers import lower_stores
from fusefs.store.registry_lines import registered
from fusefs.store.standing import FolderCensus, all_users, named_users, open_user, plain_name, why_not
from fusefs.store.store_registry import LineOf, RegistryTarget, follow, open_registered, stores_of_users

_NO_VOLUMES = frozenset(
    b"proc sysfs cgroup cgroup2 devpts devtmpfs securityfs debugfs tracefs pstore bpf mqueue hugetlbfs autofs "
    b"binfmt_misc configfs fusectl rpc_pipefs nsfs squashfs erofs iso9660".split()
)
_FOUND = b"found"
_BELIEVED_S = 1.0
"""For how long what was found at all places is believed: a command discovers stores several times in that."""
Place = TypeVar("Place")


def discover(kernel: Kernel, paths: Iterable[bytes] = (), silent: list[bytes] | None = None) -> Iterator[Store]:
    """The stores that matter for some paths, or all that are known; the caller closes each.

    They are trusted ones; root gets users' own as well, each for its owner alone.
    paths   each stands for the store in it or else for the nearest above it on what it is on, and for no more: what is
            deleted in there was named; without any: those at every mount point, those above the working directory,
            and those that a registry names: the caller's, and for root all users'
    silent  gets the mount points that don't answer, and are passed over; paths that are named are waited for
    Raises  NoBacking if one of the paths is in a mount of ours whose backing tree we can't use; Untrusted if what is
            called like a store at one of them can't be used; BrokenStore, of any that matters, after all others
    """
    seen: set[tuple[int, int]] = set()
    asked = [os.path.realpath(path) for path in paths]
    for store in _named(kernel, asked) if asked else _everywhere(kernel, [] if silent is None else silent):
        with ExitStack() as owned:
            owned.enter_context(store)
            try:
                st = kernel.fstat(store.fd)
            except OSError:
                continue  # of a server that took it away
            if (st.st_dev, st.st_ino) in seen:
                continue
            owned.pop_all()
        seen.add((st.st_dev, st.st_ino))
        yield store


def _named(kernel: Kernel, asked: list[bytes]) -> Iterator[Store]:
    mounts = read_mounts()
    broken: list[BrokenStore] = []
    yield from _unbroken(lambda path: _nearest(kernel, path, mounts), dict.fromkeys(asked), broken)
    if broken:
        raise broken[0]


def _unbroken(
    opened: Callable[[Place], Iterator[Store]], places: Iterable[Place], broken: list[BrokenStore]
) -> Iterator[Store]:
    """The stores at some places, each had by `opened`; what is wrong with the others is kept for later."""
    for place in places:
        try:
            yield from opened(place)
        except BrokenStore as error:
            broken.append(error)


def _nearest(kernel: Kernel, path: bytes, mounts: list[Mount]) -> Iterator[Store]:
    """The stores in a directory, or in the nearest above it on the same mount that has any: what is renamed there
    leaves no mount.
    """
    mount = covering(path, mounts)
    for above in _upwards(path):
        if covering(above, mounts) != mount:
            return
        n_there = 0
        try:
            for store in stores_at(kernel, above, mounts):
                n_there += 1
                yield store
        except BrokenStore:
            raise
        except (NoBacking, Untrusted):
            if above == path:
                raise
        except (OSError, TrashdError):
            pass  # nothing there for us; `trashd doctor PATH` says why
        if n_there:
            return


def _everywhere(kernel: Kernel, silent: list[bytes]) -> Iterator[Store]:
    mounts = read_mounts()
    users: set[int] = set()
    broken: list[BrokenStore] = []
    for store in _unbroken(partial(_open_place, kernel, mounts), _places(kernel, mounts, users, silent), broken):
        if store.is_roots_to_keep():
            with suppress(OSError):  # it is gone by now
                users.update(named_users(store))
        yield store
    if broken:
        raise broken[0]


class _Discovered(NamedTuple):
    """What is at all places, found out by children.

    for_whom  the effective uid, and the mounts
    until_s   of time.monotonic
    """

    for_whom: tuple[int, list[Mount]]
    until_s: float
    places: list[bytes | LineOf]
    silent: list[bytes]


def _places(kernel: Kernel, mounts: list[Mount], users: set[int], silent: list[bytes]) -> Iterator[bytes | LineOf]:
    """Where there is a store. users: read when the mounts are through; their registries name other places"""
    for_whom, last = (os.geteuid(), mounts), kernel.discovered
    if isinstance(last, _Discovered) and last.for_whom == for_whom and time.monotonic() < last.until_s:
        silent += last.silent
        yield from last.places
        return
    places: list[bytes | LineOf] = []
    n_silent = len(silent)
    every: Iterator[bytes | LineOf] = chain(_answering(kernel, mounts, silent), _words(kernel, mounts, users))
    for place in every:
        places.append(place)
        yield place
    kernel.discovered = _Discovered(for_whom, time.monotonic() + _BELIEVED_S, places, silent[n_silent:])


def _open_place(kernel: Kernel, mounts: list[Mount], place: bytes | LineOf) -> Iterator[Store]:
    """Raises  BrokenStore"""
    if isinstance(place, LineOf):
        registered_one = open_registered(kernel, place, mounts)
        if registered_one is not None:
            yield registered_one
        return
    try:
        yield from stores_at(kernel, place, mounts)
    except BrokenStore:
        with suppress(OSError):
            # A user must not keep root's commands from being content.
            if os.lstat(os.path.join(place, STORE)).st_uid not in trusted_owners(os.geteuid()):
                return
        raise
    except (OSError, TrashdError):
        pass  # it is gone by now


def _answering(kernel: Kernel, mounts: list[Mount], silent: list[bytes]) -> Iterator[bytes]:
    """The mount points with a store, and the directories above us; a child looks, as a dead one blocks."""

    def ask(path: bytes) -> bytes:
        try:
            return _FOUND if next(stores_at(kernel, path, mounts), None) is not None else b""
        except BrokenStore:
            return _FOUND
        except (OSError, TrashdError):
            return b""

    paths = mount_points(mounts)
    with suppress(FileNotFoundError):  # where we are was removed
        paths = list(dict.fromkeys([*paths, *_upwards(os.getcwdb())]))
    for path, answer in ask_each(paths, ask, kernel.silent, lambda path: covering(path, mounts)):
        if answer is None:
            silent.append(path)
        elif answer == _FOUND:
            yield path


def _words(kernel: Kernel, mounts: list[Mount], users: Iterable[int]) -> Iterator[LineOf]:
    """What registries name."""
    own = [LineOf(os.geteuid(), line) for line in registered()]
    yield from (word for word, lead in follow(kernel, own, mounts) if lead is RegistryTarget.THERE)
    if os.geteuid() == 0:
        yield from stores_of_users(kernel, mounts, users)


def stores_at(kernel: Kernel, path: bytes, mounts: list[Mount]) -> Iterator[Store]:
    """The stores in a directory: root's, the caller's own, and for root all users'; the caller closes each.

    Raises  OSError; NoBacking; BrokenStore, of another user's only after all others; Untrusted if none but untrusted
            ones is there
    """
    uid, n_there = os.geteuid(), 0
    wrong: list[Untrusted | BrokenStore] = []
    with open_shown(kernel, path, mounts) as shown:
        own = names_of_users(kernel, shown.fd) if uid == 0 else own_names(kernel, shown.fd, uid)
        names = [STORE, *own]
    for name in names:
        try:
            store = open_at(kernel, path, mounts, name)
        except (Untrusted, BrokenStore) as error:
            if name == STORE or (isinstance(error, BrokenStore) and whose_store(name) == uid):
                wrong.append(error)  # a user must not keep root's commands from being content
            continue
        if store is not None:
            n_there += 1
            yield store
    for one in wrong:
        if isinstance(one, BrokenStore) or not n_there:
            raise one


def open_at(kernel: Kernel, path: bytes, mounts: list[Mount], name: Name = STORE) -> Store | None:
    """A store by its name in a directory; None if there is none. Root opens a user's own one for that user alone.

    Raises  OSError; Untrusted; NoBacking; BrokenStore
    """
    shown = open_shown(kernel, path, mounts)
    try:
        return open_store(kernel, shown, path, name)
    except Untrusted:
        if os.geteuid() != 0:
            raise
    with closed_on_error(open_shown(kernel, path, mounts)) as shown:
        owner = kernel.stat(shown.fd, name).st_uid  # it may be gone by now
    return open_store(kernel, shown, path, name, of=owner or None)


def mount_points(mounts: Iterable[Mount]) -> list[bytes]:
    """Where there may be a store; mounts of ours first, so that a store has the path by which people know it.

    What another user has mounted is no place for one: its daemon could show anything, or hang.
    """
    owners = trusted_owners(os.geteuid())
    volumes = [mount for mount in mounts if mount.fstype not in _NO_VOLUMES and mount.owner in owners]
    return list(dict.fromkeys(mount.point for mount in sorted(volumes, key=lambda mount: not mount.is_ours())))


def _upwards(path: bytes) -> Iterator[bytes]:
    yield path
    while path != b"/":
        path = os.path.dirname(path)
        yield path


def folders(store: Store, census: FolderCensus | None = None) -> Iterator[UserFolder]:
    """The users' folders of a store that concern the caller: root sees all; the caller closes each.

    A user's own store serves that user alone.
    census  gets what is refused, and what could not be read
    """
    yield from all_users(store, census or FolderCensus({}, [], []), os.geteuid() or store.owner or None)


def with_lower(folder: UserFolder) -> Iterator[UserFolder]:
    """A user's folder, and those in the stores that its pointers lead to; to be run as that user.

    The first is the caller's to close; the others are closed when the next one is asked for.
    Raises  NotPermitted if it is not as only that user can have made it, which its opener may not have seen
    """
    kernel = folder.store.kernel
    if why := why_not(kernel, folder.fd, kernel.fstat(folder.fd), folder.uid, kernel.fstat(folder.store.fd).st_dev):
        raise NotPermitted(f"{printable(folder.path())}: {why}", "look into it; nothing in it was touched")
    yield folder
    for store in lower_stores(folder):
        with store:
            lower = open_user(store.judged(), folder.uid)
            if lower is not None:
                with lower:
                    yield lower


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
