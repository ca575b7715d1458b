"""Finds the stores and users' folders for commands that don't concern a single path."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain
from typing import NamedTuple

from fusefs.core.errors import BrokenStore, NoBacking, NotPermitted, TrashdError, Untrusted
from fusefs.core.names import STORE, Name, parse_user_store_name
from fusefs.core.printable_names import printable
from fusefs.linux.children import ask_each
from fusefs.linux.fd import close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, covering_mount_id, read_mounts
from fusefs.store.layout import (
    Store,
    UserFolder,
    list_users_stores,
    open_store,
    own_store_names,
    trusted_owners,
)
from fusefs.store.mounted_paths import open_both_sides
from fusefs.store.registry_lines import read_own_lines
from fusefs.store.store_registry import RegistryTarget, UserLine, find_targets, open_registered, stores_of_users
from fusefs.store.user_folders import (
    FolderCensus,
    all_users,
    explain_not_folder,
    lower_stores,
    named_users,
    open_user_folder,
)

_FSTYPES_WITHOUT_STORES = frozenset(
    b"proc sysfs cgroup cgroup2 devpts devtmpfs securityfs debugfs tracefs pstore bpf mqueue hugetlbfs autofs "
    b"binfmt_misc configfs fusectl rpc_pipefs nsfs squashfs erofs iso9660".split()
)


_HAS_STORE = b"found"


_CACHED_S = 1.0
"""How long the result of a search everywhere is reused: one command needs the result several times."""


def discover_stores(kernel: Kernel, paths: Iterable[bytes] = (), silent: list[bytes] | None = None) -> Iterator[Store]:
    """Open the stores for some paths, or all known stores; the caller closes each.

    Only trusted stores are opened. For root, users' own stores are included, each opened for its owner only.
    paths   each path stands for the stores in it or, if it has none, for the nearest stores above it on the same mount.
            No other stores are opened, because users must name what is deleted. Without paths: the stores at every
            mount point, above the working directory, and in registries (the caller's, and for root all users')
    silent  gets the mount points that do not respond and are skipped; mount points in `paths` are waited for
    Raises  NoBacking if a path is in one of our mounts whose backing tree we can't use; Untrusted if an entry at a path
            looks like a store but can't be used; BrokenStore, after all other stores, if a store is broken
    """
    seen_inodes: set[tuple[int, int]] = set()
    requested_paths = [os.path.realpath(path) for path in paths]
    for store in (
        _stores_at_paths(kernel, requested_paths)
        if requested_paths
        else _stores_everywhere(kernel, [] if silent is None else silent)
    ):
        with ExitStack() as owned:
            owned.enter_context(store)
            try:
                st = kernel.fstat(store.fd)
            except OSError:
                continue  # it was removed on the server
            if (st.st_dev, st.st_ino) in seen_inodes:
                continue
            owned.pop_all()
        seen_inodes.add((st.st_dev, st.st_ino))
        yield store


def _stores_at_paths(kernel: Kernel, requested_paths: list[bytes]) -> Iterator[Store]:
    mounts = read_mounts()
    broken: list[BrokenStore] = []
    for path in dict.fromkeys(requested_paths):
        try:
            yield from _nearest_stores(kernel, path, mounts)
        except BrokenStore as error:
            broken.append(error)
    if broken:
        raise broken[0]


def _nearest_stores(kernel: Kernel, path: bytes, mounts: list[Mount]) -> Iterator[Store]:
    """Open the stores in a directory, or in the nearest one above it on its mount, as renames can't leave a mount."""
    mount = covering_mount_id(path, mounts)
    for above in _upwards(path):
        if covering_mount_id(above, mounts) != mount:
            return
        n_stores = 0
        try:
            for store in stores_at(kernel, above, mounts):
                n_stores += 1
                yield store
        except BrokenStore:
            raise
        except (NoBacking, Untrusted):
            if above == path:
                raise
        except (OSError, TrashdError):
            pass  # there is no store that we can use; `trashd doctor PATH` reports why
        if n_stores:
            return


def _stores_everywhere(kernel: Kernel, silent: list[bytes]) -> Iterator[Store]:
    mounts = read_mounts()
    users: set[int] = set()
    broken: list[BrokenStore] = []
    for place in _find_places(kernel, mounts, users, silent):
        try:
            for store in _open_place(kernel, mounts, place):
                if store.is_ours_as_root():
                    with suppress(OSError):  # it is gone by now
                        users.update(named_users(store))
                yield store
        except BrokenStore as error:
            broken.append(error)
    if broken:
        raise broken[0]


class _Discovered(NamedTuple):
    """All places with stores, as found by child processes.

    for_whom  the effective UID and the mounts for which the result is valid
    until_s   the time (time.monotonic) until which the result is valid
    """

    for_whom: tuple[int, list[Mount]]
    until_s: float
    places: list[bytes | UserLine]
    silent: list[bytes]


def _find_places(
    kernel: Kernel, mounts: list[Mount], users: set[int], silent: list[bytes]
) -> Iterator[bytes | UserLine]:
    """Find all places with stores. users: as for `stores_of_users`; the caller may add users during the iteration"""
    for_whom, last = (os.geteuid(), mounts), kernel.cached_stores
    if isinstance(last, _Discovered) and last.for_whom == for_whom and time.monotonic() < last.until_s:
        silent += last.silent
        yield from last.places
        return
    places: list[bytes | UserLine] = []
    n_silent = len(silent)
    every: Iterator[bytes | UserLine] = chain(
        _places_with_store(kernel, mounts, silent), _registered_places(kernel, mounts, users)
    )
    for place in every:
        places.append(place)
        yield place
    kernel.cached_stores = _Discovered(for_whom, time.monotonic() + _CACHED_S, places, silent[n_silent:])


def _open_place(kernel: Kernel, mounts: list[Mount], place: bytes | UserLine) -> Iterator[Store]:
    """Open the stores at a place. Raises  BrokenStore"""
    if isinstance(place, UserLine):
        registered_one = open_registered(kernel, place, mounts)
        if registered_one is not None:
            yield registered_one
        return
    try:
        yield from stores_at(kernel, place, mounts)
    except BrokenStore:
        with suppress(OSError):
            # A user's broken store must not make root's commands fail.
            if os.lstat(os.path.join(place, STORE)).st_uid not in trusted_owners(os.geteuid()):
                return
        raise
    except (OSError, TrashdError):
        pass  # it is gone by now


def _places_with_store(kernel: Kernel, mounts: list[Mount], silent: list[bytes]) -> Iterator[bytes]:
    """Find the mount points, and directories above the working directory, that have a store.

    Child processes check them, because a dead mount may block.
    """

    def ask(path: bytes) -> bytes:
        try:
            return _HAS_STORE if next(stores_at(kernel, path, mounts), None) is not None else b""
        except BrokenStore:
            return _HAS_STORE
        except (OSError, TrashdError):
            return b""

    paths = mount_points(mounts)
    with suppress(FileNotFoundError):  # the working directory was removed
        paths = list(dict.fromkeys([*paths, *_upwards(os.getcwdb())]))
    for path, answer in ask_each(paths, ask, kernel.silent_mounts, lambda path: covering_mount_id(path, mounts)):
        if answer is None:
            silent.append(path)
        elif answer == _HAS_STORE:
            yield path


def _registered_places(kernel: Kernel, mounts: list[Mount], users: Iterable[int]) -> Iterator[UserLine]:
    """Find the lines of registries that lead to an existing store. users: as for `stores_of_users`"""
    own = [UserLine(os.geteuid(), line) for line in read_own_lines()]
    yield from (entry for entry, lead in find_targets(kernel, own, mounts) if lead is RegistryTarget.THERE)
    if os.geteuid() == 0:
        yield from stores_of_users(kernel, mounts, users)


def stores_at(kernel: Kernel, path: bytes, mounts: list[Mount]) -> Iterator[Store]:
    """Open the stores in a directory: root's, the caller's own, and for root all users'; the caller closes each.

    Raises  OSError; NoBacking; after all other stores, BrokenStore if root's or the caller's own is broken, or
            Untrusted if root's is not trusted and there is no other
    """
    uid, n_stores = os.geteuid(), 0
    wrong: list[Untrusted | BrokenStore] = []
    with open_both_sides(kernel, path, mounts) as shown:
        own = list_users_stores(kernel, shown.fd) if uid == 0 else own_store_names(kernel, shown.fd, uid)
        names = [STORE, *own]
    for name in names:
        try:
            store = open_store_at(kernel, path, mounts, name)
        except (Untrusted, BrokenStore) as error:
            if name == STORE or (isinstance(error, BrokenStore) and parse_user_store_name(name) == uid):
                wrong.append(error)  # a user's broken store must not make root's commands fail
            continue
        if store is not None:
            n_stores += 1
            yield store
    for one in wrong:
        if isinstance(one, BrokenStore) or not n_stores:
            raise one


def open_store_at(kernel: Kernel, path: bytes, mounts: list[Mount], name: Name = STORE) -> Store | None:
    """Open a store by its name in a directory; return None if there is none.

    Root opens a user's store for that user only.
    Raises  OSError; Untrusted; NoBacking; BrokenStore
    """
    shown = open_both_sides(kernel, path, mounts)
    try:
        return open_store(kernel, shown, path, name)
    except Untrusted:
        if os.geteuid() != 0:
            raise
    with close_on_error(open_both_sides(kernel, path, mounts)) as shown:
        owner = kernel.stat(shown.fd, name).st_uid  # it may be gone by now
    return open_store(kernel, shown, path, name, of=owner or None)


def mount_points(mounts: Iterable[Mount]) -> list[bytes]:
    """Return the mount points that may have a store. Our own mounts come first: users know a store by its path there.

    Other users' mounts are skipped, since their daemons could show anything, or hang.
    """
    owners = trusted_owners(os.geteuid())
    volumes = [mount for mount in mounts if mount.fstype not in _FSTYPES_WITHOUT_STORES and mount.owner in owners]
    return list(dict.fromkeys(mount.point for mount in sorted(volumes, key=lambda mount: not mount.is_trashd())))


def _upwards(path: bytes) -> Iterator[bytes]:
    yield path
    while path != b"/":
        path = os.path.dirname(path)
        yield path


def folders_for_caller(store: Store, census: FolderCensus | None = None) -> Iterator[UserFolder]:
    """Open the caller's folders in a store, or for root all users' folders; the caller closes each.

    A user's own store serves that user only.
    census  gets folders that are refused or could not be read
    """
    yield from all_users(store, census or FolderCensus({}, [], []), os.geteuid() or store.owner or None)


def with_lower_folders(folder: UserFolder) -> Iterator[UserFolder]:
    """Yield a user's folder, and that user's folders in the stores to which its pointers lead; to be run as that user.

    The caller closes the first folder; each other one is closed when the next is requested.
    Raises  NotPermitted if others could have changed the folder, which root may have been unable to check
    """
    kernel = folder.store.kernel
    if why := explain_not_folder(
        kernel, folder.fd, kernel.fstat(folder.fd), folder.uid, kernel.fstat(folder.store.fd).st_dev
    ):
        raise NotPermitted(f"{printable(folder.path())}: {why}", "inspect it; nothing in it was changed")
    yield folder
    for store in lower_stores(folder):
        with store:
            lower = open_user_folder(store.with_maker(), folder.uid)
            if lower is not None:
                with lower:
                    yield lower
