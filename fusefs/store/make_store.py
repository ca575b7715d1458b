"""Makes a store, tests what its filesystem supports, and removes a store that is not needed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from fusefs.core.errors import NoStore, Untrusted
from fusefs.core.identity import Identity
from fusefs.core.names import N_HEX, STORE, Name, VolumeId, parse_user_store_name, user_store_name
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.filesystem_probes import (
    discard_probe_directory,
    discard_rename_probes,
    discard_rights_probe,
    keeps_unnamed,
    probe_renames,
    refuses_strangers,
)
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.runtime_directories import is_temporary_name
from fusefs.store.backing_and_mount import (
    DIRECTORY,
    NO_SPACE_ERRNOS,
    READABLE,
    UNREACHABLE_ERRNOS,
    BackingAndMount,
    is_taken,
    preserved_times,
    suppress_errno,
)
from fusefs.store.layout import (
    CACHEDIR_TAG,
    CACHEDIR_TEXT,
    COPY_PREFIX,
    FOLDER_MODE,
    FOLDERS,
    LOCK,
    NEW,
    NEW_PREFIX,
    OLD,
    PLANTED,
    REGISTRY,
    SWAP_PREFIX,
    USERS,
    VOLUME,
    Areas,
    Store,
    UserFolder,
    Volume,
    drop_acls,
    encode_volume,
    open_areas,
    open_store,
    read_volume,
    store_of,
    take_lock,
    trusted_owners,
    write_small,
)
from fusefs.store.registry_lines import StoreMaker, has_root_mark, makes_root_store, set_root_mark
from fusefs.store.reserve import discard_reserve
from fusefs.store.user_folders import RegisteredFolder, open_user_folder, record_made_by_root, write_registered

_PROBE_BESIDE = Name(b"probe-beside")
"""A directory that a killed `init --beside` of an early version may have left."""
_PROBE_UNNAMED = Name(b"probe-unnamed")
_PROBE_STRANGERS = Name(b"probe-strangers")
_ATTEMPTS = 8
STORE_MODE = 0o755
AREA_MODES = {USERS: 0o755, NEW: 0o1777, REGISTRY: 0o755}
"""The areas in root's store and their modes; a user's own store has mode 0700 and only the area `u/`."""


def name_for_new(kernel: Kernel, base: BackingAndMount) -> Name | None:
    """Return the name for a store that the caller makes in a directory, or None if root's name is taken.

    If the plain name of a user's own store is taken, which any user can cause, the store gets a random name.
    Raises  OSError
    """
    if makes_root_store():
        return None if is_taken(kernel, base.fd, STORE) else STORE
    plain = user_store_name(os.geteuid())
    if is_taken(kernel, base.fd, plain):
        return Name(b"%b.%b" % (plain, os.urandom(N_HEX // 2).hex().encode()))
    return plain


def make_store(kernel: Kernel, base: BackingAndMount, base_path: bytes, name: Name) -> Store:
    """Make a store in a directory, or open the one that another process has just made; takes ownership of `base`.

    The store is built under another name and appears complete with one rename, so no store lacks a volume.json.
    name    from `name_for_new`
    Raises  OSError from making it; Untrusted if the name is taken by an entry that is not our store
    """
    with close_on_error(base):
        made = build_store(kernel, base, name)
    store = open_store(kernel, base, base_path, name)
    if store is None:
        raise Untrusted(os.path.join(base_path, name))
    return mark_if_new(store, made)


def make_unnamed_store(made: ExitStack, kernel: Kernel, base: BackingAndMount, base_path: bytes, name: Name) -> Store:
    """Make a store like `make_store`, but under a name that no process uses, and remove it when `made` closes."""
    from fusefs.store.make_folder import lock_registry

    made.close()  # remove the previous one, which could not take the victim
    new = Name(NEW_PREFIX + os.urandom(6).hex().encode())
    made.enter_context(base)
    made.enter_context(preserved_times(kernel, base.fd))
    made.enter_context(unfinished_store(kernel, base, name, new))
    with ExitStack() as owned:
        here = owned.enter_context(base.reopen(kernel))
        fd = owned.enter_context(kernel.open_dir(here.fd, new))
        store = store_of(kernel, here, base_path, fd, owned, trusted_owners(os.geteuid()), name)
        registry_fd = lock_registry(store, made)
        if registry_fd is not None:  # this takes as much space as registering root's first folder
            write_registered(kernel, registry_fd, RegisteredFolder(os.geteuid()))
        owned.pop_all()
    return store


def mark_if_new(store: Store, made: Identity | None) -> Store:
    """Record that root made a store, if `made` is its identity; takes ownership of `store`. Raises  OSError"""
    if not store.is_ours_as_root() or made is None:
        return store
    with close_on_error(store):
        is_ours = store.kernel.identify(store.fd) == made and record_made_by_root(store)
    return store._replace(maker=StoreMaker.BY_ROOT) if is_ours else store


def build_store(
    kernel: Kernel,
    base: BackingAndMount,
    name: Name,
    identifier: VolumeId | None = None,
    *,
    replaces: Fd | None = None,
) -> Identity | None:
    """Make a store without opening it; return its identity, or None if another store has the name.

    identifier  the volume ID, if there is one already
    replaces    the existing store, which is moved unchanged into the new one
    Raises      OSError
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _build(kernel, base, name, identifier, replaces=replaces)
        except FileNotFoundError:
            # Another init may have removed it as abandoned before it was locked, so start again.
            if attempt == _ATTEMPTS - 1:
                raise
    return None


def _build(
    kernel: Kernel, base: BackingAndMount, name: Name, identifier: VolumeId | None, *, replaces: Fd | None
) -> Identity | None:
    """Build a store under another name, then rename it. Raises  as for `unfinished_store`"""
    new = Name((NEW_PREFIX if replaces is None else SWAP_PREFIX) + os.urandom(6).hex().encode())
    with unfinished_store(kernel, base, name, new, identifier) as fd:
        for _attempt in range(_ATTEMPTS):
            if replaces is not None:
                if _exchange(kernel, base, new, replaces):
                    if not kernel.is_named(fd, base.fd, name):
                        return None
                    with kernel.open_beneath(
                        base.names_fd(), name, DIRECTORY
                    ) as place:  # in the mount, if there is one
                        _set_aside(kernel, base, new, place)
                    sync_dir(kernel, base.fd)
                    return kernel.identify(fd)
                _move_into_new(kernel, base, new, replaces)
            with suppress(FileExistsError):
                kernel.rename_free(base.names_fd(), new, base.names_fd(), name)
                try:
                    sync_dir(kernel, base.fd)
                except PermissionError:  # a user who may create entries in a directory need not be allowed to read it
                    kernel.syncfs(fd)
                return kernel.identify(fd)
            if replaces is None:
                break  # another process's store will do
            if not kernel.is_named(replaces, base.fd, STORE) and _move_old_stores(kernel, base, new):
                break
    return None


def lock_store(kernel: Kernel, fd: Fd, owned: ExitStack) -> bool:
    """Take the repair lock of an opened `.trashd`, and return whether it was free; `owned` releases the lock.

    If the lock file can't be made (full or read-only volume, another user's store), no lock is needed: return True.
    Raises  OSError
    """
    if kernel.is_read_only(fd) or kernel.fstat(fd).st_uid != os.geteuid():
        return True
    with suppress_errno(*NO_SPACE_ERRNOS):
        return take_lock(kernel, fd, owned)  # makes the file if it is missing, as in older stores
    return True


@contextmanager
def unfinished_store(
    kernel: Kernel, base: BackingAndMount, name: Name, new: Name, identifier: VolumeId | None = None
) -> Iterator[Fd]:
    """Make a complete, locked store under a name that no process uses.

    The store is removed after the block, unless the block renames it or moves an old store into it.
    name    the final name
    new     the name until then
    Raises  OSError; FileNotFoundError if another init removed it before it was locked
    """
    if kernel.is_read_only(base.names_fd()):  # through our read-only mount, the store could not be removed again
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    kernel.mkdir(base.fd, new)
    with ExitStack() as opened:
        fd: Fd | None = None
        try:
            fd = opened.enter_context(kernel.open_dir(base.fd, new))
            if kernel.is_local(fd) and not kernel.lock(fd):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), new)
            _fill(kernel, fd, name, identifier or VolumeId(os.urandom(16).hex()))
            yield fd
        finally:
            # The name may now belong to an entry with which the store was exchanged; that entry must not be removed.
            # The entry's owner proves nothing, since a server may have changed it.
            if (fd is None or kernel.is_named(fd, base.fd, new)) and not _has_old_store(kernel, base, new):
                discard_unfinished(kernel, base, new)


def _exchange(kernel: Kernel, base: BackingAndMount, new: Name, old_fd: Fd) -> bool:
    """Exchange a new store with the entry that has the name of root's store.

    This is one step, so no user can put another entry there in between. If the entry is a store that another init has
    just made, exchange the two back.
    old_fd   the entry to be replaced; it may be root's own store with an area that others could change
    Returns  False if the filesystem does not support exchange, or the name is free
    Raises   OSError
    """
    names = base.names_fd()
    with suppress_errno(errno.EINVAL, errno.ENOENT):
        kernel.exchange(names, new, names, STORE)
        with suppress_errno(*UNREACHABLE_ERRNOS), kernel.open_beneath(base.fd, new, READABLE) as old:
            st, is_old = kernel.fstat(old), kernel.is_named(old_fd, base.fd, new)
            if not is_old and st.st_uid == 0 and not st.st_mode & OTHERS_WRITE and has_root_mark(kernel, old):
                kernel.exchange(names, new, names, STORE)
        return True
    return False


def _set_aside(kernel: Kernel, base: BackingAndMount, name: Name, store_fd: Fd) -> None:
    """Move an entry that had the name of root's store into the store that now has the name. Raises  OSError"""
    with suppress(FileNotFoundError):  # its owner has moved it away
        is_directory = stat.S_ISDIR(kernel.stat(base.names_fd(), name).st_mode)
        unique = os.urandom(6).hex().encode()
        kernel.rename_free(
            base.names_fd(), name, store_fd, OLD + unique if is_directory else b"trashd" + PLANTED + unique
        )


def _is_new_store(kernel: Kernel, base: BackingAndMount, name: Name) -> bool:
    """Return whether the entry with a SWAP_PREFIX name is still the new store, or an empty store. Raises  OSError"""
    with suppress_errno(*UNREACHABLE_ERRNOS), kernel.open_dir(base.fd, name) as fd:
        return kernel.fstat(fd).st_uid == 0 and all(_is_empty_in(kernel, fd, area) for area in (USERS, NEW))
    return False


def _finish_exchange(kernel: Kernel, base: BackingAndMount, name: Name) -> list[str]:
    """Set aside the entry that a killed `_exchange` left next to the new store; return messages. Raises  OSError"""
    with kernel.open_beneath(base.names_fd(), STORE, READABLE) as store_fd:
        st = kernel.fstat(store_fd)
        if st.st_uid != 0 or st.st_mode & OTHERS_WRITE:
            return []  # the next init does it, once the store belongs to root
        _set_aside(kernel, base, name, store_fd)
    return [f"moved {printable(name)} aside"]


def _is_empty_in(kernel: Kernel, dir_fd: Fd, name: Name) -> bool:
    try:
        with kernel.open_dir(dir_fd, name) as fd:
            return kernel.is_empty(fd)
    except FileNotFoundError:
        return True


def _move_into_new(kernel: Kernel, base: BackingAndMount, new: Name, old_fd: Fd) -> None:
    """Move a store into a new one that will replace it, unless another entry has the name by now. Raises  OSError"""
    if not stat.S_ISDIR(kernel.fstat(old_fd).st_mode):
        raise NoStore(
            f"{printable(old_fd.path())} (not a directory)", "move it away: this filesystem can't exchange names"
        )
    old = OLD + os.urandom(6).hex().encode()
    with kernel.open_beneath(base.names_fd(), new, DIRECTORY) as place, suppress(FileNotFoundError):
        if not kernel.is_named(old_fd, base.fd, STORE):
            return
        kernel.rename_free(base.names_fd(), STORE, place, old)
        if not kernel.is_named(old_fd, place, old):
            kernel.rename_free(place, old, base.names_fd(), STORE)


def _move_old_stores(kernel: Kernel, base: BackingAndMount, new: Name) -> bool:
    """Move old stores from a new store into another init's store; return False if there is none. Raises  OSError"""
    with ExitStack() as owned:
        try:
            target_fd = owned.enter_context(kernel.open_beneath(base.names_fd(), STORE, READABLE))
        except FileNotFoundError:
            return False
        st = kernel.fstat(target_fd)
        if not stat.S_ISDIR(st.st_mode) or st.st_uid != os.geteuid() or st.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
        source_fd = owned.enter_context(kernel.open_beneath(base.names_fd(), new, READABLE))
        for old in [name for name in kernel.list(source_fd) if name.startswith(OLD)]:
            kernel.rename_free(source_fd, old, target_fd, old)
        kernel.fsync(target_fd)
        kernel.fsync(source_fd)
    return True


def _has_old_store(kernel: Kernel, base: BackingAndMount, new: Name) -> bool:
    """Return whether a new store without its final name contains an old store, or may contain one."""
    try:
        with kernel.open_dir(base.fd, new) as fd:
            return any(one.startswith(OLD) for one in kernel.list(fd))
    except FileNotFoundError:
        return False
    except OSError:
        return True  # the next init checks again


def is_being_replaced(kernel: Kernel, base: BackingAndMount) -> bool:
    """Return whether another running init has moved the old store into a new store without its final name.

    On a network filesystem, this can't be distinguished from a killed init, so the result is False.
    Raises  OSError
    """
    with suppress(PermissionError), kernel.open_dir(base.fd) as readable:
        new = [Name(one) for one in kernel.list(readable) if one.startswith(NEW_PREFIX)]
        own = [one for one in new if owner_of(kernel, base.fd, one) == os.geteuid()]
        return kernel.is_local(readable) and any(_has_old_store(kernel, base, one) for one in own)
    return False


def _finish_new_store(kernel: Kernel, base: BackingAndMount, name: Name, fd: Fd) -> bool:
    """Give a new store its final name if it contains an old store; return whether the new store must be kept.

    This completes the work of a killed init. If another init has made a store by now, move the old store into it.
    """
    names = kernel.list(fd)
    if VOLUME not in names or not any(one.startswith(OLD) for one in names):
        return False
    read_volume(kernel, fd, name)
    with suppress(FileExistsError):
        kernel.rename_free(base.names_fd(), name, base.names_fd(), STORE)
        sync_dir(kernel, base.fd)
        return True
    return not _move_old_stores(kernel, base, name)


def discard_abandoned_stores(kernel: Kernel, base: BackingAndMount) -> list[str]:
    """Remove or complete new stores that our killed commands left unfinished; return messages.

    A running command holds a lock on its store. On network filesystems, another host may hold it, so nothing is done
    there.
    """
    messages = []
    with suppress(PermissionError), kernel.open_dir(base.fd) as readable:
        for name in kernel.list(readable):
            if name.startswith(SWAP_PREFIX) and makes_root_store():
                with suppress_errno(*UNREACHABLE_ERRNOS):
                    if not _is_new_store(kernel, base, Name(name)):
                        messages += _finish_exchange(kernel, base, Name(name))
                        continue
            if not name.startswith(NEW_PREFIX) or owner_of(kernel, base.fd, name) != os.geteuid():
                continue
            with suppress_errno(errno.ENOENT, errno.ENOTEMPTY), kernel.open_dir(base.fd, name) as fd:
                if kernel.is_local(fd) and kernel.lock(fd):
                    if name.startswith(COPY_PREFIX) and not _is_empty_after_cleanup(kernel, fd):
                        continue
                    if _finish_new_store(kernel, base, Name(name), fd):
                        continue
                    if discard_unfinished(kernel, base, Name(name)):
                        messages.append(f"removed {name.decode()}, which was never finished")
    return messages


def _is_empty_after_cleanup(kernel: Kernel, fd: Fd) -> bool:
    """Remove from an unfinished directory what a killed command may have left; return whether it is empty now.

    Nothing else is removed, since the parent's owner can give such a name to any of our directories there.
    """
    st = kernel.fstat(fd)
    if st.st_uid != os.geteuid() or st.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return False
    for name in kernel.list(fd):
        remove = kernel.unlink if is_temporary_name(name) else kernel.rmdir
        with suppress(OSError):
            remove(fd, name)
    return kernel.is_empty(fd)


def owner_of(kernel: Kernel, dir_fd: Fd, name: bytes) -> int | None:
    """Return the owner of an entry, or None if it does not exist, or something is mounted on it."""
    with suppress_errno(errno.ENOENT, errno.EXDEV):
        return kernel.stat(dir_fd, name).st_uid
    return None


def _fill(kernel: Kernel, fd: Fd, name: Name, identifier: VolumeId) -> None:
    is_common = name == STORE
    _check_empty(kernel, fd)  # before the mode changes: the name may now belong to a private directory of root
    take_ownership(kernel, fd, store_mode_of(name))
    _check_empty(kernel, fd)  # the parent's default ACL may have let others in until now
    for area in AREA_MODES if is_common else (USERS,):
        make_area(kernel, fd, area, AREA_MODES[area])
    write_small(kernel, fd, CACHEDIR_TAG, CACHEDIR_TEXT, 0o644)
    kernel.create(fd, LOCK).close()
    if is_common:
        set_root_mark(kernel, fd)
    write_volume(kernel, fd, probe_filesystem(kernel, fd, identifier))


def _check_empty(kernel: Kernel, fd: Fd) -> None:
    """Raise FileNotFoundError if a directory has entries: a user may have given the name to another directory."""
    if not kernel.is_empty(fd):
        raise FileNotFoundError(errno.ENOENT, "it was replaced by another directory")


def store_mode_of(name: Name) -> int:
    return STORE_MODE if parse_user_store_name(name) is None else FOLDER_MODE


def make_area(kernel: Kernel, fd: Fd, name: Name, mode: int) -> None:
    """Make a directory with this mode and no ACL in an opened `.trashd`, or repair an existing one. Raises  OSError"""
    with suppress(FileExistsError):
        kernel.mkdir(fd, name)
    with kernel.open_dir(fd, name) as area:
        if needs_repair(kernel, area, mode):
            take_ownership(kernel, area, mode)


def write_volume(kernel: Kernel, fd: Fd, volume: Volume) -> None:
    write_small(kernel, fd, VOLUME, encode_volume(volume), 0o644)
    kernel.fsync(fd)


def take_ownership(kernel: Kernel, fd: Fd, mode: int) -> None:
    """Set the owner and group to the caller's, set the mode, and remove ACLs that the parent's default ACL added."""
    drop_acls(kernel, fd)
    kernel.chown(fd, os.geteuid(), os.getegid())
    kernel.chmod(fd, mode)


def sync_dir(kernel: Kernel, fd: Fd) -> None:
    with kernel.open_dir(fd) as readable:
        kernel.fsync(readable)


def discard_unfinished(kernel: Kernel, base: BackingAndMount, name: Name) -> bool:
    """Remove an unfinished store that a killed `make_store` left; return whether it is gone.

    A finished store may also have an unfinished one's name: after an exchange with a new store, or because a user gave
    it the name. If any user has a folder in the store, the store is kept.
    """
    try:
        fd = kernel.open_dir(base.fd, name)
    except OSError:
        return False
    with fd:
        if not all(_is_empty_in(kernel, fd, area) for area in (USERS, NEW)):
            return False
        discard_trials(kernel, fd)
        for entry in (VOLUME, CACHEDIR_TAG, LOCK, Name(VOLUME + b".new"), Name(CACHEDIR_TAG + b".new")):
            with suppress(FileNotFoundError):
                kernel.unlink(fd, entry)
        with suppress(FileNotFoundError), kernel.open_dir(fd, REGISTRY) as registry:
            for entry in map(Name, kernel.list(registry)):
                kernel.unlink(registry, entry)
        for area in (NEW, REGISTRY, USERS):
            with suppress(FileNotFoundError):
                kernel.rmdir(fd, area)
    kernel.rmdir(base.names_fd(), name)
    return True


def discard_trials(kernel: Kernel, fd: Fd) -> None:
    """Remove what a killed `probe_filesystem` left in an opened `.trashd`. Raises  OSError"""
    discard_rename_probes(kernel, fd)
    with suppress(FileNotFoundError):
        kernel.unlink(fd, _PROBE_UNNAMED)
    discard_rights_probe(kernel, fd, _PROBE_STRANGERS)
    discard_probe_directory(kernel, fd, _PROBE_BESIDE)


def probe_filesystem(kernel: Kernel, fd: Fd, identifier: VolumeId) -> Volume:
    """Test what the filesystem supports in an opened `.trashd`; return the content of volume.json. Raises  OSError"""
    flags, lasts = probe_renames(kernel, fd), keeps_unnamed(kernel, fd, _PROBE_UNNAMED)
    refuses = refuses_strangers(kernel, fd, _PROBE_STRANGERS)
    return Volume(
        identifier,
        flags.exchange,
        kernel.filesystem(fd),
        unnamed=lasts,
        strangers_refused=refuses,
        noreplace=flags.noreplace,
        store=kernel.identify(fd),
    )


def needs_repair(kernel: Kernel, fd: Fd, mode: int) -> bool:
    st = kernel.fstat(fd)
    acl = any(name.startswith("system.posix_acl_") for name in kernel.xattr_names(fd))
    return st.st_uid != os.geteuid() or stat.S_IMODE(st.st_mode) != mode or acl


def unmake_store(kernel: Kernel, base: BackingAndMount, base_path: bytes, name: Name) -> None:
    """Remove one of our stores, unless it is in use by now.

    If all folders are gone, the store first gets the name of an unfinished store, so that no process begins to use it.
    Directories are removed only with rmdir: if a folder appears nevertheless, it is kept, and so is the store.
    """
    if not _has_no_folder(kernel, base.fd, base_path, name):
        return
    hidden = Name(NEW_PREFIX + os.urandom(6).hex().encode())
    names = base.names_fd()
    kernel.rename_free(names, name, names, hidden)
    try:
        with kernel.open_dir(base.fd, hidden) as fd, open_areas(kernel, fd, name) as areas:
            _remove_areas(kernel, fd, areas)
    except OSError:
        kernel.rename_free(names, hidden, names, name)
        return
    discard_unfinished(kernel, base, hidden)


def _remove_areas(kernel: Kernel, fd: Fd, areas: Areas) -> None:
    """Remove the areas if all are empty; otherwise restore them. Raises  OSError"""
    removed: list[tuple[Name, int]] = []
    try:
        for name, area in areas.all():
            mode = stat.S_IMODE(kernel.fstat(area).st_mode)
            kernel.rmdir(fd, name)
            removed.append((name, mode))
    except OSError:
        for name, mode in removed:
            make_area(kernel, fd, name, mode)
        raise


def _has_no_folder(kernel: Kernel, base_fd: Fd, base_path: bytes, name: Name) -> bool:
    """Remove our own folder if it is empty; return whether the store contains no folder."""
    base = BackingAndMount(kernel.open_beneath(base_fd, b".", DIRECTORY))
    store = open_store(kernel, base, base_path, name)
    if store is None:
        return False
    with store:
        with suppress(OSError):
            folder = open_user_folder(store, os.geteuid())
            if folder is not None:
                with folder:
                    remove_folder(folder, dict(store.areas.all())[folder.area])
        return all(kernel.is_empty(area) for _name, area in store.areas.all())


def remove_folder(folder: UserFolder, area_fd: Fd) -> None:
    """Remove one of our folders if it is empty. Raises  OSError"""
    kernel = folder.store.kernel
    discard_reserve(folder)
    for part in FOLDERS:
        with suppress(FileNotFoundError):
            kernel.rmdir(folder.fd, part)
    kernel.rmdir(area_fd, folder.name)
