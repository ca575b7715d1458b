"""Opens the victim at a typed path on both sides, and finds stores that could accept it and reasons to refuse it.

A directory with non-empty stores inside is refused, because their contents would be moved away and deleted. An inner
store counts if no other user can have faked it: it and its contents must belong to certain users, and no others can
have written to them. If missing permissions hide its contents, it counts as non-empty.

No tree is walked to find inner stores. Pointers in upper stores name lower ones (the caller's pointers or, for root,
all users'). The caller's registry names the stores in use. A pointer or line only leads to a check, so a false one has
no effect.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain, islice
from typing import NamedTuple, Self

from fusefs.core.container_states import State
from fusefs.core.errors import (
    CrossesBoundary,
    IsMountPoint,
    IsStore,
    LacksCall,
    MountInside,
    NoBacking,
    NoStore,
    NotADirectory,
    NotFound,
    Refused,
    TrashdError,
    Untrusted,
    from_os,
)
from fusefs.core.names import (
    STORE,
    Name,
    RelPath,
    ends_in_dots,
    is_container_id,
    join_path,
    parse_uid_name,
    parse_user_store_name,
    user_store_name,
)
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.record import KeptEntries
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.mountinfo import (
    MERGERFS,
    FilesystemPath,
    Mount,
    every_place,
    find_mount,
    mounts_inside,
    other_namespaces,
    place_below,
    place_of,
    read_mounts,
    relative_to,
    trashd_views,
)
from fusefs.linux.syscalls import STATX_ATTR_ENCRYPTED
from fusefs.store.backing_and_mount import (
    ABSENT_ERRNOS,
    DIRECTORY,
    FILE_TO_READ,
    READABLE,
    UNREACHABLE_ERRNOS,
    BackingAndMount,
    Scope,
    open_beneath_on_both,
    suppress_errno,
)
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
    is_store_name,
    open_own_store,
    open_store,
    own_store_names,
    trusted_owners,
    volume_fields,
)
from fusefs.store.registry_lines import hint_for_unknown_maker, makes_root_store, read_own_lines
from fusefs.store.user_folders import NOT_MADE, plain_name, read_pointers

DOTS = "a path that ends in `.` or `..` is refused, as in rm(1)"
"""A shell expands `.*` to these names; users do not type them."""
_REFUSED_CALL_ERRNOS = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL})
"""Errnos that may mean that a system call is refused for all arguments; EINVAL comes from the C library."""


class Victim(NamedTuple):
    """The entry that the user named, opened on the backing filesystem, even if one of our mounts shows it.

    parent   the directory that contains it
    fd       the entry itself (O_PATH); while it is open, no other entry can get its inode number
    kept_entries  the entries in it that a swap keeps in place; None if --keep was not used
    """

    parent: Scope
    name: Name
    fd: Fd
    stat: os.stat_result
    kept_entries: KeptEntries | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with self.parent:
            self.fd.close()

    def path(self) -> bytes:
        """Return the victim's path, with links resolved."""
        return os.path.join(self.parent.root_path, self.parent.relative, self.name)

    def is_directory(self) -> bool:
        """Return whether the victim is a directory; a symbolic link to one is not."""
        return stat.S_ISDIR(self.stat.st_mode)


def find_victim(kernel: Kernel, path: bytes) -> Victim:
    """Open the victim at a path. Symbolic links in its parent path are followed, but not the victim itself.

    Raises  Refused for `.` and `..`; NotADirectory for a trailing slash after another kind of file; NotFound,
            IsMountPoint, NoStore, or the kernel's error
    """
    directory, name = _split(path)
    try:
        with kernel.open_long(directory) as directory_fd:
            scope = scope_of(kernel, directory_fd, directory, path)
            try:
                return _victim_in(kernel, scope, name, path)
            except (OSError, NoBacking):
                if scope.sides.mounted is None or mount_of(kernel, directory_fd, scope.mounts, directory).is_trashd():
                    raise
            return _victim_in(kernel, scope_of(kernel, directory_fd, directory, path, through_mount=False), name, path)
    except OSError as error:
        raise to_error(error, path) from error


def to_error(error: OSError, path: bytes) -> TrashdError:
    """Convert an error for the user: to LacksCall if a needed system call is always refused, else with `from_os`."""
    return (error.errno in _REFUSED_CALL_ERRNOS and make_lacks_call_error()) or from_os(error, path)


def make_lacks_call_error() -> LacksCall | None:
    """Return the error for system calls that every swap needs but that are refused here, or None if none is refused."""
    from fusefs.linux.refused_calls import find_refused_calls  # late: only a refused swap needs it

    needed = ", ".join(f"{one.call} ({one.errno})" for one in find_refused_calls() if one.is_needed)
    return LacksCall(needed) if needed else None


def _victim_in(kernel: Kernel, scope: Scope, name: Name, path: bytes) -> Victim:
    """Open the victim with a name in a directory; takes ownership of `scope`. Raises  IsMountPoint, OSError"""
    try:
        with close_on_error(scope), close_on_error(kernel.open_beneath(scope.sides.fd, name)) as fd:
            victim_stat = kernel.fstat(fd)
            if path.endswith(b"/") and not stat.S_ISDIR(victim_stat.st_mode):
                raise NotADirectory(path, "name it without the trailing slash")
            if scope.sides.mounted is not None:
                # In our mount, this fails if something is mounted on the victim. The mount's cached attributes are not
                # used.
                kernel.open_beneath(scope.sides.mounted, name).close()
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise IsMountPoint(path) from error
        raise
    return Victim(scope, name, fd, victim_stat)


def find_scope(kernel: Kernel, path: bytes) -> Scope:
    """Open the directory at a path. Symbolic links in its parent path are followed, but not the directory itself.

    Raises  NotADirectory if it is a link or not a directory; Refused for `/`; IsStore if it is in a trash store;
            NotFound, NoStore, or the kernel's error
    """
    directory, name = _split(os.path.realpath(path) if ends_in_dots(path) else path)
    try:
        with kernel.open_long(directory) as above, _open_named(above, name, path) as directory_fd:
            scope = scope_of(kernel, directory_fd, os.path.join(directory, name))
    except OSError as error:
        raise to_error(error, path) from error
    if any(is_store_name(one) for one in scope.place().path.split(b"/")):
        with scope:
            raise IsStore(scope.path())
    return scope


def _open_named(above: Fd, name: Name, path: bytes) -> Fd:
    """Open a directory by its name in another one; if something is mounted there, open that."""
    try:
        return Fd(os.open(name, DIRECTORY | os.O_CLOEXEC, dir_fd=above))
    except NotADirectoryError as error:
        raise NotADirectory(path, "name the directory itself") from error


def scope_of(kernel: Kernel, directory_fd: Fd, typed: bytes, path: bytes = b"", *, through_mount: bool = True) -> Scope:
    """Return the scope of an opened directory.

    directory_fd   the directory, on the side to which its path led; it still belongs to the caller
    typed          its path as the user typed it
    path           the path to name in errors; empty: `typed`
    through_mount  open it on both sides if one of our mounts shows it
    Raises         OSError; NotFound, NoStore, NoBacking
    """
    mounts, path = read_mounts(), path or typed
    mount = mount_of(kernel, directory_fd, mounts, typed)
    try:
        real = os.readlink(directory_fd.path())
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        real = os.path.abspath(typed)
    if through_mount and any(one.is_trashd() for one in mounts):
        from fusefs.store.mounted_paths import find_mounted_scope  # late: only needed if something of ours is mounted

        scope = find_mounted_scope(kernel, path, real, directory_fd, mount, mounts)
        if scope is not None:
            return scope
    root, root_path = _open_root(kernel, mount, real)
    relative = RelPath(relative_to(real, root_path))
    with close_on_error(root), close_on_error(kernel.open_beneath(root, relative or b".", DIRECTORY)) as fd:
        if not os.path.samestat(kernel.fstat(directory_fd), kernel.fstat(fd)):
            raise NotFound(path, "a directory in this path has been moved in the meantime; try again")
    place = place_of(root_path, mount)
    return Scope(BackingAndMount(root), root_path, place, relative, BackingAndMount(fd), mount, tuple(mounts))


def _split(path: bytes) -> tuple[bytes, Name]:
    """Split a path into its directory and the name in it. Raises  NotFound, Refused"""
    if ends_in_dots(path):
        raise Refused(f"{printable(path)}: {DOTS}", "name the directory itself")
    directory, name = os.path.split(path.rstrip(b"/"))
    if not path:
        raise NotFound("''", "the path is empty; name a file or directory")
    if not name:
        raise Refused(f"{printable(path)}: the root directory can't be moved", "name a directory in it")
    return directory or b".", Name(name)


def check_operand(path: bytes) -> None:
    """Refuse a path that ends in `.` or `..`. Raises  Refused"""
    if ends_in_dots(path):
        raise Refused(f"{printable(path)}: {DOTS}", "name the directory itself")


def mount_of(kernel: Kernel, fd: Fd, mounts: Iterable[Mount], path: bytes) -> Mount:
    """Find the mount of an fd. path: named in the error. Raises  NoStore if the mount is not visible"""
    mount = find_mount(kernel, fd, mounts)
    if mount is None:
        raise NoStore(path, "its mount is not visible here; if this is a chroot, run trashd outside it")
    return mount


def _open_root(kernel: Kernel, mount: Mount, path: bytes) -> tuple[Fd, bytes]:
    """Open the mount's root, or else the highest directory above `path` on this mount that we can reach."""
    rest = relative_to(path, mount.point).split(b"/")
    for count in range(len(rest) + 1):
        candidate = os.path.join(mount.point, *rest[:count])
        try:
            fd = kernel.open_path(candidate)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.ENOENT):
                continue
            raise
        with ExitStack() as owned:
            owned.enter_context(fd)
            if kernel.statx(fd).mnt_id == mount.mnt_id:
                owned.pop_all()
                return fd, candidate
    raise NoStore(path)


def ancestors(kernel: Kernel, scope: Scope, *, to_take: bool = True) -> Iterator[tuple[RelPath, bytes]]:
    """Yield the directories that could hold a store for an entry in a scope, highest first: relative and full paths.

    to_take  only directories whose store may accept the entry. Names in an encrypted directory are secret, but stores
             keep them in records and IDs, so the store's directory must be encrypted, too
    """
    is_secret = to_take and kernel.statx(scope.sides.fd).attributes & STATX_ATTR_ENCRYPTED
    names = scope.relative.split(b"/") if scope.relative else []
    for count in range(len(names) + 1):
        relative = RelPath(b"/".join(names[:count]))
        if is_secret:
            with open_beneath_on_both(kernel, scope.root, relative) as base:
                if not kernel.statx(base.fd).attributes & STATX_ATTR_ENCRYPTED:
                    continue
        yield relative, os.path.join(scope.root_path, relative) if relative else scope.root_path


def existing_stores(
    kernel: Kernel, scope: Scope, untrusted: list[Untrusted], *, to_take: bool = True
) -> Iterator[tuple[RelPath, Store]]:
    """Open the trusted stores in the scope's directories, from the top, root's first; the caller closes each.

    to_take  only stores that may accept entries from the scope
    Raises   BrokenStore if a store is broken: it can't get pointers to lower stores, so lower stores are not used
    """
    for relative, path in ancestors(kernel, scope, to_take=to_take):
        for opener in (open_store, open_own_store):
            base = open_beneath_on_both(kernel, scope.root, relative)
            try:
                store = opener(kernel, base, path)
            except Untrusted as error:
                untrusted.append(error)
                continue
            if store is not None and store.has_unknown_maker() and not makes_root_store():
                untrusted.append(Untrusted(f"{printable(store.path())} ({NOT_MADE})", hint_for_unknown_maker(path)))
                store.__exit__()
            elif store is not None:
                yield relative, store


MakeStore = Callable[[Kernel, BackingAndMount, bytes, Name], Store]
"""Makes a store. Arguments: the kernel, the directory (takes ownership), the path for messages, the store's name."""


class OfferedStore(NamedTuple):
    """A store that could accept the victim. made_in: the scope for which it has just been made; None if it is older"""

    store: Store
    made_in: Scope | None = None

    def discard(self) -> None:
        """Remove the store if it was just made and is not needed. Ignore errors: an empty store does no harm."""
        if self.made_in is None:
            return
        from fusefs.store.make_store import unmake_store

        kernel, path = self.store.kernel, self.store.base_path
        relative = RelPath(relative_to(path, self.made_in.root_path))
        with suppress(OSError, TrashdError), open_beneath_on_both(kernel, self.made_in.root, relative) as base:
            unmake_store(kernel, base, path, self.store.name)


def stores_for(
    kernel: Kernel, scope: Scope, victim_path: bytes, make: MakeStore | None = None
) -> Iterator[OfferedStore]:
    """Yield the stores to try for an entry in a directory, or for all its entries; the caller closes each.

    Existing stores come first, then those that we may make; in both groups, the highest is first. The caller discards
    a store that can't accept the entry.
    victim_path  path of the entry, for messages
    make    makes a store; None: `make_store`
    Raises  after the last store: CrossesBoundary if none of them accepted the entry; NoStore, LacksCall, or the error
            from making the last one; BrokenStore as for `existing_stores`
    """
    untrusted: list[Untrusted] = []
    bases = set()
    for relative, store in existing_stores(kernel, scope, untrusted):
        bases.add(relative)
        yield OfferedStore(store)
    last: TrashdError = untrusted[0] if untrusted else NoStore(victim_path)
    is_offered = bool(bases)
    for relative, path in ancestors(kernel, scope):
        if relative in bases:
            continue
        try:
            made = _make_missing(kernel, scope, relative, path, make)
        except Untrusted as error:
            last = error
        except (PermissionError, FileNotFoundError):
            pass  # it is not permitted there, or nothing can be made there, as in /proc
        else:
            if made is not None:
                is_offered = True
                yield OfferedStore(made, scope)
    raise make_lacks_call_error() or (CrossesBoundary(victim_path) if is_offered else last)


def _make_missing(kernel: Kernel, scope: Scope, relative: RelPath, path: bytes, make: MakeStore | None) -> Store | None:
    """Make a store in an ancestor, or return None if an entry that we neither trust nor replace has its name there."""
    from fusefs.store.make_store import make_store, name_for_new  # late: a swap into an existing store does not need it

    with ExitStack() as owned:
        base = owned.enter_context(open_beneath_on_both(kernel, scope.root, relative))
        name = name_for_new(kernel, base)
        if name is None:
            return None
        owned.pop_all()
    return (make or make_store)(kernel, base, path, name)


_MERGED = "its files are on several branches, but a rename affects only one branch; swap the directory on each branch"


def find_refusals(kernel: Kernel, victim: Victim, *, directory: bool) -> Iterator[TrashdError]:
    """Yield every reason to refuse the victim. directory: whether it must be a directory (for rm, it need not)"""
    above = victim.parent
    own = place_below(above.root_place, join_path(above.relative, victim.name))
    if directory and not victim.is_directory():
        yield NotADirectory(victim.path())
    if any(is_store_name(name) for name in own.path.split(b"/")):
        yield IsStore(victim.path())
    if victim.is_directory():
        yield from _find_mounts_inside(victim, own)
        held = find_held_store(kernel, victim.fd, b"")
        if held is not None:
            then = f", then rm -r {shell_word(os.path.join(victim.path(), held))}"
            yield _make_is_store_error(os.path.join(victim.path(), held), then)
        if above.mount.fstype == MERGERFS:
            from fusefs.linux.filesystem_probes import mergerfs_branches  # late: few systems have it

            if len(mergerfs_branches(victim.fd)) > 1:
                yield CrossesBoundary(victim.path(), _MERGED)
        for lower in stores_below(kernel, above.root.fd, above.root_path, join_path(above.relative, victim.name)):
            yield _make_is_store_error(os.path.join(victim.path(), lower, STORE))


def _make_is_store_error(store: bytes, then: str = "") -> IsStore:
    directory = shell_word(os.path.dirname(store))
    hint = f"restore or reap its orphans first (trashd list --volume {directory}){then}"
    return IsStore(store, hint)


def _find_mounts_inside(victim: Victim, own: FilesystemPath) -> Iterator[TrashdError]:
    """Find mounts on the victim or in it, also where our own mounts show it: a swap would move those mounts away.

    own  the victim's place in its filesystem, which is the same in every mount namespace
    """
    owners = trusted_owners(os.geteuid())
    places = every_place(own, trashd_views(victim.parent.mounts, owners))
    for place in places:
        for mount in mounts_inside(place, victim.parent.mounts):
            point = mount.point
            if point == victim.path():
                yield IsMountPoint(point)
            else:
                yield MountInside(victim.path(), f"unmount it first: umount {shell_word(point)}")
    # If a mount point is in another namespace, an exchange succeeds, and detaches that mount there. Only root may read
    # others' namespaces; for users, the kernel's own check of this namespace must suffice.
    if os.geteuid() == 0:
        for pid, mounts in other_namespaces():
            for place in dict.fromkeys((*places, *every_place(own, trashd_views(mounts, owners)))):
                for mount in mounts_inside(place, mounts):
                    command = f"nsenter -t {pid} -m umount {shell_word(mount.point)}"
                    where = f"{printable(victim.path())} (in the mount namespace of process {pid})"
                    yield MountInside(where, f"unmount it there first: {command}")


def find_held_store(kernel: Kernel, dir_fd: Fd, name: bytes) -> Name | None:
    """Return the name of a trash store in the directory `name` (in `dir_fd` if `name` is empty), or None.

    Other users' stores are found only among the few hundred names that one system call returns. This keeps the time of
    a swap independent of the directory's size, and a reaper stops at stores anyway.
    Raises  OSError ESTALE if `dir_fd` itself was removed by another node
    """
    try:
        kernel.open_beneath(dir_fd, join_path(name, STORE, VOLUME)).close()
    except OSError as error:
        if error.errno == errno.ESTALE and not name:
            raise
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP):
            return STORE
    else:
        return STORE
    with suppress_errno(*UNREACHABLE_ERRNOS), kernel.open_beneath(dir_fd, name or b".", READABLE) as fd:
        names = (
            name
            for name in _names_like(kernel.first_names(fd), STORE + b"-")
            if parse_user_store_name(name) is not None
        )
        for one in (user_store_name(os.geteuid()), *names):
            with suppress_errno(*UNREACHABLE_ERRNOS):  # with this mode, it counts as a store without being opened
                if kernel.stat(fd, one).st_mode == stat.S_IFDIR | FOLDER_MODE:
                    return Name(one)
    return None


def _names_like(names: bytes, begin: bytes) -> Iterator[bytes]:
    """Find `begin` in a buffer of NUL-terminated names, even inside a name; yield the rest of the name from there."""
    at = names.find(begin)
    while at >= 0:
        yield names[at : names.index(0, at)]
        at = names.find(begin, at + 1)


_AREAS = (USERS, NEW)
_MAX_FOLDERS, _MAX_READ_USERS = 2000, 100
"""Limits for root: how many users' folders are checked for pointers, and how many users' pointers are read.

The reaper stops at stores that are not found because of these limits.
"""
_MAX_CHECKED_STORES = 200
"""The most stores that are checked, so that a user who records thousands does not delay others for long."""
_NotedStore = tuple[int, RelPath]
"""The user who recorded a store, and the directory that holds it, relative to the directory in question."""


class StoreItem(NamedTuple):
    """An item in a store: a container, or an entry in a user's `drop/`.

    uid     UID of the item's owner
    folder  the owner's folder, relative to the store; for an item in `drop/`, that directory
    state   the container's state; None for an item in `drop/`, or if the folder could not be listed
    name    the name in that directory; empty if the folder could not be listed
    """

    uid: int
    folder: RelPath
    state: State | None
    name: bytes

    def relative_path(self) -> RelPath:
        """Return the item's path relative to the store."""
        return join_path(self.folder, b"" if self.state is None else self.state.value.encode(), self.name)


def list_items(kernel: Kernel, dir_fd: int, path: bytes, owners: Collection[int]) -> Iterator[StoreItem]:
    """Yield the items in the store at a path beneath a directory, or nothing if it is not a trusted store.

    owners  permitted owners of the store. In root's store, root counts all items, and a user only their own. In a
            user's own store, only that user's items count, or all items if the store is named after a user
    Raises  OSError that does not concern the store, such as EMFILE
    """
    try:
        store = kernel.open_beneath(dir_fd, path, READABLE)
    except OSError as error:
        if error.errno not in UNREACHABLE_ERRNOS:
            raise
        return
    with store:
        whom = parse_user_store_name(os.path.basename(path))
        owner = _owner_of(kernel, store, owners)
        if owner is None or (whom is not None and stat.S_IMODE(kernel.fstat(store).st_mode) != FOLDER_MODE):
            return
        for area in _areas(kernel, store):
            for folder in _list_at(kernel, store, area) or ():
                uid = parse_uid_name(folder)
                if uid is not None and whom is not None:
                    yield from _list_items_of(kernel, store, (owner, owner), join_path(area, folder))
                elif uid is not None and (uid == owner or (owner == 0 and os.geteuid() in (0, uid))):
                    yield from _list_items_of(kernel, store, (uid, owner), join_path(area, folder))


def _areas(kernel: Kernel, store: Fd) -> Iterator[RelPath]:
    """Yield the directories of users' folders in a store, and in old stores that were set aside in it."""
    old = [Name(name) for name in _list_at(kernel, store, b".") or () if name.startswith(OLD)]
    for above in ((), *((one,) for one in old)):
        yield from (join_path(*above, area) for area in _AREAS)


def _owner_of(kernel: Kernel, store: Fd, owners: Collection[int]) -> int | None:
    """Return an opened store's owner, or None if it is not a store, belongs to another user, or others can write to it.

    volume.json is checked before it is opened, because another user's lease on it, or a FIFO, would block the open or
    make it fail.
    """
    st = kernel.fstat(store)
    with suppress_errno(*UNREACHABLE_ERRNOS):
        volume_stat = kernel.stat(store, VOLUME)
        is_theirs = {st.st_uid, volume_stat.st_uid} <= set(owners)
        if not is_theirs or not stat.S_ISREG(volume_stat.st_mode) or (st.st_mode | volume_stat.st_mode) & OTHERS_WRITE:
            return None
        with kernel.open_beneath(store, VOLUME, FILE_TO_READ) as file:
            return st.st_uid if volume_fields(kernel.read(file, VOLUME_MAX_BYTES)) else None
    return None


def _list_items_of(kernel: Kernel, store: Fd, owners: tuple[int, int], folder: RelPath) -> Iterator[StoreItem]:
    """Yield the items in a user's folder, if no other user can write to the folder.

    owners  the user, and the store's owner, who may own all files in a copy
    """
    uid = owners[0]
    try:
        st = kernel.stat(store, folder)
    except OSError as error:
        if error.errno not in UNREACHABLE_ERRNOS:
            raise
        return
    if not stat.S_ISDIR(st.st_mode) or st.st_uid not in owners or st.st_mode & OTHERS_WRITE:
        return
    for state in (*State, None):
        names = _list_at(kernel, store, join_path(folder, DROP if state is None else state.value.encode()))
        if names is None:
            yield StoreItem(uid, folder, None, b"")
            return
        for name in names:
            if state is None or is_container_id(name.decode("ascii", "replace")):
                yield StoreItem(uid, folder if state else join_path(folder, DROP), state, name)


def _list_at(kernel: Kernel, dir_fd: int, path: bytes) -> list[bytes] | None:
    """List the names in a directory; return [] if it does not exist, and None if we are not allowed to list it."""
    try:
        with kernel.open_dir(dir_fd, path) as fd:
            return kernel.list(fd)
    except OSError as error:
        if error.errno == errno.EACCES:
            return None
        if error.errno not in ABSENT_ERRNOS:
            raise
        return []


def stores_below(kernel: Kernel, root_fd: Fd, root_path: bytes, directory: RelPath) -> Iterator[RelPath]:
    """Yield the paths, relative to a directory, of the directories below it that hold a non-empty store.

    root_fd    the highest directory that is checked (O_PATH); upper stores are in it, or on the path to `directory`
    root_path  its path, for messages
    directory  path of the directory in question, relative to `root_fd`; a store directly in it is not included
    Raises     OSError
    """
    reported = set()
    candidates = chain(
        _noted_in_registry(root_fd, root_path, directory), _noted_by_pointers(kernel, root_fd, directory)
    )
    for uid, lower in islice(candidates, _MAX_CHECKED_STORES):
        if lower in reported:
            continue
        base_path, names = join_path(directory, lower), [STORE]
        with suppress_errno(*UNREACHABLE_ERRNOS), kernel.open_beneath(root_fd, base_path, DIRECTORY) as base:
            names += own_store_names(kernel, base, uid)
        store_paths = (join_path(base_path, name) for name in names)
        if any(next(list_items(kernel, root_fd, one, {0, os.geteuid(), uid}), None) is not None for one in store_paths):
            reported.add(lower)
            yield lower


def _noted_in_registry(root_fd: Fd, root_path: bytes, directory: RelPath) -> Iterator[_NotedStore]:
    """Yield stores in the caller's registry that are below a directory, by its backing path or its path in a mount."""
    lines = read_own_lines()
    if lines:
        with suppress(OSError):  # it has no path that can be read
            for root in dict.fromkeys((os.readlink(root_fd.path()), root_path)):
                top = os.path.join(root, directory).rstrip(b"/") + b"/"
                for line in lines:
                    if line.path.startswith(top):
                        yield os.geteuid(), RelPath(line.path[len(top) :])


def _noted_by_pointers(kernel: Kernel, root_fd: Fd, directory: RelPath) -> Iterator[_NotedStore]:
    """Yield the lower stores named by pointers in the stores above; each directory is opened from its parent."""
    names = directory.split(b"/") if directory else []
    rest = directory + b"/"
    with ExitStack() as owned:
        current_fd = root_fd
        for name in names:
            for uid, lower in _noted_in_directory(kernel, current_fd):
                if lower.startswith(rest):
                    yield uid, RelPath(lower[len(rest) :])
            rest = rest[len(name) + 1 :]
            if not rest:
                return
            try:
                following = kernel.open_beneath(current_fd, name, DIRECTORY)
            except OSError as error:
                if error.errno not in UNREACHABLE_ERRNOS:
                    raise
                return  # the directory was moved
            owned.close()
            current_fd = owned.enter_context(following)


def _noted_in_directory(kernel: Kernel, base_fd: Fd) -> Iterator[_NotedStore]:
    """Yield the lower stores that are named by pointers in one directory's stores: root's, and the caller's own."""
    names = [STORE]
    with suppress_errno(*UNREACHABLE_ERRNOS):
        names += own_store_names(kernel, base_fd, os.geteuid())
    for name in names:
        try:
            store = kernel.open_beneath(base_fd, name, DIRECTORY)
        except OSError as error:
            if error.errno not in UNREACHABLE_ERRNOS:
                raise
            continue
        with store:
            n_read = 0
            for uid, folder in islice(_folders(kernel, store), _MAX_FOLDERS):
                with (
                    suppress_errno(*UNREACHABLE_ERRNOS),
                    kernel.open_dir(store, join_path(folder, POINTERS)) as pointers,
                ):
                    if kernel.is_empty(pointers):
                        continue
                    n_read += 1
                    if n_read > _MAX_READ_USERS:
                        break
                    for lower in read_pointers(kernel, pointers, uid):
                        yield uid, lower


def _folders(kernel: Kernel, store: Fd) -> Iterator[tuple[int, RelPath]]:
    """Yield the caller's folders in a store (for root, all users' folders), judging only by their names."""
    uid = os.geteuid()
    for area in _AREAS:
        names = (_list_at(kernel, store, area) or ()) if uid == 0 else (plain_name(uid),)
        yield from ((owner, join_path(area, name)) for name in names if (owner := parse_uid_name(name)) is not None)
