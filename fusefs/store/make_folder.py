"""Makes users' folders: each is complete before it gets its name, and each user gets only one.

This module also contains root's first inspection of folders that users made themselves. Before the inspection, a folder
serves only its user. If the folder and all its containers meet the conditions, root registers the folder and moves it
to `u/`, where only root can create entries. From then on, the folder is proven. If not, root records that it is
refused; later corrections do not change this. In both cases, users keep access to everything.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress

from fusefs.core.errors import Busy, NoStore
from fusefs.core.names import N_HEX, Name, parse_uid_name
from fusefs.core.printable_names import shell_word
from fusefs.linux.children import user_credentials
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.user_ids import read_subordinates
from fusefs.store.backing_and_mount import (
    DIRECTORY,
    NO_SPACE_ERRNOS,
    UNREACHABLE_ERRNOS,
    is_taken,
    preserved_times,
    suppress_errno,
)
from fusefs.store.layout import FOLDERS, NEW, NEW_PART, USERS, Store, UserFolder, make_private, take_lock
from fusefs.store.user_folders import (
    MOST_REFUSED,
    MOUNTED,
    FolderVerdict,
    RegisteredFolder,
    SubordinateFolders,
    ensure_spare,
    explain_not_folder,
    explain_not_folder_deep,
    explain_not_private,
    explain_unreadable,
    judge_folder,
    names_in,
    open_user_folder,
    plain_name,
    read_registered,
    write_registered,
)

_ATTEMPTS = 8
_N_TRIES, _FIRST_PAUSE_S, _MAX_DOUBLINGS = 30, 0.01, 6
"""How often, and for how long, a user's first commands wait for each other; the wait doubles up to a maximum."""
_N_LOCK_TRIES, _LOCK_PAUSE_S = 100, 0.02


def make_user_folder(store: Store, uid: int | None = None, *, waits: bool = True) -> UserFolder:
    """Make a folder for the caller, or open the one that another command of the same user has just made.

    The folder is completed under a temporary name, then renamed to the plain name, or to a random name if another user
    has taken the plain name. With random names, two commands of a user could each make a folder. So each command, once
    its own unfinished folder is visible, checks whether the other has an unfinished folder, and then whether it has a
    finished one. At least one of them therefore gives up.
    uid     the user who will own the folder, if this thread acts with a different fsuid (setfsuid)
    Raises  OSError; NoStore if modes or owners have no effect (FAT, NFS with root squash); Busy if the plain name is
            taken, another command of that user is making a folder, and `waits` is False
    """
    uid = os.geteuid() if uid is None else uid
    kernel, (_area, u_fd), plain = store.kernel, store.areas.area_for_new_folders(), plain_name(uid)
    for turn in range(_N_TRIES if waits else 1):
        try:
            if turn and (folder := open_user_folder(store, uid)) is not None:
                return folder
            with unnamed_folder(store, u_fd, uid) as (new, fd):
                has_rivals = discard_abandoned_folders(kernel, u_fd, uid, except_name=new)
                with suppress(FileExistsError):
                    kernel.rename_free(u_fd, new, u_fd, plain)
                    return _open_settled(store, uid, u_fd, plain, fd)
                folder = open_user_folder(store, uid)
                if folder is not None:
                    return folder
                if not has_rivals:
                    name = _another_name(uid)
                    kernel.rename_free(u_fd, new, u_fd, name)
                    return _open_settled(store, uid, u_fd, name, fd)
        except FileNotFoundError:
            # Another process assumed that this one is dead, and removed the unlocked folder; or the store is gone.
            if turn >= _ATTEMPTS:
                raise
            continue
        if waits:
            time.sleep(os.urandom(1)[0] / 256 * _FIRST_PAUSE_S * 2.0 ** min(turn, _MAX_DOUBLINGS))
    raise Busy(store.base_path)


def _open_settled(store: Store, uid: int, area_fd: Fd, name: Name, fd: Fd) -> UserFolder:
    """Open a user's folder after this process has made one.

    Root may already have moved the new folder. If another command's folder is the valid one, the new folder, which is
    still empty, is removed.
    Raises  OSError; FileNotFoundError if the user has no folder; then the caller must start again
    """
    kernel = store.kernel
    folder = open_user_folder(store, uid)
    if folder is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    with suppress(OSError):
        if not os.path.samestat(kernel.fstat(folder.fd), kernel.fstat(fd)) and kernel.is_named(fd, area_fd, name):
            discard_folder(kernel, area_fd, name, fd)
    return folder


def make_proven(store: Store, uid: int) -> UserFolder | None:
    """As root, make a user's folder in root's store, and register it before it gets its name.

    If the user already has a folder, return that folder. Return None if another process is registering folders.
    Raises  OSError; NoStore if modes or owners have no effect
    """
    kernel = store.kernel
    u_fd = store.areas.u_fd
    if store.areas.registry_fd is None:
        raise NoStore(
            store.base_path, f"to recreate its folders/ directory, run: trashd init {shell_word(store.base_path)}"
        )
    with ExitStack() as owned:
        registry_fd = lock_registry(store, owned)
        if registry_fd is None:
            return None
        folder = open_user_folder(store, uid)
        if folder is not None:
            return folder
        discard_abandoned_folders(kernel, u_fd, uid)
        for attempt in range(_ATTEMPTS):
            try:
                with unnamed_folder(store, u_fd, uid) as (new, fd):
                    entry = read_registered(store, uid)
                    name = free_name(kernel, u_fd, uid)
                    write_registered(kernel, registry_fd, entry._replace(name=name, identity=kernel.identify(fd)))
                    kernel.rename_free(u_fd, new, u_fd, name)
                break
            except FileNotFoundError:  # an init assumed that this process is dead, and removed it
                if attempt == _ATTEMPTS - 1:
                    raise
        return open_user_folder(store, uid)


def make_folder_as_root(store: Store, uid: int) -> UserFolder:
    """As root, open a user's folder in root's store; make it if it is missing. Raises  OSError; NoStore; Busy"""
    for _turn in range(_N_LOCK_TRIES):
        folder = make_proven(store, uid)
        if folder is not None:
            return folder
        # Another of root's processes is registering a folder, which takes a command a few milliseconds.
        time.sleep(_LOCK_PAUSE_S)
    raise Busy(store.base_path)


def free_name(kernel: Kernel, u_fd: Fd, uid: int) -> Name:
    """Return the name below `u/` for a user's next folder: the plain one, unless it is taken."""
    plain = plain_name(uid)
    return _another_name(uid) if is_taken(kernel, u_fd, plain) else plain


def _another_name(uid: int) -> Name:
    """Return a name for a user's folder that no other user can guess."""
    return Name(b"%d.%b" % (uid, os.urandom(N_HEX // 2).hex().encode()))


def lock_registry(store: Store, owned: ExitStack) -> Fd | None:
    """Lock root's registry and return it, or None if it is missing or another process has locked it. Needs root.

    owned   closes and unlocks it
    Raises  OSError
    """
    registry_fd = store.areas.registry_fd
    if registry_fd is None or not take_lock(store.kernel, registry_fd, owned):
        return None
    ensure_spare(store.kernel, registry_fd)
    return registry_fd


@contextmanager
def unnamed_folder(store: Store, area_fd: Fd, uid: int) -> Iterator[tuple[Name, Fd]]:
    """Make a complete, locked folder under a temporary name; remove it after the block unless the block renames it.

    Raises  OSError; NoStore; FileNotFoundError if another command removed the folder before it was locked
    """
    kernel = store.kernel
    new = Name(NEW_PART + _another_name(uid))
    with make_private(kernel, area_fd, new) as fd:
        try:
            if kernel.is_local(fd) and not kernel.lock(fd):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), new)
            for part in FOLDERS:
                with make_private(kernel, fd, part) as part_fd:
                    _chown_to(kernel, part_fd, uid)
            _chown_to(kernel, fd, uid)
            why = explain_not_folder(kernel, fd, kernel.fstat(fd), uid, store.areas.dev)
            if why:
                raise NoStore(
                    store.base_path, f"a new directory on this filesystem is not private to its creator: {why}"
                )
            yield new, fd
        finally:
            with suppress(OSError):  # an error here must not replace the block's error
                if kernel.is_named(fd, area_fd, new):
                    discard_folder(kernel, area_fd, new, fd)


@contextmanager
def folder_for_check(store: Store) -> Iterator[UserFolder]:
    """Open the caller's folder for a check, or make one under a temporary name that is removed after the block."""
    kernel, uid = store.kernel, os.geteuid()
    folder = open_user_folder(store, uid)
    if folder is not None:
        with folder:
            yield folder
        return
    area, area_fd = store.areas.all()[0] if store.owner == uid else store.areas.area_for_new_folders()
    with preserved_times(kernel, area_fd), unnamed_folder(store, area_fd, uid) as (name, fd):
        yield UserFolder(store, uid, area, name, fd, is_proven=False)


def _chown_to(kernel: Kernel, fd: Fd, uid: int) -> None:
    """If root made a directory for a user, change its owner to that user. Raises  OSError"""
    if os.geteuid() == 0 and kernel.fstat(fd).st_uid == 0 != uid:
        kernel.chown(fd, uid, user_credentials(uid).gid)


def abandoned_folders(store: Store) -> Iterator[UserFolder]:
    """Lock and yield the unfinished folders that the caller's killed commands left; one may contain a container."""
    kernel, uid = store.kernel, os.geteuid()
    for area, area_fd in store.areas.all():
        for name in kernel.list_reopened(area_fd):
            if name.startswith(NEW_PART) and parse_uid_name(name.removeprefix(NEW_PART)) == uid:
                with suppress(OSError), kernel.open_dir(area_fd, name) as fd:
                    if not explain_not_private(kernel.fstat(fd), uid) and kernel.is_local(fd) and kernel.lock(fd):
                        yield UserFolder(store, uid, area, Name(name), fd, is_proven=False)


def discard_abandoned_folders(kernel: Kernel, u_fd: Fd, only: int | None, *, except_name: Name | None = None) -> bool:
    """Remove unfinished folders that killed commands left; return whether other commands are making folders now.

    On network filesystems, locks prove nothing: nothing is removed, and commands on other hosts are ignored.
    only  remove only this user's folders; None: all users'
    """
    has_rivals = False
    for name in kernel.list_reopened(u_fd):
        uid = parse_uid_name(name.removeprefix(NEW_PART))
        if uid is None or only not in (None, uid) or name == except_name or not name.startswith(NEW_PART):
            continue
        with suppress(OSError), kernel.open_dir(u_fd, name) as fd:
            st = kernel.fstat(fd)
            # If a folder belongs to root, root has not changed its owner yet.
            if st.st_uid not in (0, uid) or explain_not_private(st, st.st_uid) or not kernel.is_local(fd):
                continue
            if kernel.lock(fd):
                discard_folder(kernel, u_fd, name, fd)
            else:
                has_rivals = True
    return has_rivals


def discard_folder(kernel: Kernel, u_fd: Fd, name: bytes, fd: Fd) -> None:
    """Remove an unused folder, using only rmdir; parts that can't be removed remain, and do no harm."""
    for part in FOLDERS:
        with suppress(OSError):
            kernel.rmdir(fd, part)
    with suppress(OSError):
        kernel.rmdir(u_fd, name)


_MAX_PER_INSPECTION = 300
"""How many registry entries one inspection may write: each takes a millisecond to become durable.

The remaining subordinate uids wait for the next inspection, so that they do not delay other users' folders.
"""


def inspect_new_folders(store: Store, resting: Collection[int] = ()) -> list[FolderVerdict]:
    """Register the folders that users made in root's store since the last inspection; return those that can't be read.

    Do nothing if another of root's processes is doing this, or if the volume is full or read-only. Needs root.
    resting  users to skip this time
    Raises   OSError from root's own directories; errors from users' directories are returned
    """
    kernel, areas = store.kernel, store.areas
    failed: list[FolderVerdict] = []
    if areas.new_fd is None or store.has_unknown_maker():
        return failed
    if store.volume.strangers_refused is not True or kernel.is_empty(areas.new_fd) or kernel.is_read_only(store.fd):
        return failed
    with suppress_errno(*NO_SPACE_ERRNOS), ExitStack() as owned:
        registry_fd = lock_registry(store, owned)
        if registry_fd is not None:
            _register_new(store, registry_fd, resting, failed)
    return failed


def _register_new(store: Store, registry_fd: Fd, resting: Collection[int], failed: list[FolderVerdict]) -> None:
    """Register at most _MAX_PER_INSPECTION new folders; the caller holds the registry's lock.

    failed  gets the folders that could not be read, if their user has no other folder yet
    """
    n_allowed, (_area, new_fd) = _MAX_PER_INSPECTION, store.areas.area_for_new_folders()
    named, registered = names_in(store.kernel, new_fd), names_in(store.kernel, store.areas.u_fd)
    subordinates = SubordinateFolders(len(named) + len(registered), registered)
    for uid, names in _users_first(named):
        if uid == 0 or uid in resting:  # root makes its own folder in `u/`
            continue
        if subordinates.is_one_too_many(uid):
            continue
        entry = read_registered(store, uid)
        unread: list[tuple[Name, str]] = []
        for name in names:
            if entry.is_limit_reached() or len(unread) >= MOST_REFUSED:
                break
            if n_allowed == 0:
                return
            try:
                if _has_folder(store, entry):
                    unread.clear()
                    break
            except OSError as error:
                unread.append((name, explain_unreadable(error)))
                continue
            before = entry
            entry, why = _inspect(store, registry_fd, entry, name)
            if why:
                unread.append((name, why))
            if entry is not before:
                n_allowed -= 1
                if entry.name:
                    subordinates.count(uid)
        failed += [FolderVerdict(NEW, name, uid, uid, why, is_used=True) for name, why in unread]


def _users_first(named: dict[int, list[Name]]) -> list[tuple[int, list[Name]]]:
    """Return the uids and their names; if there are too many for one inspection, subordinate uids come last."""
    if len(named) <= _MAX_PER_INSPECTION:
        return list(named.items())
    holder_of = read_subordinates().holder_of
    return sorted(named.items(), key=lambda one: holder_of(one[0]) != one[0])


def _has_folder(store: Store, entry: RegisteredFolder) -> bool:
    """Return whether a user's registered folder exists and is valid. Raises  OSError if it can't be read now"""
    if not entry.name:
        return False
    with suppress_errno(*UNREACHABLE_ERRNOS), store.kernel.open_beneath(store.areas.u_fd, entry.name, DIRECTORY) as fd:
        return judge_folder(store, entry, USERS, entry.name, fd).is_registered
    return False


def _inspect(store: Store, registry_fd: Fd, entry: RegisteredFolder, name: Name) -> tuple[RegisteredFolder, str]:
    """Inspect the folder at one of a user's names, and register or refuse it.

    Returns  the user's registry entry (the same object if it is unchanged), and why the name can't be read now, or ""
    Raises   OSError from root's own directories
    """
    kernel, (_area, new_fd) = store.kernel, store.areas.area_for_new_folders()
    with ExitStack() as owned:
        try:
            fd = owned.enter_context(kernel.open_beneath(new_fd, name, DIRECTORY))
        except OSError:
            return entry, ""  # any user can have put it there; `inspect_folders` reports it
        if kernel.fstat(fd).st_uid != entry.uid:
            return entry, ""  # that uid can't have made it, and its maker can make thousands
        try:
            identity = kernel.identify(fd)
            is_registered, why = entry.is_same(identity), ""
            if not is_registered:
                if entry.has_refused(identity):
                    return entry, ""
                why = explain_not_folder_deep(kernel, fd, entry.uid, store.areas.dev)
        except (FileNotFoundError, PermissionError):
            return entry, ""  # it is gone, or the server does not accept this host's root
        except OSError as error:
            return entry, explain_unreadable(error)
        if why.endswith(MOUNTED):
            return entry, why  # the directory below the mount can't be seen now
        if why:
            entry = entry._replace(refused=(*entry.refused, identity))
            write_registered(kernel, registry_fd, entry)
            return entry, ""
        return _register(store, registry_fd, entry, name, fd)


def _register(
    store: Store, registry_fd: Fd, entry: RegisteredFolder, name: Name, fd: Fd
) -> tuple[RegisteredFolder, str]:
    """Register a folder, then move it to where only root can create entries. For Returns and Raises, see `_inspect`."""
    kernel, u_fd, (_area, new_fd) = store.kernel, store.areas.u_fd, store.areas.area_for_new_folders()
    new_name = free_name(kernel, u_fd, entry.uid)
    moved = entry._replace(name=new_name, identity=kernel.identify(fd))
    write_registered(kernel, registry_fd, moved)
    try:
        kernel.rename_free(new_fd, name, u_fd, new_name)
        if kernel.is_named(fd, u_fd, new_name):
            return moved, ""
        # Its owner has just given the name to another entry, which was not registered: move that entry back.
        kernel.rename_free(u_fd, new_name, new_fd, _another_name(entry.uid))
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno in NO_SPACE_ERRNOS:
            raise
        # Its owner mounted something on it, or changed its project id.
        return entry, f"root can't move it to u/: {error.strerror}"
    return entry, ""


def register_unregistered(store: Store) -> list[str]:
    """Register the unregistered folders in `u/`, in a store that was copied or restored from a backup.

    Only `trashd init` calls this: by running it, root declares the folders trusted.
    Returns  what was done, for messages
    Raises   OSError
    """
    kernel, areas = store.kernel, store.areas
    if areas.new_fd is None or kernel.is_read_only(store.fd):
        return []
    messages: list[str] = []
    with ExitStack() as owned:
        registry_fd = lock_registry(store, owned)
        if registry_fd is None:
            return []
        for uid, names in names_in(kernel, areas.u_fd).items():
            entry = read_registered(store, uid)
            for name in sorted(names, key=entry.name.__ne__):
                try:
                    if _has_folder(store, entry):
                        break
                except OSError:
                    break  # it can't be read now, so no other folder must take its place
                with suppress(OSError), kernel.open_beneath(areas.u_fd, name, DIRECTORY) as fd:
                    if not explain_not_folder_deep(kernel, fd, uid, areas.dev):
                        entry = entry._replace(name=name, identity=kernel.identify(fd))
                        write_registered(kernel, registry_fd, entry)
                        messages.append(f"registered u/{name.decode()} (created by root, or part of a copied store)")
    return messages
