"""Making a store, proving what its filesystem can do, and removing one that is not needed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from fusefs.core.errors import NoStore, Untrusted
from fusefs.core.identity import Identity
from fusefs.core.names import N_HEX, STORE, Name, VolumeId, user_store, whose_store
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.filesystem_probes import (
    discard_rename_trials,
    discard_trial,
    discard_trial_directory,
    keeps_unnamed,
    probe_renames,
    refuses_strangers,
)
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.runtime_directories import is_nameless
from fusefs.store.backing_and_mount import (
    DIRECTORY,
    FULL,
    OUT_OF_REACH,
    READABLE,
    BackingAndMount,
    is_taken,
    same_times,
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
from fusefs.store.registry_lines import StoreMaker, is_noted, makes_common, note_made
from fusefs.store.reserve import discard_reserve
from fusefs.store.user_folders import RegisteredFolder, open_user, vouch, write_registered

_PROBE_BESIDE = Name(b"probe-beside")
"""What a killed `init --beside` of 0.3.0 left."""
_PROBE_UNNAMED = Name(b"probe-unnamed")
_PROBE_STRANGERS = Name(b"probe-strangers")
_ATTEMPTS = 8
STORE_MODE = 0o755
AREA_MODES = {USERS: 0o755, NEW: 0o1777, REGISTRY: 0o755}
"""Of a store of root's; a user's own is 0700, and has the first of these areas alone."""


def name_for_new(kernel: Kernel, base: BackingAndMount) -> Name | None:
    """The name of the store that the caller would make in a directory; None if something has it that is not to go.

    A user's own gets another one where something has the plain one, which anybody could put there. Raises  OSError
    """
    if makes_common():
        return None if is_taken(kernel, base.fd, STORE) else STORE
    plain = user_store(os.geteuid())
    if is_taken(kernel, base.fd, plain):
        return Name(b"%b.%b" % (plain, os.urandom(N_HEX // 2).hex().encode()))
    return plain


def make_store(kernel: Kernel, base: BackingAndMount, base_path: bytes, name: Name) -> Store:
    """A new store in a directory, or the one that another process made meanwhile; takes over that.

    It is built under another name and appears complete by one rename: there is no store without a volume.json.
    name    as `name_for_new` has it
    Raises  OSError from making it; Untrusted if the name is taken by something that is no store of ours
    """
    with closed_on_error(base):
        made = build_store(kernel, base, name)
    store = open_store(kernel, base, base_path, name)
    if store is None:
        raise Untrusted(os.path.join(base_path, name))
    return vouched(store, made)


def make_unnamed(made: ExitStack, kernel: Kernel, base: BackingAndMount, base_path: bytes, name: Name) -> Store:
    """A store as `make_store` makes one, but with a name that no process looks for, and gone when `made` closes."""
    from fusefs.store.make_folder import take_registry

    made.close()  # the last one could not take it
    new = Name(NEW_PREFIX + os.urandom(6).hex().encode())
    made.enter_context(base)
    made.enter_context(same_times(kernel, base.fd))
    made.enter_context(unfinished(kernel, base, name, new))
    with ExitStack() as owned:
        here = owned.enter_context(base.again(kernel))
        fd = owned.enter_context(kernel.open_dir(here.fd, new))
        store = store_of(kernel, here, base_path, fd, owned, trusted_owners(os.geteuid()), name)
        registry_fd = take_registry(store, made)
        if registry_fd is not None:  # what root's first folder takes besides
            write_registered(kernel, registry_fd, RegisteredFolder(os.geteuid()))
        owned.pop_all()
    return store


def vouched(store: Store, made: Identity | None) -> Store:
    """An opened store, for which root vouches if it is the one that was made now; takes it over. Raises  OSError"""
    if not store.is_roots_to_keep() or made is None:
        return store
    with closed_on_error(store):
        is_ours = store.kernel.identify(store.fd) == made and vouch(store)
    return store._replace(made=StoreMaker.BY_ROOT) if is_ours else store


def build_store(
    kernel: Kernel,
    base: BackingAndMount,
    name: Name,
    identifier: VolumeId | None = None,
    *,
    replaces: Fd | None = None,
) -> Identity | None:
    """Make a store without opening it; the identity of what was made, None if another one is there.

    name        of the store
    identifier  of the volume, if it has one already
    replaces    that store, which is there, lies in the new one from then on, as it is
    Raises      OSError
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _build(kernel, base, name, identifier, replaces=replaces)
        except FileNotFoundError:
            # An init may take it for an abandoned one in the moment before it is locked: start again.
            if attempt == _ATTEMPTS - 1:
                raise
    return None


def _build(
    kernel: Kernel, base: BackingAndMount, name: Name, identifier: VolumeId | None, *, replaces: Fd | None
) -> Identity | None:
    """A store under another name, then renamed. Raises  as `unfinished`"""
    new = Name((NEW_PREFIX if replaces is None else SWAP_PREFIX) + os.urandom(6).hex().encode())
    with unfinished(kernel, base, name, new, identifier) as fd:
        for _attempt in range(_ATTEMPTS):
            if replaces is not None:
                if _exchange(kernel, base, new, replaces):
                    if not kernel.is_named(fd, base.fd, name):
                        return None
                    with kernel.open_beneath(base.names(), name, DIRECTORY) as place:  # in the mount, if there is one
                        _set_aside(kernel, base, new, place)
                    sync_dir(kernel, base.fd)
                    return kernel.identify(fd)
                _take_in(kernel, base, new, replaces)
            with suppress(FileExistsError):
                kernel.rename_free(base.names(), new, base.names(), name)
                try:
                    sync_dir(kernel, base.fd)
                except PermissionError:  # who may make names in a directory need not be allowed to read it
                    kernel.syncfs(fd)
                return kernel.identify(fd)
            if replaces is None:
                break  # another process's is as good
            if not kernel.is_named(replaces, base.fd, STORE) and _hand_over(kernel, base, new):
                break
    return None


def take_store(kernel: Kernel, fd: Fd, owned: ExitStack) -> bool:
    """Take the lock for making an opened `.trashd` what it should be, owned by `owned`; whether it was free.

    Where it can't be made, on a full volume, a read-only one or in another user's store, there is none.
    Raises  OSError
    """
    if kernel.is_read_only(fd) or kernel.fstat(fd).st_uid != os.geteuid():
        return True
    with suppress_errno(*FULL):
        return take_lock(kernel, fd, owned)  # a store of before has none
    return True


@contextmanager
def unfinished(
    kernel: Kernel, base: BackingAndMount, name: Name, new: Name, identifier: VolumeId | None = None
) -> Iterator[Fd]:
    """A whole store under a name that is never looked for, locked; gone again unless the block gives it another one, or
    moves an old one into it.

    name    that it is to have; `new`, that it has meanwhile
    Raises  OSError; FileNotFoundError if an init was faster than the lock
    """
    if kernel.is_read_only(base.names()):  # where a mount of ours is, what is made below it could not be removed
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
            # Not what it was exchanged with. Its owner proves nothing: a server may have made it another user's.
            if (fd is None or kernel.is_named(fd, base.fd, new)) and not _has_taken_in(kernel, base, new):
                discard_unfinished(kernel, base, new)


def _exchange(kernel: Kernel, base: BackingAndMount, new: Name, judged: Fd) -> bool:
    """Exchange a new store with whatever has the name of root's now, in one step: no user can put another thing there
    in between. Where that is a store which another init has made meanwhile, both go back.

    judged   what is to be replaced: it may well be root's own, with an area in it that others could change
    Returns  False where the filesystem exchanges nothing, or nothing has the name
    Raises   OSError
    """
    names = base.names()
    with suppress_errno(errno.EINVAL, errno.ENOENT):
        kernel.exchange(names, new, names, STORE)
        with suppress_errno(*OUT_OF_REACH), kernel.open_beneath(base.fd, new, READABLE) as old:
            st, is_judged = kernel.fstat(old), kernel.is_named(judged, base.fd, new)
            if not is_judged and st.st_uid == 0 and not st.st_mode & OTHERS_WRITE and is_noted(kernel, old):
                kernel.exchange(names, new, names, STORE)
        return True
    return False


def _set_aside(kernel: Kernel, base: BackingAndMount, name: Name, store_fd: Fd) -> None:
    """Move what had the name of root's store into the store that has it now. Raises  OSError"""
    with suppress(FileNotFoundError):  # its owner took it away
        is_directory = stat.S_ISDIR(kernel.stat(base.names(), name).st_mode)
        unique = os.urandom(6).hex().encode()
        kernel.rename_free(base.names(), name, store_fd, OLD + unique if is_directory else b"trashd" + PLANTED + unique)


def _is_new(kernel: Kernel, base: BackingAndMount, name: Name) -> bool:
    """Whether what has the name of a store that was to be exchanged is that one, or held nothing. Raises  OSError"""
    with suppress_errno(*OUT_OF_REACH), kernel.open_dir(base.fd, name) as fd:
        return kernel.fstat(fd).st_uid == 0 and all(_is_empty_in(kernel, fd, area) for area in (USERS, NEW))
    return False


def _finish_exchange(kernel: Kernel, base: BackingAndMount, name: Name) -> list[str]:
    """Set aside what a killed `_exchange` left beside the new store; what was done. Raises  OSError"""
    with kernel.open_beneath(base.names(), STORE, READABLE) as store_fd:
        st = kernel.fstat(store_fd)
        if st.st_uid != 0 or st.st_mode & OTHERS_WRITE:
            return []  # the next init, when there is one of root's
        _set_aside(kernel, base, name, store_fd)
    return [f"moved {printable(name)} aside"]


def _is_empty_in(kernel: Kernel, dir_fd: Fd, name: Name) -> bool:
    try:
        with kernel.open_dir(dir_fd, name) as fd:
            return kernel.is_empty(fd)
    except FileNotFoundError:
        return True


def _take_in(kernel: Kernel, base: BackingAndMount, new: Name, judged: Fd) -> None:
    """Move a store into a new one that is to take its place; nothing, if another one has its name by now.

    Raises  OSError
    """
    if not stat.S_ISDIR(kernel.fstat(judged).st_mode):
        raise NoStore(
            f"{printable(judged.path())} (not a directory)", "move it away: this filesystem can't exchange names"
        )
    old = OLD + os.urandom(6).hex().encode()
    with kernel.open_beneath(base.names(), new, DIRECTORY) as place, suppress(FileNotFoundError):
        if not kernel.is_named(judged, base.fd, STORE):
            return
        kernel.rename_free(base.names(), STORE, place, old)
        if not kernel.is_named(judged, place, old):
            kernel.rename_free(place, old, base.names(), STORE)


def _hand_over(kernel: Kernel, base: BackingAndMount, new: Name) -> bool:
    """Move the old stores in a new one into a store of ours that another init has made meanwhile; whether there is one.

    Raises  OSError
    """
    with ExitStack() as owned:
        try:
            there = owned.enter_context(kernel.open_beneath(base.names(), STORE, READABLE))
        except FileNotFoundError:
            return False
        st = kernel.fstat(there)
        if not stat.S_ISDIR(st.st_mode) or st.st_uid != os.geteuid() or st.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
        place = owned.enter_context(kernel.open_beneath(base.names(), new, READABLE))
        for old in [name for name in kernel.list(place) if name.startswith(OLD)]:
            kernel.rename_free(place, old, there, old)
        kernel.fsync(there)
        kernel.fsync(place)
    return True


def _has_taken_in(kernel: Kernel, base: BackingAndMount, new: Name) -> bool:
    """Whether an old store lies, or may lie, in a new one that does not have its name yet."""
    try:
        with kernel.open_dir(base.fd, new) as fd:
            return any(one.startswith(OLD) for one in kernel.list(fd))
    except FileNotFoundError:
        return False
    except OSError:
        return True  # the next init looks again


def is_being_replaced(kernel: Kernel, base: BackingAndMount) -> bool:
    """Whether an init works on a store that has no name just now; those of killed ones are finished. Raises  OSError

    On a network filesystem nothing shows that one was killed.
    """
    with suppress(PermissionError), kernel.open_dir(base.fd) as readable:
        new = [Name(one) for one in kernel.list(readable) if one.startswith(NEW_PREFIX)]
        own = [one for one in new if owner_of(kernel, base.fd, one) == os.geteuid()]
        return kernel.is_local(readable) and any(_has_taken_in(kernel, base, one) for one in own)
    return False


def _finish(kernel: Kernel, base: BackingAndMount, name: Name, fd: Fd) -> bool:
    """Give a new store its name whose maker was killed when an old one was in it already; whether it must stay.

    Where another init has made one meanwhile, that one gets what was in it.
    """
    names = kernel.list(fd)
    if VOLUME not in names or not any(one.startswith(OLD) for one in names):
        return False
    read_volume(kernel, fd, name)
    with suppress(FileExistsError):
        kernel.rename_free(base.names(), name, base.names(), STORE)
        sync_dir(kernel, base.fd)
        return True
    return not _hand_over(kernel, base, name)


def discard_abandoned(kernel: Kernel, base: BackingAndMount) -> list[str]:
    """Remove what killed makers of ours left; one with a running maker is locked, or may be another host's."""
    done = []
    with suppress(PermissionError), kernel.open_dir(base.fd) as readable:
        for name in kernel.list(readable):
            if name.startswith(SWAP_PREFIX) and makes_common():
                with suppress_errno(*OUT_OF_REACH):
                    if not _is_new(kernel, base, Name(name)):
                        done += _finish_exchange(kernel, base, Name(name))
                        continue
            if not name.startswith(NEW_PREFIX) or owner_of(kernel, base.fd, name) != os.geteuid():
                continue
            with suppress_errno(errno.ENOENT, errno.ENOTEMPTY), kernel.open_dir(base.fd, name) as fd:
                if kernel.is_local(fd) and kernel.lock(fd):
                    if name.startswith(COPY_PREFIX) and not _is_emptied(kernel, fd):
                        continue
                    if _finish(kernel, base, Name(name), fd):
                        continue
                    if discard_unfinished(kernel, base, Name(name)):
                        done.append(f"removed {name.decode()}, which was never finished")
    return done


def _is_emptied(kernel: Kernel, fd: Fd) -> bool:
    """Whether a directory is empty but for what a killed maker leaves in its own.

    The owner of the one above can give its name to any directory of ours there: nothing but that is removed.
    """
    st = kernel.fstat(fd)
    if st.st_uid != os.geteuid() or st.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return False
    for name in kernel.list(fd):
        remove = kernel.unlink if is_nameless(name) else kernel.rmdir
        with suppress(OSError):
            remove(fd, name)
    return kernel.is_empty(fd)


def owner_of(kernel: Kernel, dir_fd: Fd, name: bytes) -> int | None:
    """The owner of what has a name; None where something is mounted, or nothing is left."""
    with suppress_errno(errno.ENOENT, errno.EXDEV):
        return kernel.stat(dir_fd, name).st_uid
    return None


def _fill(kernel: Kernel, fd: Fd, name: Name, identifier: VolumeId) -> None:
    is_common = name == STORE
    _check_empty(kernel, fd)  # before its mode changes: a closed directory of root's may have the name
    own(kernel, fd, mode_of(name))
    _check_empty(kernel, fd)  # an ACL of the parent's may have let others in until now
    for area in AREA_MODES if is_common else (USERS,):
        make_area(kernel, fd, area, AREA_MODES[area])
    write_small(kernel, fd, CACHEDIR_TAG, CACHEDIR_TEXT, 0o644)
    kernel.create(fd, LOCK).close()
    if is_common:
        note_made(kernel, fd)
    write_volume(kernel, fd, prove(kernel, fd, identifier))


def _check_empty(kernel: Kernel, fd: Fd) -> None:
    """Raises  FileNotFoundError: a user who may write above it gave its name to another directory"""
    if not kernel.is_empty(fd):
        raise FileNotFoundError(errno.ENOENT, "another directory replaced it")


def mode_of(name: Name) -> int:
    """The mode of a store that has such a name."""
    return STORE_MODE if whose_store(name) is None else FOLDER_MODE


def make_area(kernel: Kernel, fd: Fd, name: Name, mode: int) -> None:
    """A directory of ours with that mode and no ACL in an opened `.trashd`, or the one that is there.

    Raises  OSError
    """
    with suppress(FileExistsError):
        kernel.mkdir(fd, name)
    with kernel.open_dir(fd, name) as area:
        if is_wrong(kernel, area, mode):
            own(kernel, area, mode)


def write_volume(kernel: Kernel, fd: Fd, volume: Volume) -> None:
    """Write volume.json, durably. Raises  OSError"""
    write_small(kernel, fd, VOLUME, encode_volume(volume), 0o644)
    kernel.fsync(fd)


def own(kernel: Kernel, fd: Fd, mode: int) -> None:
    """Ours, that mode, and no ACL: what a parent's default ACL would have given to others is taken back."""
    drop_acls(kernel, fd)
    kernel.chown(fd, os.geteuid(), os.getegid())
    kernel.chmod(fd, mode)


def sync_dir(kernel: Kernel, fd: Fd) -> None:
    with kernel.open_dir(fd) as readable:
        kernel.fsync(readable)


def discard_unfinished(kernel: Kernel, base: BackingAndMount, name: Name) -> bool:
    """Remove what a killed `make_store` left; whether it is gone. A store that was finished has no such name, but for
    one that a new one was exchanged with, or that was given it: that holds something, and stays.
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
    kernel.rmdir(base.names(), name)
    return True


def discard_trials(kernel: Kernel, fd: Fd) -> None:
    """Remove what a killed `prove` left in an opened `.trashd`. Raises  OSError"""
    discard_rename_trials(kernel, fd)
    with suppress(FileNotFoundError):
        kernel.unlink(fd, _PROBE_UNNAMED)
    discard_trial(kernel, fd, _PROBE_STRANGERS)
    discard_trial_directory(kernel, fd, _PROBE_BESIDE)


def prove(kernel: Kernel, fd: Fd, identifier: VolumeId) -> Volume:
    """What volume.json is to say: what was seen to work in an opened `.trashd`. Raises  OSError"""
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


def is_wrong(kernel: Kernel, fd: Fd, mode: int) -> bool:
    st = kernel.fstat(fd)
    acl = any(name.startswith("system.posix_acl_") for name in kernel.xattr_names(fd))
    return st.st_uid != os.geteuid() or stat.S_IMODE(st.st_mode) != mode or acl


def unmake_store(kernel: Kernel, base: BackingAndMount, base_path: bytes, name: Name) -> None:
    """Remove a store of ours that is not used; one that is used by now stays as it is.

    Where all folders are gone it gets the name of an unfinished one, so that no process comes to it meanwhile; rmdir
    alone removes directories, so that a folder which appeared all the same is kept, and the store with it.
    """
    if not _has_no_folder(kernel, base.fd, base_path, name):
        return
    hidden = Name(NEW_PREFIX + os.urandom(6).hex().encode())
    names = base.names()
    kernel.rename_free(names, name, names, hidden)
    try:
        with kernel.open_dir(base.fd, hidden) as fd, open_areas(kernel, fd, name) as areas:
            _remove_areas(kernel, fd, areas)
    except OSError:
        kernel.rename_free(names, hidden, names, name)
        return
    discard_unfinished(kernel, base, hidden)


def _remove_areas(kernel: Kernel, fd: Fd, areas: Areas) -> None:
    """Remove them if they are empty, or none. Raises  OSError"""
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
    """Remove our own folder, if there is nothing in it; whether no user has one now."""
    base = BackingAndMount(kernel.open_beneath(base_fd, b".", DIRECTORY))
    store = open_store(kernel, base, base_path, name)
    if store is None:
        return False
    with store:
        with suppress(OSError):
            folder = open_user(store, os.geteuid())
            if folder is not None:
                with folder:
                    remove_folder(folder, dict(store.areas.all())[folder.area])
        return all(kernel.is_empty(area) for _name, area in store.areas.all())


def remove_folder(folder: UserFolder, area_fd: Fd) -> None:
    """Remove a folder of ours, if nothing is in it. Raises  OSError"""
    kernel = folder.store.kernel
    discard_reserve(folder)
    for part in FOLDERS:
        with suppress(FileNotFoundError):
            kernel.rmdir(folder.fd, part)
    kernel.rmdir(area_fd, folder.name)
