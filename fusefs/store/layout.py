"""The store on disk: `.trashd`, its users' folders and their states, opened by fd and checked before each use."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import ExitStack
from typing import NamedTuple, Self

from fusefs.core.errors import Untrusted
from fusefs.core.lifecycle import State
from fusefs.core.names import STORE, Name, RelPath, VolumeId, is_volume_id, join, printable
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.sides import DIRECTORY, READABLE, Sides

FORMAT = 1
MAGIC = "trashd"
NEW_PREFIX = STORE + b".new-"
"""How the name of a store begins while it is being made."""
COPY_PREFIX = NEW_PREFIX + b"copy-"
"""Of a directory that only its maker can enter, where what is made for the one above is completed before it goes there.
What a killed maker leaves in it is nobody's only copy.
"""
VOLUME = Name(b"volume.json")
CACHEDIR_TAG = Name(b"CACHEDIR.TAG")
CACHEDIR_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n# Made by trashd: what lies here waits for its end.\n"
USERS = Name(b"u")
RECORD = Name(b"record.json")
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
_NO_STORE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP)


class Volume(NamedTuple):
    """What volume.json says.

    exchange    whether RENAME_EXCHANGE was seen to work here
    filesystem  magic number of the filesystem on which it was seen; on another one it must be seen again
    unnamed     whether files made without a name were seen to last there (O_TMPFILE); None: nobody has tried
    """

    id: VolumeId
    exchange: bool
    filesystem: int
    unnamed: bool | None = None


class Store(NamedTuple):
    """An opened, trusted store.

    base_fd    the directory that holds it (O_PATH)
    base_path  the same for people, as it was found
    fd, u_fd   `.trashd` and `.trashd/u`
    owner      uid of `.trashd`
    mounted    the base as a mount of ours shows it (O_PATH); None where none does
    is_named   whether it was found by its user's word: a pointer in his folder, or his registry
    """

    kernel: Kernel
    base_fd: Fd
    base_path: bytes
    fd: Fd
    u_fd: Fd
    volume: Volume
    owner: int
    mounted: Fd | None = None
    is_named: bool = False

    def __enter__(self) -> Self:
        """Own its fds for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close them."""
        for fd in (self.base_fd, self.fd, self.u_fd, self.mounted):
            if fd is not None:
                fd.close()

    def base(self) -> Sides:
        """The base on both sides, whose fds stay this one's."""
        return Sides(self.base_fd, self.mounted)

    def keeps_unnamed(self) -> bool:
        """Whether files made without a name were seen to last on this filesystem."""
        return self.volume.unnamed is True and self.volume.filesystem == self.kernel.filesystem(self.fd)


class UserFolder(NamedTuple):
    """One user's part of a store: what lies in it belongs to `uid`, whatever any record says (I13)."""

    store: Store
    uid: int
    name: Name
    fd: Fd

    def __enter__(self) -> Self:
        """Own its fd for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        self.fd.close()

    def path(self) -> bytes:
        """Where it is, for people."""
        return os.path.join(self.store.base_path, STORE, USERS, self.name)

    def way_to(self, state: State, container: bytes) -> RelPath:
        """The path of a container relative to the directory that holds the store."""
        return join(STORE, USERS, self.name, state.value.encode(), container)

    def list(self, folder: Name | State) -> list[bytes]:
        """The names in one of its folders; none if that is missing: whoever only looks makes nothing."""
        try:
            fd = self.store.kernel.open_dir(self.fd, _name_of(folder))
        except FileNotFoundError:
            return []
        with fd:
            return self.store.kernel.list(fd)

    def open(self, folder: Name | State) -> Fd:
        """One of its folders, for reading; made if missing."""
        kernel, name = self.store.kernel, _name_of(folder)
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


def _name_of(folder: Name | State) -> Name:
    return Name(folder.value.encode()) if isinstance(folder, State) else folder


def make_private(kernel: Kernel, dir_fd: int, name: bytes) -> Fd:
    """A new directory that is its maker's alone, readable: 0700 and without ACLs, whatever is above it and the umask.

    Until then it must have a name that nobody looks for.
    """
    kernel.mkdir(dir_fd, name)
    with kernel.open_beneath(dir_fd, name, DIRECTORY) as made:
        if stat.S_IMODE(kernel.fstat(made).st_mode) != FOLDER_MODE:
            kernel.chmod(made, FOLDER_MODE)
        fd = kernel.open_dir(made)
    with ExitStack() as owned:
        owned.enter_context(fd)
        drop_acls(kernel, fd)
        owned.pop_all()
    return fd


def drop_acls(kernel: Kernel, fd: Fd) -> None:
    """Take back what a parent's default ACL gave to others."""
    for name in kernel.xattrs(fd):
        if name.startswith("system.posix_acl_"):
            kernel.remove_xattr(fd, name)


def is_stores_own(name: bytes) -> bool:
    """Whether a name is that of a store, or of one being made."""
    return name == STORE or name.startswith(NEW_PREFIX)


def encode_volume(volume: Volume) -> bytes:
    """volume.json's bytes."""
    fields = {"magic": MAGIC, "format": FORMAT, **volume._asdict()}
    return json.dumps(fields, indent=1).encode() + b"\n"


def decode_volume(text: bytes) -> Volume | None:
    """The Volume in the bytes of a volume.json; None if they are none of ours."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("magic") != MAGIC or fields.get("format") != FORMAT:
        return None
    identifier, exchange, filesystem, unnamed = (fields.get(key) for key in Volume._fields)
    if isinstance(identifier, str) and isinstance(exchange, bool) and isinstance(filesystem, int):
        unnamed = unnamed if isinstance(unnamed, bool) else None  # stores of before don't say
        return Volume(VolumeId(identifier), exchange, filesystem, unnamed) if is_volume_id(identifier) else None
    return None


def open_store(
    kernel: Kernel, base_fd: Fd, base_path: bytes, mounted: Fd | None = None, *, of: int | None = None
) -> Store | None:
    """The store in a directory, or None if there is none; takes over the fds, closing them if there is none.

    of      the user whose own it must be: root opens it for him alone, and believes nothing that it says of others
    Raises  Untrusted if it belongs to somebody whom we don't trust: root trusts root, others root and themselves
    """
    owners = trusted_owners(os.geteuid()) if of is None else (of,)
    with ExitStack() as owned:
        owned.enter_context(base_fd)
        if mounted is not None:
            owned.enter_context(mounted)
        try:
            fd = owned.enter_context(kernel.open_beneath(base_fd, STORE, READABLE))
            owner = _check(kernel, fd, base_path, owners)
            volume = read_volume(kernel, fd, base_path, owners)
            u_fd = owned.enter_context(kernel.open_beneath(fd, USERS, READABLE))
            _check(kernel, u_fd, base_path, owners, sticky=True)
        except OSError as error:
            if error.errno in _NO_STORE:
                return None
            if error.errno == errno.EXDEV:
                raise Untrusted(b"something is mounted over " + os.path.join(base_path, STORE)) from error
            raise
        owned.pop_all()
        return Store(kernel, base_fd, base_path, fd, u_fd, volume, owner, mounted)


def trusted_owners(uid: int) -> tuple[int, ...]:
    """Whose stores a user may use."""
    return (0,) if uid == 0 else (0, uid)


def _check(kernel: Kernel, fd: Fd, base_path: bytes, owners: tuple[int, ...], *, sticky: bool = False) -> int:
    """The owner of a directory of the store's own; Untrusted unless nobody else can change it."""
    st = kernel.fstat(fd)
    shared = st.st_mode & 0o022 and not (sticky and st.st_mode & stat.S_ISVTX)
    if st.st_uid not in owners or shared:
        where = printable(os.path.join(base_path, STORE))
        raise Untrusted(f"{where} (owner {st.st_uid}, mode {st.st_mode & 0o7777:04o})")
    return st.st_uid


def is_regular(kernel: Kernel, fd: Fd) -> bool:
    """Whether an fd holds a regular file with one name: no FIFO, no device, no link to somebody else's."""
    st = kernel.fstat(fd)
    return stat.S_ISREG(st.st_mode) and st.st_nlink == 1


def read_volume(kernel: Kernel, store_fd: int, base_path: bytes, owners: tuple[int, ...] | None = None) -> Volume:
    """volume.json of an opened `.trashd`.

    owners  whose it may be; None: those whom we trust
    Raises  FileNotFoundError if there is none; Untrusted if it is somebody else's, no regular file, or not ours
    """
    where = os.path.join(base_path, STORE, VOLUME)
    with kernel.open_beneath(store_fd, VOLUME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        st = kernel.fstat(fd)
        trusted = trusted_owners(os.geteuid()) if owners is None else owners
        if not is_regular(kernel, fd) or st.st_uid not in trusted or st.st_mode & 0o022:
            raise Untrusted(where)
        volume = decode_volume(kernel.read(fd, VOLUME_MAX_BYTES))
    if volume is None:
        raise Untrusted(where, "its contents are not a trash store's; root repairs it with: trashd init VOLUME")
    return volume
