"""Make a user's folder: complete before it has its name, and one for each user, whatever others make beside it.

Also root's first inspection of folders that users made themselves: a complete folder becomes proven, any other never
will. Until the inspection a folder serves only its user. If it meets the conditions down to every container, root
registers it and moves it to where only root makes names. If not, root records that: correct modes later do not make it
a folder. Nothing is taken out of any user's reach.
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
"""How often, and for how long, first commands of one user wait for each other; the time doubles at first."""
_N_LOCK_TRIES, _LOCK_PAUSE_S = 100, 0.02


def make_user_folder(store: Store, uid: int | None = None, *, waits: bool = True) -> UserFolder:
    """Make a folder for the caller, or open the one that another command of the same user made meanwhile.

    It is completed under another name and appears by one rename; if the plain name is planted, with a random name. In
    that case two commands could each make one. So each checks for the other once its own is visible, and for a folder
    after that: at least one of them gives up.
    uid     of the user who is to own it, if this thread acts with another fsuid (setfsuid)
    Raises  OSError; NoStore if modes or owners mean nothing (FAT, NFS with root squash); Busy if another command of
            that user makes one beside a planted name, and `waits` is False
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
            # Another process removed it, as if its maker were dead, before it was locked; or the whole store is gone.
            if turn >= _ATTEMPTS:
                raise
            continue
        if waits:
            time.sleep(os.urandom(1)[0] / 256 * _FIRST_PAUSE_S * 2.0 ** min(turn, _MAX_DOUBLINGS))
    raise Busy(store.base_path)


def _open_settled(store: Store, uid: int, area_fd: Fd, name: Name, fd: Fd) -> UserFolder:
    """Open the folder that a user has now.

    Root may have moved the new one already. Or another command's folder got the name first: then that one is used, and
    the new one, still empty, is removed.
    Raises  OSError; FileNotFoundError if there is none: start again
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
    """Make a user's folder as root, which registers it before it has its name; None if another process registers now.

    Needs root and a store of root's. Returns an existing folder of the user's.
    Raises  OSError; NoStore if modes or owners mean nothing
    """
    kernel = store.kernel
    u_fd = store.areas.u_fd
    if store.areas.registry_fd is None:
        raise NoStore(store.base_path, f"trashd init {shell_word(store.base_path)} creates its folders/ again")
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
            except FileNotFoundError:  # an init removed it, as if its maker were dead, before it was locked
                if attempt == _ATTEMPTS - 1:
                    raise
        return open_user_folder(store, uid)


def make_folder_as_root(store: Store, uid: int) -> UserFolder:
    """A user's folder in root's store, made by root if it is missing. Raises  OSError; NoStore; Busy"""
    for _turn in range(_N_LOCK_TRIES):
        folder = make_proven(store, uid)
        if folder is not None:
            return folder
        # Another process of root's registers a folder, which takes a command some milliseconds.
        time.sleep(_LOCK_PAUSE_S)
    raise Busy(store.base_path)


def free_name(kernel: Kernel, u_fd: Fd, uid: int) -> Name:
    """The name below `u/` for a user's next folder: the plain one, unless it is taken."""
    plain = plain_name(uid)
    return _another_name(uid) if is_taken(kernel, u_fd, plain) else plain


def _another_name(uid: int) -> Name:
    """A name for a user's folder that no other user can guess."""
    return Name(b"%d.%b" % (uid, os.urandom(N_HEX // 2).hex().encode()))


def lock_registry(store: Store, owned: ExitStack) -> Fd | None:
    """Lock root's registry and return it, closed by `owned`; None if there is none, or another process has the lock.

    Needs root. Raises  OSError
    """
    registry_fd = store.areas.registry_fd
    if registry_fd is None or not take_lock(store.kernel, registry_fd, owned):
        return None
    ensure_spare(store.kernel, registry_fd)
    return registry_fd


@contextmanager
def unnamed_folder(store: Store, area_fd: Fd, uid: int) -> Iterator[tuple[Name, Fd]]:
    """A complete folder without its name yet, locked while its maker runs; removed after the block if not renamed.

    Raises  OSError; NoStore; FileNotFoundError if another command removed it, as if its maker were dead, before it was
            locked
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
                    store.base_path, f"the filesystem does not give a new directory to its creator only: {why}"
                )
            yield new, fd
        finally:
            with suppress(OSError):  # an error here must not replace the block's error
                if kernel.is_named(fd, area_fd, new):
                    discard_folder(kernel, area_fd, new, fd)


@contextmanager
def folder_for_check(store: Store) -> Iterator[UserFolder]:
    """The caller's folder, or one like `own_folder` makes that has no name and is removed again."""
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
    """Chown a directory that root made for a user to that user; a user's own directories need no chown.

    Raises  OSError
    """
    if os.geteuid() == 0 and kernel.fstat(fd).st_uid == 0 != uid:
        kernel.chown(fd, uid, user_credentials(uid).gid)


def abandoned_folders(store: Store) -> Iterator[UserFolder]:
    """The caller's folders that have no name and whose makers are dead, locked: a check may have been killed in one."""
    kernel, uid = store.kernel, os.geteuid()
    for area, area_fd in store.areas.all():
        for name in kernel.list_reopened(area_fd):
            if name.startswith(NEW_PART) and parse_uid_name(name.removeprefix(NEW_PART)) == uid:
                with suppress(OSError), kernel.open_dir(area_fd, name) as fd:
                    if not explain_not_private(kernel.fstat(fd), uid) and kernel.is_local(fd) and kernel.lock(fd):
                        yield UserFolder(store, uid, area, Name(name), fd, is_proven=False)


def discard_abandoned_folders(kernel: Kernel, u_fd: Fd, only: int | None, *, except_name: Name | None = None) -> bool:
    """Remove what killed makers of one user, or of all users, left; return whether others are making a folder now.

    Where locks prove nothing (network filesystems), makers on other hosts are ignored.
    """
    has_rivals = False
    for name in kernel.list_reopened(u_fd):
        uid = parse_uid_name(name.removeprefix(NEW_PART))
        if uid is None or only not in (None, uid) or name == except_name or not name.startswith(NEW_PART):
            continue
        with suppress(OSError), kernel.open_dir(u_fd, name) as fd:
            st = kernel.fstat(fd)
            # Root's: root has not given it to its user yet.
            if st.st_uid not in (0, uid) or explain_not_private(st, st.st_uid) or not kernel.is_local(fd):
                continue
            if kernel.lock(fd):
                discard_folder(kernel, u_fd, name, fd)
            else:
                has_rivals = True
    return has_rivals


def discard_folder(kernel: Kernel, u_fd: Fd, name: bytes, fd: Fd) -> None:
    """Remove an unused folder, only by rmdir; parts that can't be removed do no harm."""
    for part in FOLDERS:
        with suppress(OSError):
            kernel.rmdir(fd, part)
    with suppress(OSError):
        kernel.rmdir(u_fd, name)


_MAX_PER_INSPECTION = 300
"""Limit of registry entries that one inspection writes: each takes a millisecond to become durable.

Further subordinate uids wait for the next inspection, and delay no other user's.
"""


def inspect_new_folders(store: Store, resting: Collection[int] = ()) -> list[FolderVerdict]:
    """Register folders that users made in root's store since the last inspection; return those that could not be read.

    Needs root.
    If another process of root's does this now, it is left to that. On a full volume it is done later, on a read-only
    one not at all.
    resting  users to skip now
    Raises   OSError of root's own directories; errors of users' directories are returned
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
    """Register new folders while the caller has the registry's lock; if there are very many, only the first of them.

    failed  gets the folders that could not be read, of users who have no folder yet
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
    """If there are more than one inspection has time for: users first, then subordinate uids."""
    if len(named) <= _MAX_PER_INSPECTION:
        return list(named.items())
    holder_of = read_subordinates().holder_of
    return sorted(named.items(), key=lambda one: holder_of(one[0]) != one[0])


def _has_folder(store: Store, entry: RegisteredFolder) -> bool:
    """Whether a user's registered folder exists and is a valid one. Raises  OSError if it can't be read now"""
    if not entry.name:
        return False
    with suppress_errno(*UNREACHABLE_ERRNOS), store.kernel.open_beneath(store.areas.u_fd, entry.name, DIRECTORY) as fd:
        return judge_folder(store, entry, USERS, entry.name, fd).is_registered
    return False


def _inspect(store: Store, registry_fd: Fd, entry: RegisteredFolder, name: Name) -> tuple[RegisteredFolder, str]:
    """Inspect one of a user's names. Return root's entry for the user, the same object if nothing has changed.

    Returns  also why the name can't be read now; empty if it can
    Raises   OSError of root's own directories
    """
    kernel, (_area, new_fd) = store.kernel, store.areas.area_for_new_folders()
    with ExitStack() as owned:
        try:
            fd = owned.enter_context(kernel.open_beneath(new_fd, name, DIRECTORY))
        except OSError:
            return entry, ""  # any user can have put it there: the census reports it
        if kernel.fstat(fd).st_uid != entry.uid:
            return entry, ""  # that uid could not have made it, and its maker can make thousands
        try:
            identity = kernel.identify(fd)
            is_registered, why = entry.is_same(identity), ""
            if not is_registered:
                if entry.has_refused(identity):
                    return entry, ""
                why = explain_not_folder_deep(kernel, fd, entry.uid, store.areas.dev)
        except (FileNotFoundError, PermissionError):
            return entry, ""  # it is gone, or we are root of another host
        except OSError as error:
            return entry, explain_unreadable(error)
        if why.endswith(MOUNTED):
            return entry, why  # what is below the mount can't be seen now
        if why:
            entry = entry._replace(refused=(*entry.refused, identity))
            write_registered(kernel, registry_fd, entry)
            return entry, ""
        return _register(store, registry_fd, entry, name, fd)


def _register(
    store: Store, registry_fd: Fd, entry: RegisteredFolder, name: Name, fd: Fd
) -> tuple[RegisteredFolder, str]:
    """Register a folder, then move it to where only root makes names. Arguments, Returns, Raises  as for `_look_at`"""
    kernel, u_fd, (_area, new_fd) = store.kernel, store.areas.u_fd, store.areas.area_for_new_folders()
    new_name = free_name(kernel, u_fd, entry.uid)
    moved = entry._replace(name=new_name, identity=kernel.identify(fd))
    write_registered(kernel, registry_fd, moved)
    try:
        kernel.rename_free(new_fd, name, u_fd, new_name)
        if kernel.is_named(fd, u_fd, new_name):
            return moved, ""
        # Its owner put something else there at that moment: move that back, as it is not what was registered.
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
    """Register folders in `u/` that are not registered, in a store that was copied or restored from a backup.

    Only `trashd init` calls this: with it root declares them trusted. Returns what was done, for messages.
    Raises  OSError
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
                    break  # it can't be read now, so no other name may take its place
                with suppress(OSError), kernel.open_beneath(areas.u_fd, name, DIRECTORY) as fd:
                    if not explain_not_folder_deep(kernel, fd, uid, areas.dev):
                        entry = entry._replace(name=name, identity=kernel.identify(fd))
                        write_registered(kernel, registry_fd, entry)
                        messages.append(f"registered u/{name.decode()}, which root or a copy of the store created")
    return messages
