"""The store on disk: `.trashd`, its users' folders and their states, opened by fd and checked before each use.

Whether root is nobody to the server of the filesystem is reported, as nothing of root's works there. NFS does so by
default (root_squash), Lustre by a nodemap without `admin`. A security module may refuse root, too, so what is reported
names both. On filesystems that one kernel alone can have, nobody but such a module does.
"""

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
from fusefs.core.names import STORE, Name, RelPath, VolumeId, is_volume_id, join, user_store, whose_store
from fusefs.core.printable_names import printable, shell_word
from fusefs.linux.fd import Fd, closed_on_error
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
from fusefs.store.registry_lines import StoreMaker, who_made

FORMAT = 2
UNMOUNT = "unmount the filesystem that covers the store (findmnt shows where it is)"
MAGIC = "trashd"
NEW_PREFIX = STORE + b".new-"
"""How the name of a store begins while it is being made."""
COPY_PREFIX = NEW_PREFIX + b"copy-"
"""Of a directory that only its maker can enter, where what is made for the one above is completed before it goes there.
What a killed maker leaves in it is never the only copy.
"""
SWAP_PREFIX = NEW_PREFIX + b"swap-"
"""Of one that is to take the place of what has the name of root's store: once it has, of that."""
PLANTED = b".planted-"
"""In the name of what was in the way in a store of root's."""
OLD = b"old-"
"""Prefix of a store's name, in the one that took its place, that root set aside when taking the volume over."""
VOLUME = Name(b"volume.json")
CACHEDIR_TAG = Name(b"CACHEDIR.TAG")
CACHEDIR_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n# Made by trashd: what lies here waits for its end.\n"
USERS = Name(b"u")
"""The users' folders that only the store's owner can have put there."""
NEW = Name(b"new")
"""What users made themselves in a store of root's, until root looks at it."""
LOCK = Name(b".lock")
"""In a store, or a directory of it, that one process at a time changes; only the store's owner can open it."""
REGISTRY = Name(b"folders")
"""Root's registry of which folder is which user's (store/user_folders.py)."""
NODES = Name(b"nodes")
"""The beats of the nodes that serve a store which several machines may have mounted (service.open_volume)."""
REAPER_LOCK = Name(b"reaper.lock")
"""Of the service that works on a store of a local filesystem."""
RECORD = Name(b"record.json")
RECORD_NEW = Name(b"record.json.new")
GATE_PREFIX = b"gate."
"""Of directories in a container that are made for one rename (store/gate.py)."""
LATE_PREFIX = b"late."
"""Of what came into a container late, or a second time."""
OLD_CONTAINER = Name(b"old")
"""In a container that took another's place: that one (store/take_over.py)."""
BEGUN = Name(b"begun")
"""In a container of which a reaper, off local filesystems, has begun to delete: it is no orphan any more."""
WATCHED_PREFIX = b"watched."
ANNOUNCED_PREFIX = b"announced."
"""Of what another node notes in a container that it means to take over (store/silent_nodes.py)."""
WATCH_PREFIXES = (WATCHED_PREFIX, ANNOUNCED_PREFIX)
HIDDEN_PREFIXES = (b".fuse_hidden", b".nfs")
"""Of what libfuse and NFS make of a file that was replaced or unlinked while it is open."""
TREE = Name(b"tree")
FRESH = Name(b"fresh")
HOISTED = Name(b"hoisted")
DROP = Name(b"drop")
POINTERS = Name(b"pointers")
RESERVE = Name(b"reserve")
NEW_PART = b".new-"
"""How the name of a user's folder, or of a part of one, begins while it is being made."""
FOLDERS = (*(Name(state.value.encode()) for state in State), DROP, POINTERS, RESERVE)
VOLUME_MAX_BYTES = 4096
FOLDER_MODE = 0o700
_SUBVOLUME = "it is a subvolume of its own: find out who created it, then remove it or move it away"
_SEEN = ("unnamed", "strangers_refused", "noreplace")
_NO_STORE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP)


class Volume(NamedTuple):
    """What volume.json says.

    exchange    whether RENAME_EXCHANGE was seen to work here
    filesystem  magic number of the filesystem on which it was seen; on another one it must be seen again
    unnamed     whether files made without a name were seen to last there (O_TMPFILE); None: not tried
    strangers_refused  whether another user was seen to be refused what a folder relies on; None: not tried
    noreplace   whether RENAME_NOREPLACE was seen to refuse what has a name and to take what has none; None: not tried
    cache_s     for how long a second mount was seen to show an old state; only `init --beside` of 0.3.0 measured it
    store       the identity of `.trashd` itself: it differs in a copy; None: not written down
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
    """Where users' folders are in an opened `.trashd`.

    u_fd         where only the store's owner makes names
    new_fd       where all users do; None in a user's own store
    registry_fd  where root notes which folder is whose; None where there is none
    dev          st_dev of `u/`: a folder on another subvolume is none
    """

    u_fd: Fd
    new_fd: Fd | None = None
    registry_fd: Fd | None = None
    dev: int = 0

    def __enter__(self) -> Self:
        """Own its fds for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close them."""
        for fd in (self.u_fd, self.new_fd, self.registry_fd):
            if fd is not None:
                fd.close()

    def all(self) -> list[tuple[Name, Fd]]:
        """Those that are there, with their names; the proven one first."""
        both = ((USERS, self.u_fd), (NEW, self.new_fd))
        return [(name, fd) for name, fd in both if fd is not None]

    def for_new(self) -> tuple[Name, Fd]:
        """Where users make their own folders."""
        return self.all()[-1]


class Store(NamedTuple):
    """An opened, trusted store.

    base       the directory that holds it
    base_path  the same for people, as it was found
    fd         `.trashd`
    areas      where users' folders are in it
    owner      uid of `.trashd`
    filesystem  magic number of the one that it is on
    is_named   whether it was found by its user's word: a pointer in the user's folder, or the registry
    made       who made a store of root's, as far as root has looked: no other user's command needs to know
    takeover_s  as the service's configuration states it, 0: by the type of the filesystem; None: the configuration
               files are read (store/silent_nodes.py)
    name       in the directory that holds it: root's for all users, or a user's own
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
    made: StoreMaker = StoreMaker.BY_ROOT
    takeover_s: int | None = None
    name: Name = STORE

    def __enter__(self) -> Self:
        """Own its fds for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close them."""
        with self.areas, self.fd, self.base:
            pass

    def path(self) -> bytes:
        """Where it is, for people; no other store has the same."""
        return os.path.join(self.base_path, self.name)

    def is_common(self) -> bool:
        """Whether it is root's for all users, and not what one user, root among them, has alone."""
        return self.owner == 0 and self.name == STORE

    def is_shared(self) -> bool:
        """Whether other kernels may have this filesystem mounted too: nothing orders what they do."""
        return not is_local_kind(self.filesystem)

    def judged(self) -> Store:
        """This store, with its maker looked up if it is root's. Raises  OSError"""
        if not self.is_common():
            return self
        places = {self.base_path, os.readlink(self.base.fd.path())} if os.geteuid() == 0 else ()
        return self._replace(made=who_made(self.kernel, self.fd, places))

    def is_unknown(self) -> bool:
        """Whether another user than root may have made it of root's directories: nothing it says is root's word."""
        return self.made is StoreMaker.UNKNOWN

    def is_roots_to_keep(self) -> bool:
        """Whether it is root's, and we are root: what is in doubt in it is ours to look at."""
        return self.is_common() and os.geteuid() == 0


class UserFolder(NamedTuple):
    """One user's part of a store: what lies in it belongs to `uid`, whatever any record says (I13).

    area       which of the store's areas it is in
    is_proven  whether only that user or root can have put it there: nothing else is reaped by any other user's process
    doubt      why it never will be; empty if it is, or waits for root to look at it
    """

    store: Store
    uid: int
    area: Name
    name: Name
    fd: Fd
    is_proven: bool
    doubt: str = ""

    def __enter__(self) -> Self:
        """Own its fd for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        self.fd.close()

    def path(self) -> bytes:
        """Where it is, for people."""
        return os.path.join(self.store.base_path, self.way())

    def way(self) -> RelPath:
        """Its path relative to the directory that holds the store."""
        return RelPath(join(self.store.name, self.area, self.name))

    def way_to(self, state: State, container: bytes) -> RelPath:
        """The path of a container in it, relative to the directory that holds the store."""
        return join(self.way(), state.value.encode(), container)

    def path_to(self, state: State, container: bytes) -> bytes:
        """Where a container in it is, for people."""
        return os.path.join(self.store.base_path, self.way_to(state, container))

    def is_served_by(self, uid: int) -> bool:
        """Whether what is due in it may go at that user's word: what is proven, or their own. Root proves root's."""
        return self.is_proven or self.uid == uid != 0

    def list(self, folder: Name | State) -> list[bytes]:
        """The names in one of its folders; none if that is missing: a mere look makes nothing."""
        try:
            fd = self.store.kernel.open_dir(self.fd, folder.value.encode() if isinstance(folder, State) else folder)
        except FileNotFoundError:
            return []
        with fd:
            return self.store.kernel.list(fd)

    def open(self, folder: Name | State) -> Fd:
        """One of its folders, for reading; made if missing."""
        kernel, name = self.store.kernel, folder.value.encode() if isinstance(folder, State) else folder
        try:
            return kernel.open_dir(self.fd, name)
        except FileNotFoundError:
            new = Name(NEW_PART + os.urandom(6).hex().encode())
            make_private(kernel, self.fd, new).close()
            try:
                kernel.rename_free(self.fd, new, self.fd, name)
            except FileExistsError:
                kernel.rmdir(self.fd, new)  # another command was faster
            return kernel.open_dir(self.fd, name)


def make_private(kernel: Kernel, dir_fd: int, name: bytes) -> Fd:
    """A new directory that is its maker's alone, readable: 0700 and without ACLs, whatever is above it and the umask.

    Until then it must have a name that no process looks for.
    """
    kernel.mkdir(dir_fd, name)
    with kernel.open_beneath(dir_fd, name, DIRECTORY) as made:
        if stat.S_IMODE(kernel.fstat(made).st_mode) != FOLDER_MODE:
            kernel.chmod(made, FOLDER_MODE)
        fd = kernel.open_dir(made)
    with closed_on_error(fd):
        drop_acls(kernel, fd)
    return fd


def make_unique(kernel: Kernel, dir_fd: Fd, name: bytes) -> None:
    """mkdir of a name with 48 random bits, which nobody else has: a server that was started again says EEXIST to one
    that it did. Raises  OSError
    """
    with suppress(FileExistsError):
        kernel.mkdir(dir_fd, name)


def take_lock(kernel: Kernel, dir_fd: Fd, owned: ExitStack) -> bool:
    """Take the lock of a directory, made if missing and owned by `owned`; whether it was free. Raises  OSError"""
    with suppress(FileExistsError):
        kernel.create(dir_fd, LOCK).close()
    return kernel.lock(owned.enter_context(kernel.open_beneath(dir_fd, LOCK, FILE_TO_LOCK)))


def drop_acls(kernel: Kernel, fd: Fd) -> None:
    """Take back what a parent's default ACL gave to others."""
    for name in kernel.xattr_names(fd):
        if name.startswith("system.posix_acl_"):
            kernel.remove_xattr(fd, name)


def is_own_file(name: bytes) -> bool:
    """Whether a name in a container is that of a file of its own, which goes with it."""
    return name in (RECORD, RECORD_NEW, BEGUN) or name.startswith(WATCH_PREFIXES)


def is_stores_own(name: bytes) -> bool:
    """Whether a name is that of a store, whichever user's, or of one being made."""
    return name.startswith(STORE) and (name == STORE or name.startswith(NEW_PREFIX) or whose_store(name) is not None)


def own_names(kernel: Kernel, base_fd: Fd, uid: int) -> Iterator[Name]:
    """The names in a directory that may be those of a user's own stores, the plain one first.

    The directory is listed only where something has that one: a store has another where the plain one was taken.
    Raises  OSError
    """
    plain = user_store(uid)
    if is_taken(kernel, base_fd, plain):
        yield plain
        yield from (name for name in names_of_users(kernel, base_fd) if name != plain and whose_store(name) == uid)


def names_of_users(kernel: Kernel, base_fd: Fd) -> list[Name]:
    """All names of users' own stores that there are in a directory; none if the caller may not list it.

    Raises  OSError
    """
    with suppress_errno(errno.EACCES), kernel.open_dir(base_fd) as fd, kernel.scan(fd) as entries:
        return sorted(Name(name) for entry in entries if whose_store(name := os.fsencode(entry.name)) is not None)
    return []


def encode_volume(volume: Volume) -> bytes:
    """volume.json's bytes, in today's format."""
    fields: dict[str, Any] = {"magic": MAGIC, **volume._asdict(), "format": FORMAT}
    fields["store"] = None if volume.store is None else volume.store._asdict()
    return json.dumps(fields, indent=1).encode() + b"\n"


def volume_fields(text: bytes) -> dict[str, Any]:
    """What the bytes of a volume.json say, of whatever format; nothing if they are none of ours."""
    with suppress(ValueError, RecursionError):
        fields = json.loads(text)
        if isinstance(fields, dict) and fields.get("magic") == MAGIC:
            return fields
    return {}


def decode_volume(text: bytes, store: bytes) -> Volume | None:
    """The Volume in the bytes of a volume.json; None if they are none of ours.

    store   the path of the store
    Raises  UnknownFormat if they are of trashd's in any other format than today's
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
    # Stores of before don't say the others.
    seen: dict[str, Any] = {key: one for key in _SEEN if isinstance(one := fields.get(key), bool)}
    cache_s = fields.get("cache_s")
    if isinstance(cache_s, (int, float)) and not isinstance(cache_s, bool) and cache_s >= 0:
        seen["cache_s"] = float(cache_s)
    if not is_volume_id(identifier):
        return None
    seen["store"] = decode_identity(fields.get("store"))
    return Volume(VolumeId(identifier), exchange, filesystem, **seen)


def decode_identity(fields: object) -> Identity | None:
    """The identity that a file of ours says; None for anything else."""
    if not isinstance(fields, dict):
        return None
    handle, ino, btime_ns = (fields.get(key) for key in Identity._fields)
    if isinstance(handle, str) and isinstance(ino, int) and isinstance(btime_ns, int):
        return Identity(handle, ino, btime_ns)
    return None


def open_own_store(kernel: Kernel, base: BackingAndMount, base_path: bytes) -> Store | None:
    """The caller's own store in a directory, or None if there is none; takes over that, closing it if there is none.

    What has its name and is none, or not the caller's alone, counts for nothing.
    Raises  BrokenStore; OSError
    """
    with base:
        for name in own_names(kernel, base.fd, os.geteuid()):
            with suppress(Untrusted):
                store = open_store(kernel, base.again(kernel), base_path, name)
                if store is not None:
                    return store
    return None


def open_store(
    kernel: Kernel, base: BackingAndMount, base_path: bytes, name: Name = STORE, *, of: int | None = None
) -> Store | None:
    """The store in a directory, or None if there is none; takes over that, closing it if there is none.

    name    root's for all users, which may be a user's own that 0.3.0 made; or that of a user's own
    of      the user whose own it must be: root opens it for that user alone, and trusts nothing that it says of others
    Raises  Untrusted if it belongs to a user whom we don't trust: root trusts root, others root and themselves;
            BrokenStore if it is a trusted one's, and its volume.json says nothing
    """
    owners = trusted_owners(os.geteuid()) if of is None else (of,)
    with ExitStack() as owned:
        owned.enter_context(base)
        try:
            fd = owned.enter_context(kernel.open_beneath(base.fd, name, READABLE))
            store = store_of(kernel, base, base_path, fd, owned, owners, name)
            if os.geteuid() == 0:
                store = store.judged()
        except OSError as error:
            if error.errno in _NO_STORE:
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
    """The store of an opened directory; what it opens is owned by `owned`.

    owners  the users whose it may be
    name    the one that it has, or is to have: of a user's own it says whose it is
    Raises  Untrusted; BrokenStore; OSError
    """
    dev, path, whom = kernel.fstat(base.fd).st_dev, os.path.join(base_path, name), whose_store(name)
    if whom is not None:
        owners = tuple(one for one in owners if one == whom)
    owner = _check(kernel, fd, path, owners, dev, closed=whom is not None)
    try:
        volume = read_volume(kernel, fd, base_path, owners, name)
    except FileNotFoundError:
        with open_areas(kernel, fd, name):  # it raises as well where this is another's directory of that name
            raise _broken(path, "is gone") from None
    areas = owned.enter_context(open_areas(kernel, fd, name))
    for _name, area in areas.all():
        _check(kernel, area, path, owners, dev, sticky=area is areas.new_fd)
    if areas.registry_fd is not None:
        _check(kernel, areas.registry_fd, path, owners, dev)
    return Store(kernel, base, base_path, fd, areas, volume, owner, kernel.filesystem(fd), name=name)


def open_areas(kernel: Kernel, store_fd: Fd, name: Name = STORE) -> Areas:
    """The areas of an opened store with that name, trusted or not.

    Raises  OSError; FileNotFoundError without an `u/`
    """
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
    """The owners whose stores a user may use; whose links and mounts one goes through to what a registry names."""
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
    """The owner of a directory of the store's own; Untrusted if any other user can change it.

    path    of the store
    dev     of the directory that holds the store: openat2 stops at no btrfs subvolume
    closed  its mode must be exactly 0700: then no other user can have moved it to where it is from another directory
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
    """Read a small file; None if it is no regular file, or one that another user may have put there or written.

    A second name is another user's, perhaps, but not in a directory of root's: a backup by hard links gives it one.
    owners  the users whose it may be; None: anybody's
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
    """Whether a file is root's in a directory of root's: only root can have put it there."""
    return st.st_uid == 0 == above.st_uid and not above.st_mode & OTHERS_WRITE


def write_small(
    kernel: Kernel, dir_fd: Fd, name: bytes, text: bytes, mode: int = 0o600, new: bytes | None = None
) -> None:
    """Put a text into a small file of that name, durably, at once or not at all.

    new     the file's name until then, which no other process uses; None: one for a lock's holder
    Raises  OSError; what a killed writer left unfinished the next lock's holder replaces
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
        with suppress(OSError):  # of a full volume it must take nothing; the first error is the one that counts
            kernel.unlink(dir_fd, new)
        raise
    kernel.rename(dir_fd, new, dir_fd, name)


def read_volume(
    kernel: Kernel, store_fd: int, base_path: bytes, owners: tuple[int, ...] | None = None, name: Name = STORE
) -> Volume:
    """volume.json of an opened `.trashd`.

    owners  the users whose it may be; None: those whom we trust
    Raises  FileNotFoundError if there is none; Untrusted if it is another user's, or no regular file; BrokenStore;
            UnknownFormat
    """
    store = os.path.join(base_path, name)
    trusted = trusted_owners(os.geteuid()) if owners is None else owners
    text = read_small(kernel, store_fd, VOLUME, VOLUME_MAX_BYTES, trusted)
    if text is None:
        raise Untrusted(
            f"{printable(os.path.join(store, VOLUME))} (another user can change it, or it is no regular file)"
        )
    volume = decode_volume(text, store)
    if volume is None:
        raise _broken(store, "not in the format of trashd")
    return volume


def _broken(store: bytes, why: str) -> BrokenStore:
    init = f"trashd init {shell_word(os.path.dirname(store))}"
    mend = f"the owner of the store can repair it, and its orphans are kept: {init}"
    return BrokenStore(f"{printable(os.path.join(store, VOLUME))} ({why})", mend)
