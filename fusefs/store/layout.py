"""The trash store on disk: `.trashd`, its users' folders, and their states; all opened by fd and checked before use."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Container, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, Self

from fusefs.core.container_states import State
from fusefs.core.errors import BrokenStore, UnknownFormat, Untrusted
from fusefs.core.identity import Identity
from fusefs.core.names import (
    STORE,
    Name,
    RelPath,
    VolumeId,
    is_volume_id,
    join_path,
    parse_user_store_name,
    user_store_name,
)
from fusefs.core.printable_names import printable, shell_word
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import OTHERS_WRITE, Kernel, is_local_kind
from fusefs.store.backing_and_mount import (
    DIRECTORY,
    FILE_TO_LOCK,
    FILE_TO_READ,
    READABLE,
    BackingAndMount,
    is_taken,
    suppress_errno,
)
from fusefs.store.registry_lines import StoreMaker, find_maker

FORMAT = 2
UNMOUNT = "unmount the filesystem that covers the store (findmnt shows where it is)"
MAGIC = "trashd"
NEW_PREFIX = STORE + b".new-"
"""Prefix of an unfinished store's name."""
COPY_PREFIX = NEW_PREFIX + b"copy-"
"""Prefix of a private directory in which files for a store are completed before they are moved into the store.

Only its maker can enter it. If the maker is killed, nothing is lost, since everything in it also exists elsewhere.
"""
SWAP_PREFIX = NEW_PREFIX + b"swap-"
"""Prefix of a new store's name until the store is exchanged with the entry that has the name of root's store.

After the exchange, that entry's name has this prefix.
"""
PLANTED = b".planted-"
"""Part of the new name of a foreign entry that was moved aside in root's store."""
OLD = b"old-"
"""Prefix of the name of an old store that root moved into the store that replaced it."""
VOLUME = Name(b"volume.json")
CACHEDIR_TAG = Name(b"CACHEDIR.TAG")
CACHEDIR_TEXT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# Created by trashd: the trees in this directory are deleted when they expire.\n"
)
USERS = Name(b"u")
"""The directory of users' folders that only the store's owner can have put there."""
NEW = Name(b"new")
"""In root's store, the directory of folders that users made and root has not inspected yet."""
LOCK = Name(b".lock")
"""A lock file for changes to a store or one of its directories; only the store's owner can open it."""
REGISTRY = Name(b"folders")
"""Root's registry of users' folders (store/user_folders.py)."""
NODES = Name(b"nodes")
"""Heartbeats from the nodes that serve a store on a shared filesystem (service.open_volume)."""
REAPER_LOCK = Name(b"reaper.lock")
"""The lock file of the service that serves a store on a local filesystem."""
RECORD = Name(b"record.json")
RECORD_NEW = Name(b"record.json.new")
TRANSFER_PREFIX = b"gate."
"""Prefix of the transfer directories in a container, each for a single rename (store/transfer_directory.py)."""
LATE_PREFIX = b"late."
"""Prefix of entries that arrived in a container late or for a second time."""
OLD_CONTAINER = Name(b"old")
"""The replaced container, in the container that took its place (store/take_over.py)."""
BEGUN = Name(b"begun")
"""A file in a container on a shared filesystem: a reaper has begun to delete it, so it can no longer be restored."""
WATCHED_PREFIX = b"watched."
ANNOUNCED_PREFIX = b"announced."
"""Prefixes of the notes that a node writes into a container that it intends to take over (store/silent_nodes.py)."""
WATCH_PREFIXES = (WATCHED_PREFIX, ANNOUNCED_PREFIX)
HIDDEN_PREFIXES = (b".fuse_hidden", b".nfs")
"""Prefixes of the names that libfuse and NFS give to a file that is replaced or unlinked while it is open."""
TREE = Name(b"tree")
REPLACEMENT = Name(b"fresh")
HOISTED = Name(b"hoisted")
DROP = Name(b"drop")
POINTERS = Name(b"pointers")
RESERVE = Name(b"reserve")
NEW_PART = b".new-"
"""Prefix of the name of an unfinished directory: a user's folder, or a directory in one."""
FOLDERS = (*(Name(state.value.encode()) for state in State), DROP, POINTERS, RESERVE)
VOLUME_MAX_BYTES = 4096
FOLDER_MODE = 0o700
_SUBVOLUME = "it is a separate subvolume: find out who created it, then remove it or move it away"
_TESTED_FLAGS = ("unnamed", "strangers_refused", "noreplace")
_NO_STORE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP)


class Volume(NamedTuple):
    """The contents of volume.json.

    exchange    whether RENAME_EXCHANGE worked here; if not, a swap takes two renames
    filesystem  the magic number of the filesystem that was tested; on another type of filesystem, the test is repeated
    unnamed     whether files made without a name (O_TMPFILE) persisted there; None: not tested
    strangers_refused  whether the filesystem refused other users the operations that would make folders unsafe; None:
        not tested
    noreplace   whether RENAME_NOREPLACE refused an existing name and accepted a free one; None: not tested
    cache_s     for how many seconds a second mount showed an old state; only `init --beside` in 0.3.0 measured it
    store       the identity of `.trashd` itself, which differs in a copy; None: not recorded
    """

    id: VolumeId
    exchange: bool
    filesystem: int
    unnamed: bool | None = None
    strangers_refused: bool | None = None
    noreplace: bool | None = None
    cache_s: float | None = None
    store: Identity | None = None


class Areas(NamedTuple):
    """The directories in an opened `.trashd` that contain users' folders.

    u_fd         `u/`, in which only the store's owner creates entries
    new_fd       `new/`, in which all users create entries; None in a user's own store
    registry_fd  root's registry of users' folders; None if it is missing
    dev          st_dev of `u/`: a directory on a different subvolume is not a user's folder
    """

    u_fd: Fd
    new_fd: Fd | None = None
    registry_fd: Fd | None = None
    dev: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for fd in (self.u_fd, self.new_fd, self.registry_fd):
            if fd is not None:
                fd.close()

    def all(self) -> list[tuple[Name, Fd]]:
        """Return the areas that exist, with their names; `u/` comes first."""
        both = ((USERS, self.u_fd), (NEW, self.new_fd))
        return [(name, fd) for name, fd in both if fd is not None]

    def area_for_new_folders(self) -> tuple[Name, Fd]:
        """Return the area in which users make their own folders."""
        return self.all()[-1]


class Store(NamedTuple):
    """An opened, trusted store.

    base        the directory that holds the store
    base_path   that directory's path, by which the store was found; for messages
    fd          the opened `.trashd`
    filesystem  the filesystem's magic number
    is_named    whether it was found through a pointer in the user's folder or the user's registry
    maker       who made it, if it is root's store and root has checked; other users' commands do not need this
    takeover_s  the takeover delay from the service's configuration; 0: it depends on the type of filesystem; None: read
                the configuration files (store/silent_nodes.py)
    name        its name in the directory that holds it: `.trashd`, or the name of a user's own store
    """

    kernel: Kernel
    base: BackingAndMount
    base_path: bytes
    fd: Fd
    areas: Areas
    volume: Volume
    owner: int
    filesystem: int
    is_named: bool = False
    maker: StoreMaker = StoreMaker.BY_ROOT
    takeover_s: int | None = None
    name: Name = STORE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with self.areas, self.fd, self.base:
            pass

    def path(self) -> bytes:
        """Return the store's path for messages; each store has a different one."""
        return os.path.join(self.base_path, self.name)

    def is_common(self) -> bool:
        """Return whether this is root's store for all users, not a store for a single user (who may be root)."""
        return self.owner == 0 and self.name == STORE

    def is_shared(self) -> bool:
        """Return whether other kernels may have mounted this filesystem; then their changes can come between ours."""
        return not is_local_kind(self.filesystem)

    def with_maker(self) -> Store:
        """Return this store with the correct `maker` if it is root's. Raises  OSError"""
        if not self.is_common():
            return self
        places = {self.base_path, os.readlink(self.base.fd.path())} if os.geteuid() == 0 else ()
        return self._replace(maker=find_maker(self.kernel, self.fd, places))

    def has_unknown_maker(self) -> bool:
        """Return whether another user may have assembled this store from root's directories; then it is not trusted."""
        return self.maker is StoreMaker.UNKNOWN

    def is_ours_as_root(self) -> bool:
        """Return whether this is root's store and we are root, and so have to inspect all doubtful entries in it."""
        return self.is_common() and os.geteuid() == 0


class UserFolder(NamedTuple):
    """A user's folder in a store: everything in it belongs to `uid`, whatever a record states (I13).

    area       the store's area that contains the folder
    is_proven  whether only that user or root can have put it there; if not, no other user's process deletes anything in
               it
    doubt      why it will never be proven; empty if it is proven, or if root has not inspected it yet
    """

    store: Store
    uid: int
    area: Name
    name: Name
    fd: Fd
    is_proven: bool
    doubt: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.fd.close()

    def path(self) -> bytes:
        """Return the folder's path for messages."""
        return os.path.join(self.store.base_path, self.relative_path())

    def relative_path(self) -> RelPath:
        """Return the folder's path relative to the directory that holds the store."""
        return RelPath(join_path(self.store.name, self.area, self.name))

    def relative_path_to(self, state: State, container: bytes) -> RelPath:
        return join_path(self.relative_path(), state.value.encode(), container)

    def path_to(self, state: State, container: bytes) -> bytes:
        return os.path.join(self.store.base_path, self.relative_path_to(state, container))

    def may_be_reaped_by(self, uid: int) -> bool:
        """Return whether `uid` may delete expired orphans here: the folder is proven, or `uid` (not 0) owns it."""
        return self.is_proven or self.uid == uid != 0

    def list(self, folder: Name | State) -> list[bytes]:
        """Return the names in one of the folder's directories, or [] if it is missing; it is not created."""
        try:
            fd = self.store.kernel.open_dir(self.fd, folder.value.encode() if isinstance(folder, State) else folder)
        except FileNotFoundError:
            return []
        with fd:
            return self.store.kernel.list(fd)

    def open(self, folder: Name | State) -> Fd:
        """Open one of the folder's directories for reading; make it if it is missing."""
        kernel, name = self.store.kernel, folder.value.encode() if isinstance(folder, State) else folder
        try:
            return kernel.open_dir(self.fd, name)
        except FileNotFoundError:
            new = Name(NEW_PART + os.urandom(6).hex().encode())
            make_private(kernel, self.fd, new).close()
            try:
                kernel.rename_free(self.fd, new, self.fd, name)
            except FileExistsError:
                kernel.rmdir(self.fd, new)  # another command has made it first
            return kernel.open_dir(self.fd, name)


def make_private(kernel: Kernel, dir_fd: int, name: bytes) -> Fd:
    """Make a directory that only its maker can enter, and open it for reading.

    It gets mode 0700 and no ACLs, whatever its parent's ACL and the umask are. No other process must use its name
    before this returns.
    """
    kernel.mkdir(dir_fd, name)
    with kernel.open_beneath(dir_fd, name, DIRECTORY) as made:
        if stat.S_IMODE(kernel.fstat(made).st_mode) != FOLDER_MODE:
            kernel.chmod(made, FOLDER_MODE)
        fd = kernel.open_dir(made)
    with close_on_error(fd):
        drop_acls(kernel, fd)
    return fd


def make_unique(kernel: Kernel, dir_fd: Fd, name: bytes) -> None:
    """Make a directory whose name has 48 random bits, so that no other process uses the name.

    EEXIST is ignored: after a restart, a server may report it for a mkdir that the server itself has executed.
    Raises  OSError
    """
    with suppress(FileExistsError):
        kernel.mkdir(dir_fd, name)


def take_lock(kernel: Kernel, dir_fd: Fd, owned: ExitStack) -> bool:
    """Take a directory's lock and return whether it was free; `owned` releases it. Make the lock file if it is missing.

    Raises  OSError
    """
    with suppress(FileExistsError):
        kernel.create(dir_fd, LOCK).close()
    return kernel.lock(owned.enter_context(kernel.open_beneath(dir_fd, LOCK, FILE_TO_LOCK)))


def drop_acls(kernel: Kernel, fd: Fd) -> None:
    """Remove the ACLs that a new directory got from its parent's default ACL."""
    for name in kernel.xattr_names(fd):
        if name.startswith("system.posix_acl_"):
            kernel.remove_xattr(fd, name)


def is_container_file(name: bytes) -> bool:
    """Return whether a name in a container is one of trashd's own files, which are deleted with the container."""
    return name in (RECORD, RECORD_NEW, BEGUN) or name.startswith(WATCH_PREFIXES)


def is_store_name(name: bytes) -> bool:
    """Return whether a name is that of a store: root's or a user's, finished or unfinished."""
    return name.startswith(STORE) and (
        name == STORE or name.startswith(NEW_PREFIX) or parse_user_store_name(name) is not None
    )


def own_store_names(kernel: Kernel, base_fd: Fd, uid: int) -> Iterator[Name]:
    """Yield the names in a directory that may be a user's own stores, the plain one first.

    The directory is listed only if the plain name is taken, as only then can a store have a different name.
    Raises  OSError
    """
    plain = user_store_name(uid)
    if is_taken(kernel, base_fd, plain):
        yield plain
        yield from (
            name for name in list_users_stores(kernel, base_fd) if name != plain and parse_user_store_name(name) == uid
        )


def list_users_stores(kernel: Kernel, base_fd: Fd) -> list[Name]:
    """List the names of users' own stores in a directory, sorted; return [] if that is not allowed. Raises  OSError"""
    with suppress_errno(errno.EACCES), kernel.open_dir(base_fd) as fd, kernel.scan(fd) as entries:
        return sorted(
            Name(name) for entry in entries if parse_user_store_name(name := os.fsencode(entry.name)) is not None
        )
    return []


def encode_volume(volume: Volume) -> bytes:
    fields: dict[str, Any] = {"magic": MAGIC, **volume._asdict(), "format": FORMAT}
    fields["store"] = None if volume.store is None else volume.store._asdict()
    return json.dumps(fields, indent=1).encode() + b"\n"


def volume_fields(text: bytes) -> dict[str, Any]:
    """Return the fields in a volume.json with any format number, or {} if it is not trashd's."""
    with suppress(ValueError, RecursionError):
        fields = json.loads(text)
        if isinstance(fields, dict) and fields.get("magic") == MAGIC:
            return fields
    return {}


def decode_volume(text: bytes, store: bytes) -> Volume | None:
    """Decode the volume.json of the store at a path; return None if it is not trashd's.

    Raises  UnknownFormat if it is trashd's, but not in the current format
    """
    fields = volume_fields(text)
    written = fields.get("format")
    if written != FORMAT:
        if "format" not in fields:
            return None
        aside = f"mv {shell_word(store)} {shell_word(store + b'-old')}"
        hint = f"use the version of trashd that made the store, or move the store aside: {aside}"
        where = printable(os.path.join(store, VOLUME))
        raise UnknownFormat(f"{where} (format {printable(str(written).encode())})", hint)
    identifier, exchange, filesystem = (fields.get(key) for key in ("id", "exchange", "filesystem"))
    if not (isinstance(identifier, str) and isinstance(exchange, bool) and isinstance(filesystem, int)):
        return None
    # Earlier versions did not write the other fields.
    optional_fields: dict[str, Any] = {key: one for key in _TESTED_FLAGS if isinstance(one := fields.get(key), bool)}
    cache_s = fields.get("cache_s")
    if isinstance(cache_s, (int, float)) and not isinstance(cache_s, bool) and cache_s >= 0:
        optional_fields["cache_s"] = float(cache_s)
    if not is_volume_id(identifier):
        return None
    optional_fields["store"] = decode_identity(fields.get("store"))
    return Volume(VolumeId(identifier), exchange, filesystem, **optional_fields)


def decode_identity(fields: object) -> Identity | None:
    if not isinstance(fields, dict):
        return None
    handle, ino, btime_ns = (fields.get(key) for key in Identity._fields)
    if isinstance(handle, str) and isinstance(ino, int) and isinstance(btime_ns, int):
        return Identity(handle, ino, btime_ns)
    return None


def open_own_store(kernel: Kernel, base: BackingAndMount, base_path: bytes) -> Store | None:
    """Open the caller's own store in a directory; return None if there is none. Takes ownership of `base`.

    An entry that has such a name, but is not a store or is accessible to others, is ignored.
    Raises  BrokenStore; OSError
    """
    with base:
        for name in own_store_names(kernel, base.fd, os.geteuid()):
            with suppress(Untrusted):
                store = open_store(kernel, base.reopen(kernel), base_path, name)
                if store is not None:
                    return store
    return None


def open_store(
    kernel: Kernel, base: BackingAndMount, base_path: bytes, name: Name = STORE, *, of: int | None = None
) -> Store | None:
    """Open the store in a directory; return None if there is none. Takes ownership of `base`.

    name    `.trashd`, which may also be a user's own store (from trashd 0.3.0); or the name of a user's own store
    of      the uid that must own it; root then opens it for that user only, and trusts it for no other user
    Raises  Untrusted if its owner is not trusted: root trusts root, other users trust root and themselves; BrokenStore
            if the owner is trusted, but volume.json is invalid
    """
    owners = trusted_owners(os.geteuid()) if of is None else (of,)
    with ExitStack() as owned:
        owned.enter_context(base)
        try:
            fd = owned.enter_context(kernel.open_beneath(base.fd, name, READABLE))
            store = store_of(kernel, base, base_path, fd, owned, owners, name)
            if os.geteuid() == 0:
                store = store.with_maker()
        except OSError as error:
            if error.errno in _NO_STORE_ERRNOS:
                return None
            if error.errno == errno.EXDEV:
                raise Untrusted(os.path.join(base_path, name) + b" (something is mounted over it)", UNMOUNT) from error
            raise
        owned.pop_all()
        return store


def store_of(
    kernel: Kernel,
    base: BackingAndMount,
    base_path: bytes,
    fd: Fd,
    owned: ExitStack,
    owners: tuple[int, ...],
    name: Name = STORE,
) -> Store:
    """Return the store in an open directory; `owned` closes the fds that this opens.

    owners  the uids that may own it
    name    the store's present or future name; the name of a user's own store contains the owner's uid
    Raises  Untrusted; BrokenStore; OSError
    """
    dev, path, whom = kernel.fstat(base.fd).st_dev, os.path.join(base_path, name), parse_user_store_name(name)
    if whom is not None:
        owners = tuple(one for one in owners if one == whom)
    owner = _check(kernel, fd, path, owners, dev, closed=whom is not None)
    try:
        volume = read_volume(kernel, fd, base_path, owners, name)
    except FileNotFoundError:
        with open_areas(kernel, fd, name):  # this raises FileNotFoundError, too, if it is not a store
            raise _broken(path, "is missing") from None
    areas = owned.enter_context(open_areas(kernel, fd, name))
    for _name, area in areas.all():
        _check(kernel, area, path, owners, dev, sticky=area is areas.new_fd)
    if areas.registry_fd is not None:
        _check(kernel, areas.registry_fd, path, owners, dev)
    return Store(kernel, base, base_path, fd, areas, volume, owner, kernel.filesystem(fd), name=name)


def open_areas(kernel: Kernel, store_fd: Fd, name: Name = STORE) -> Areas:
    """Open the areas of an opened store, trusted or not. Raises  OSError; FileNotFoundError if it has no `u/`"""
    with ExitStack() as owned:
        u_fd = owned.enter_context(kernel.open_beneath(store_fd, USERS, READABLE))
        new_fd = registry_fd = None
        if name == STORE and kernel.fstat(store_fd).st_uid == 0:
            with suppress(FileNotFoundError):
                new_fd = owned.enter_context(kernel.open_beneath(store_fd, NEW, READABLE))
            with suppress(FileNotFoundError):
                registry_fd = owned.enter_context(kernel.open_beneath(store_fd, REGISTRY, READABLE))
        areas = Areas(u_fd, new_fd, registry_fd, kernel.fstat(u_fd).st_dev)
        owned.pop_all()
        return areas


def trusted_owners(uid: int) -> tuple[int, ...]:
    """Return the owners whose stores, symbolic links and mounts a user trusts."""
    return (0,) if uid == 0 else (0, uid)


def _check(
    kernel: Kernel,
    fd: Fd,
    path: bytes,
    owners: tuple[int, ...],
    dev: int,
    *,
    sticky: bool = False,
    closed: bool = False,
) -> int:
    """Check one of the store's own directories and return its owner.

    path    the store's path
    dev     st_dev of the directory that holds the store: openat2 does not stop at a btrfs subvolume
    sticky  whether other users may write to it if it has the sticky bit
    closed  whether its mode must be exactly 0700, so that no other user can have moved it here from elsewhere
    Raises  Untrusted if any other user can change it
    """
    st = kernel.fstat(fd)
    if st.st_dev != dev:
        raise Untrusted(path, _SUBVOLUME)
    mode = stat.S_IMODE(st.st_mode)
    shared = mode != FOLDER_MODE if closed else mode & 0o022 and not (sticky and mode & stat.S_ISVTX)
    if st.st_uid not in owners or shared:
        raise Untrusted(f"{printable(path)} (owner {st.st_uid}, mode {mode:04o})")
    return st.st_uid


def read_small(
    kernel: Kernel, dir_fd: int, name: bytes, most_bytes: int, owners: Container[int] | None = None
) -> bytes | None:
    """Read a small file; return None if it is not regular, or if another user may have put it there or written to it.

    Another user may have put it there if it has a second hard link, except in root's directories, where a backup may
    have made that link.
    owners  the uids that may own it; None: any
    Raises  FileNotFoundError; OSError
    """
    with kernel.open_beneath(dir_fd, name, FILE_TO_READ) as fd:
        st = kernel.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or not (st.st_nlink == 1 or _is_roots_own(st, kernel.fstat(dir_fd))):
            return None
        if owners is not None and (st.st_uid not in owners or st.st_mode & OTHERS_WRITE):
            return None
        return kernel.read(fd, most_bytes)


def _is_roots_own(st: os.stat_result, above: os.stat_result) -> bool:
    """Return whether a file and its directory are root's, so that only root can have put it there."""
    return st.st_uid == 0 == above.st_uid and not above.st_mode & OTHERS_WRITE


def write_small(
    kernel: Kernel, dir_fd: Fd, name: bytes, text: bytes, mode: int = 0o600, new: bytes | None = None
) -> None:
    """Write a small file durably and atomically.

    new     a temporary name that no other process uses; None: the default name, which requires a lock; the next holder
            of the lock replaces a file that a killed writer left
    Raises  OSError
    """
    if new is None:
        new = name + b".new"
        with suppress(FileNotFoundError):
            kernel.unlink(dir_fd, new)
    try:
        with kernel.create(dir_fd, new) as fd:
            kernel.write(fd, text)
            if mode != 0o600:
                kernel.chmod(fd, mode)
            kernel.fsync(fd)
    except OSError:
        with suppress(OSError):  # free the space again, as the volume may be full; report the first error
            kernel.unlink(dir_fd, new)
        raise
    kernel.rename(dir_fd, new, dir_fd, name)


def read_volume(
    kernel: Kernel, store_fd: int, base_path: bytes, owners: tuple[int, ...] | None = None, name: Name = STORE
) -> Volume:
    """Read the volume.json in an opened `.trashd`.

    owners  the uids that may own it; None: those that we trust
    Raises  FileNotFoundError if it is missing; Untrusted if another user owns it or can change it, or it is not a
            regular file; BrokenStore; UnknownFormat
    """
    store = os.path.join(base_path, name)
    trusted = trusted_owners(os.geteuid()) if owners is None else owners
    text = read_small(kernel, store_fd, VOLUME, VOLUME_MAX_BYTES, trusted)
    if text is None:
        raise Untrusted(
            f"{printable(os.path.join(store, VOLUME))} (another user can change it, or it is not a regular file)"
        )
    volume = decode_volume(text, store)
    if volume is None:
        raise _broken(store, "not in trashd's format")
    return volume


def _broken(store: bytes, why: str) -> BrokenStore:
    init = f"trashd init {shell_word(os.path.dirname(store))}"
    hint = f"the store's owner can repair it without losing orphans: {init}"
    return BrokenStore(f"{printable(os.path.join(store, VOLUME))} ({why})", hint)
