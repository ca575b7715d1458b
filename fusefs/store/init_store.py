"""Implements `trashd init`: makes or repairs the store in a directory, or replaces an entry that has a store's name."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack, suppress
from typing import NamedTuple

from fusefs.core.errors import BrokenStore, Busy, NoStore, NotPermitted, TrashdError, Untrusted
from fusefs.core.identity import Identity, IdentityMatch, compare
from fusefs.core.names import STORE, Name, VolumeId, join_path, parse_uid_name, user_store_name
from fusefs.core.printable_names import printable, shell_word
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.mountinfo import disk_of, find_mount, read_mounts, relative_to
from fusefs.linux.runtime_directories import make_dir, persistent_dir, read_file, replace_file
from fusefs.store.backing_and_mount import (
    ABSENT_ERRNOS,
    READABLE,
    UNREACHABLE_ERRNOS,
    BackingAndMount,
    is_taken,
    suppress_errno,
)
from fusefs.store.layout import (
    NEW,
    NEW_PREFIX,
    NODES,
    OLD,
    PLANTED,
    UNMOUNT,
    USERS,
    VOLUME,
    VOLUME_MAX_BYTES,
    Store,
    Volume,
    decode_volume,
    open_store,
    own_store_names,
    read_small,
    read_volume,
    store_of,
    trusted_owners,
)
from fusefs.store.make_folder import abandoned_folders, discard_abandoned_folders, register_unregistered
from fusefs.store.make_store import (
    AREA_MODES,
    STORE_MODE,
    build_store,
    discard_abandoned_stores,
    discard_trials,
    is_being_replaced,
    lock_store,
    make_area,
    mark_if_new,
    name_for_new,
    needs_repair,
    owner_of,
    probe_filesystem,
    store_mode_of,
    take_ownership,
    write_volume,
)
from fusefs.store.mounted_paths import open_both_sides
from fusefs.store.recover import recover
from fusefs.store.registry_lines import (
    StoreMaker,
    explain_missing_mark,
    find_maker,
    has_root_mark,
    hint_for_unknown_maker,
    makes_root_store,
    read_own_lines,
)
from fusefs.store.root_squash import refuse_squashed
from fusefs.store.tidy_folder import inspect_store

_CHOSEN_DISKS_FILE = b"chosen-disks"
_MOST_BYTES = 1 << 16


def read_chosen() -> dict[str, str]:
    """Return the names of the disks that the caller has chosen since the last boot, by volume ID."""
    try:
        lines = read_file(os.path.join(persistent_dir(), _CHOSEN_DISKS_FILE), _MOST_BYTES).decode("ascii").splitlines()
    except (OSError, ValueError):
        return {}
    chosen = (line.partition(" ") for line in lines)
    return {volume: disk for volume, _blank, disk in chosen if disk.startswith(boot_id())}


def record_chosen_disk(store: Store) -> list[bytes]:
    """If a store's copies are mounted, record its disk as the original; return the copies' paths. Raises  OSError"""
    kernel, mounts = store.kernel, read_mounts()
    mount = find_mount(kernel, store.fd, mounts)
    disk = disk_of(mount)
    if mount is None or not disk.is_block:
        return []
    way, copies = relative_to(store.base_path, mount.point), list[bytes]()
    for one in mounts:
        other = disk_of(one)
        if other.is_block and other.name != disk.name:
            path = os.path.join(one.point, way) if way else one.point
            with suppress(OSError, TrashdError):
                other_store = open_store(kernel, open_both_sides(kernel, path, mounts), path)
                if other_store is not None:
                    with other_store:
                        copies += [path] if other_store.volume.id == store.volume.id else []
    if copies:
        chosen = {**read_chosen(), str(store.volume.id): disk.name}
        text = "".join(f"{volume} {name}\n" for volume, name in chosen.items())
        replace_file(os.path.join(make_dir(persistent_dir()), _CHOSEN_DISKS_FILE), text.encode(), 0o600)
    return copies


_MAX_KEPT_NAME_BYTES = 200


class Initialised(NamedTuple):
    """The result of `trashd init`: the store's path, whether it was just made, and what was repaired.

    unnoted  what follows if root's store has no mark that root made it; empty if it has the mark
    """

    path: bytes
    volume: Volume
    made: bool
    repaired: tuple[str, ...]
    unnoted: str = ""


def initialise(
    kernel: Kernel,
    base: BackingAndMount,
    base_path: bytes,
    *,
    is_made_by_root: bool = False,
    replaces: bool = False,
) -> tuple[Store, Initialised]:
    """Make the caller's store in a directory, or check and repair the existing one; takes ownership of `base`.

    A store that another user could change, or could have assembled from root's directories, is refused. With
    `replaces`, such a store is moved unchanged into a new store. Any user may have moved entries into the old store, or
    moved it as a whole. So each owner's next command takes only that owner's folder out of the old store.
    is_made_by_root  root confirms that root made the existing store, although nothing shows this (it was made on
                     another machine, or is a copy)
    replaces  root requests that an entry with the name of root's store is replaced if it is not a trusted store
    Raises    NoStore if `.trashd` is not a directory; Untrusted; NotPermitted; Busy if another command is repairing it;
              UnknownFormat
    """
    with close_on_error(base):
        if replaces and not makes_root_store():
            raise NotPermitted(base_path, "only root can replace a .trashd, and only outside containers")
        name = _name_of(kernel, base, base_path, is_made_by_root=is_made_by_root)
        step = _ensure_store(kernel, base, base_path, name, is_made_by_root=is_made_by_root, replaces=replaces)
    store = open_store(kernel, base, base_path, name)
    if store is None:
        raise Untrusted(os.path.join(base_path, name))
    store = mark_if_new(store, step.identity)
    with close_on_error(store):
        repaired = step.repaired
        _recover_abandoned(store)
        for _area, fd in store.areas.all():
            discard_abandoned_folders(kernel, fd, os.geteuid() or None)
        if store.is_ours_as_root() and store.areas.new_fd is not None:
            repaired += _rename_after_owners(kernel, store.areas.new_fd)
        inspect_store(store)
        if store.is_ours_as_root():
            repaired += register_unregistered(store)
        lacks = store.is_ours_as_root() and not has_root_mark(kernel, store.fd)
    unnoted = explain_missing_mark(base_path) if lacks else ""
    return store, Initialised(store.path(), store.volume, step.is_new, tuple(repaired), unnoted)


class _InitStep(NamedTuple):
    """The result of `_ensure_store`. identity: of the store that was made or repaired; None if another init made it"""

    is_new: bool
    identity: Identity | None
    repaired: list[str]


def _name_of(kernel: Kernel, base: BackingAndMount, base_path: bytes, *, is_made_by_root: bool) -> Name:
    """Return the name of the store that `init` makes or repairs: the one for the caller's swaps. Raises  OSError"""
    if makes_root_store():
        return STORE
    with suppress(Untrusted):
        try:
            store = open_store(kernel, base.reopen(kernel), base_path)
        except BrokenStore:
            return STORE
        if store is not None:
            with store:
                if is_made_by_root or not store.has_unknown_maker():
                    return STORE
    for name in own_store_names(kernel, base.fd, os.geteuid()):
        with suppress_errno(*UNREACHABLE_ERRNOS):
            st = kernel.stat(base.fd, name)
            is_ours = (st.st_uid, stat.S_IMODE(st.st_mode)) == (os.geteuid(), store_mode_of(name))
            if is_ours and is_taken(kernel, base.fd, Name(join_path(name, USERS))):
                return name
    return name_for_new(kernel, base) or STORE


def _recover_abandoned(store: Store) -> None:
    """Recover folders that still have a temporary name: a killed `trashd check` may have left a container in them."""
    for folder in abandoned_folders(store):
        recover(folder)


def _remove_killed_checks(kernel: Kernel, base: BackingAndMount) -> None:
    """In each unfinished store that a killed check made, remove the folder that the check left."""
    with suppress(PermissionError), kernel.open_dir(base.fd) as readable:
        for name in kernel.list(readable):
            if name.startswith(NEW_PREFIX) and owner_of(kernel, base.fd, name) == os.geteuid():
                with suppress(OSError, TrashdError), ExitStack() as owned:  # the store may be incomplete
                    here = owned.enter_context(base.reopen(kernel))
                    fd = owned.enter_context(kernel.open_dir(here.fd, name))
                    ours = STORE if makes_root_store() else user_store_name(os.geteuid())
                    store = store_of(kernel, here, here.fd.path(), fd, owned, trusted_owners(os.geteuid()), ours)
                    _recover_abandoned(store)
                    for _area, area_fd in store.areas.all():
                        discard_abandoned_folders(kernel, area_fd, os.geteuid())


def _ensure_store(
    kernel: Kernel,
    base: BackingAndMount,
    base_path: bytes,
    name: Name,
    *,
    is_made_by_root: bool,
    replaces: bool,
) -> _InitStep:
    _remove_killed_checks(kernel, base)
    repaired = discard_abandoned_stores(kernel, base)
    where = os.path.join(base_path, name)
    fd = _open_untrusted(kernel, base, where, name, replaces=replaces)
    if fd is None:
        if is_being_replaced(kernel, base):
            raise Busy(where)
        return _InitStep(True, build_store(kernel, base, name), repaired)
    with fd, ExitStack() as owned:
        places = {base_path, os.readlink(base.fd.path())}
        if stat.S_ISDIR(kernel.fstat(fd).st_mode):
            old = _read_untrusted_volume(kernel, fd, where)
            identifier = _registered_id(kernel, fd, places) if old is None else old.id
            why = ""
            if name == STORE and os.geteuid() == 0:  # users repair their own stores
                if _may_be_changed(kernel, fd):
                    why = "other users can change it"
                elif not is_made_by_root and find_maker(kernel, fd, places) is StoreMaker.UNKNOWN:
                    why = "other users may have assembled it from root's directories"
        else:
            identifier, why = None, "it is not a directory"
        if not why:
            if not lock_store(kernel, fd, owned):
                raise Busy(where)
            repaired += _repair(kernel, fd, base_path, name, identifier)
            return _InitStep(False, kernel.identify(fd), repaired)
        if not replaces:
            refuse_squashed(kernel, fd, base_path)  # then nothing shows who made it, and --known would not help
            raise Untrusted(f"{printable(where)} ({why})", hint_for_unknown_maker(base_path))
        made = build_store(kernel, base, name, identifier, replaces=fd)
    repaired.append(f"replaced the old store ({why}); each owner's next command moves their orphans to the new store")
    return _InitStep(True, made, repaired)


def _registered_id(kernel: Kernel, fd: Fd, places: set[bytes]) -> VolumeId | None:
    """Return a store's volume ID from the caller's registry; with a new ID, the store's records would be invalid."""
    identity = kernel.identify(fd)
    candidates = (
        one
        for one in read_own_lines()
        if one.path in places and compare(one.identity, identity) is not IdentityMatch.OTHER
    )
    return next((one.volume for one in candidates), None)


def _open_untrusted(kernel: Kernel, base: BackingAndMount, where: bytes, name: Name, *, replaces: bool) -> Fd | None:
    """Open the entry that has a store's name, or return None. replaces: also open an entry that is not a directory"""
    try:
        return kernel.open_beneath(base.fd, name, READABLE)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise NoStore(where, UNMOUNT) from error
        if error.errno not in UNREACHABLE_ERRNOS:
            raise
        if replaces:
            return kernel.open_beneath(base.fd, name)
        hint = f"trashd init --replace {shell_word(os.path.dirname(where))} moves it into a new store"
        raise NoStore(f"{printable(where)} (not a directory)", hint) from error


def _may_be_changed(kernel: Kernel, fd: Fd) -> bool:
    """Return whether users other than root could have changed a `.trashd`.

    ACLs need no separate check: the group bits of the mode include an ACL's mask.
    Raises  NoStore if something is mounted in it; OSError
    """
    if not _is_roots(kernel.fstat(fd), sticky=False):
        return True
    for name in AREA_MODES:
        try:
            st = kernel.stat(fd, name)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.EXDEV:  # mounted by root, as no other user can mount there
                raise NoStore(os.path.join(os.readlink(fd.path()), name), UNMOUNT) from error
            raise  # returning True could cause a sound store to be replaced
        if not stat.S_ISDIR(st.st_mode) or not _is_roots(st, sticky=name == NEW):
            return True
    return False


def _is_roots(st: os.stat_result, *, sticky: bool) -> bool:
    shared = st.st_mode & 0o022 and not (sticky and st.st_mode & stat.S_ISVTX)
    return st.st_uid == 0 and not shared


def _repair(kernel: Kernel, fd: Fd, base_path: bytes, name: Name, identifier: VolumeId | None) -> list[str]:
    """Repair a store that no other user could have changed; return descriptions of the repairs."""
    repaired: list[str] = []
    if not kernel.is_read_only(fd):
        discard_trials(kernel, fd)
    if os.geteuid() == 0 and name == STORE:
        if needs_repair(kernel, fd, STORE_MODE):
            take_ownership(kernel, fd, STORE_MODE)
            repaired.append("restored owner and mode of .trashd")
        repaired += _move_foreign_entries(kernel, fd)
        names = kernel.list(fd)
        for area_name, mode in AREA_MODES.items():
            if area_name not in names:
                make_area(kernel, fd, area_name, mode)
                repaired.append(f"created .trashd/{area_name.decode()}")
                continue
            with kernel.open_dir(fd, area_name) as area:
                if needs_repair(kernel, area, mode):
                    take_ownership(kernel, area, mode)
                    repaired.append(f"restored owner and mode of .trashd/{area_name.decode()}")
    return repaired + _renew_volume(kernel, fd, base_path, name, identifier)


def _rename_after_owners(kernel: Kernel, area_fd: Fd) -> list[str]:
    """In new/, rename the entries that have a user's plain name but belong to another user or are not directories.

    Each gets a name with its owner's UID. Nothing inside the entries is changed.
    """
    moved = []
    for name in kernel.list_reopened(area_fd):
        if owner_of(kernel, area_fd, name) is None:
            continue  # its user mounted something there, and the kernel would not let us move it
        with suppress_errno(*ABSENT_ERRNOS, errno.EBUSY):  # another init moved it, or its user changed it
            st = kernel.stat(area_fd, name)
            is_directory = stat.S_ISDIR(st.st_mode)
            if not name.isdigit() or parse_uid_name(name) is None or (is_directory and name == b"%d" % st.st_uid):
                continue
            aside = b"%d.%b" % (st.st_uid, os.urandom(6).hex().encode() + (b"" if is_directory else PLANTED[:-1]))
            kernel.rename_free(area_fd, name, area_fd, aside)
            moved.append(f"moved new/{name.decode()}, which belongs to uid {st.st_uid}, to new/{aside.decode()}")
    return moved


def _move_foreign_entries(kernel: Kernel, fd: Fd) -> list[str]:
    """Rename entries whose names trashd might need: all except areas, `nodes/`, old stores and root's files."""
    moved = []
    for name in kernel.list_reopened(fd):
        if name in AREA_MODES or name.startswith(OLD):
            continue
        st = kernel.stat(fd, name)
        if name == NODES and stat.S_ISDIR(st.st_mode) and _is_roots(st, sticky=False):
            continue
        if not (stat.S_ISREG(st.st_mode) and st.st_uid == 0) and PLANTED not in name:
            aside = name[:_MAX_KEPT_NAME_BYTES] + PLANTED + os.urandom(6).hex().encode()
            kernel.rename_free(fd, name, fd, aside)
            moved.append(f"moved {printable(name)} to {printable(aside)}")
    return moved


def _read_untrusted_volume(kernel: Kernel, fd: Fd, where: bytes) -> Volume | None:
    """Read volume.json, whatever its owner: the volume ID must be kept, because the store's records contain that ID.

    Raises  OSError if the file can't be read now: it may contain an ID, without which no record would be valid;
            UnknownFormat
    """
    try:
        if not stat.S_ISREG(kernel.stat(fd, VOLUME).st_mode):
            return None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EXDEV):
            raise
        return None
    text = read_small(kernel, fd, VOLUME, VOLUME_MAX_BYTES)
    if text is None:
        return None
    return decode_volume(text, where)


def _renew_volume(kernel: Kernel, fd: Fd, base_path: bytes, name: Name, identifier: VolumeId | None) -> list[str]:
    """If volume.json is missing, untrusted, incomplete or another store's, test the filesystem and write a new one."""
    cache_s = None
    with suppress(FileNotFoundError, Untrusted, BrokenStore):
        old_volume = read_volume(kernel, fd, base_path, name=name)
        cache_s = old_volume.cache_s
        is_same = old_volume.filesystem == kernel.filesystem(fd) and old_volume.store == kernel.identify(fd)
        if is_same and None not in (old_volume.unnamed, old_volume.strangers_refused, old_volume.noreplace):
            return []
    proven = probe_filesystem(kernel, fd, identifier or VolumeId(os.urandom(16).hex()))
    write_volume(kernel, fd, proven._replace(cache_s=cache_s))
    return ["wrote volume.json"]
