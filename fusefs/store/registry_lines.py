"""Encodes and decodes registries of stores, and marks the stores that root made.

The reader of a registry does not trust its writer. Each user has a registry below their home directory; root has its
own, to which no user can write.

Even if everything in a store belongs to root, this does not prove that root made the store. A user who was able to move
root's directories could have given them a store's names, and the current modes do not show earlier ones. So `init`
writes the identity of `.trashd` into an attribute of that directory that no user can set. A copy has a different
identity. All users can read the attribute, and so can root's child processes. If the filesystem has no such attributes,
or root lacks the capability to set them (in a container), root's registry lists the stores that root made.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from fusefs.core.identity import Identity, IdentityMatch, compare, format_identity, is_marked, parse_identity
from fusefs.core.names import STORE, Name, VolumeId, is_hex, is_volume_id, parse_user_store_name, split_path
from fusefs.core.printable_names import shell_word, unescape
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import persistent_dir, read_file, require_owner
from fusefs.store.backing_and_mount import NO_SPACE_ERRNOS, suppress_errno

STORES = b"stores"
MAX_BYTES = 64 * 1024
MAX_LINES = 1000
_FILESYSTEM_DIGITS = 16
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~/+,:@=")


class RegistryLine(NamedTuple):
    """A line of a registry, which describes a store as it was when it was last used.

    identity    the store's identity
    volume      the volume ID
    filesystem  f_fsid of its filesystem; 0 if the filesystem has none
    path        path of the directory that holds the store, without links
    name        the store's name; in the file, the name is part of the path only for a user's own store
    """

    identity: Identity
    volume: VolumeId
    filesystem: int
    path: bytes
    name: Name = STORE

    def store(self) -> bytes:
        """Return the path of the store."""
        return os.path.join(self.path, self.name)


def encode_line(line: RegistryLine) -> bytes:
    """Encode the line, including the newline."""
    path = line.path if line.name == STORE else line.store()
    quoted = b"".join(b"%c" % byte if byte in _PLAIN else b"%%%02X" % byte for byte in path)
    head = f"{format_identity(line.identity)} {line.volume} {line.filesystem:x} "
    return head.encode() + quoted + b"\n"


def decode_lines(text: bytes) -> list[RegistryLine]:
    """Decode the lines of a registry, which another user may have written. Invalid lines are skipped."""
    lines = []
    for line in text.split(b"\n", MAX_LINES)[:MAX_LINES]:
        words = line.rsplit(b" ", 3)
        if len(words) != len(("identity", "volume", "filesystem", "path")) or not line.isascii():
            continue
        identity = parse_identity(words[0])
        volume, filesystem, quoted = (word.decode() for word in words[1:])
        is_number = 0 < len(filesystem) <= _FILESYSTEM_DIGITS and is_hex(filesystem)
        if identity is None or is_marked(identity) or not is_volume_id(volume) or not is_number:
            continue
        path = unescape(words[3], b"%", 2, 16)
        if not quoted.isprintable() or not path.startswith(b"/"):
            continue
        try:
            if path != b"/":
                split_path(path[1:])
        except ValueError:
            continue
        above, name = os.path.split(path)
        where = (path, STORE) if parse_user_store_name(name) is None else (above, Name(name))
        lines.append(RegistryLine(identity, VolumeId(volume), int(filesystem, 16), *where))
    return lines


def read_registry(dir_fd: int) -> bytes:
    """Read the registry in a directory. The caller must own both, and no other user may be able to write to either.

    Raises  FileNotFoundError if there is no registry; OSError EPERM if another user owns or can write to the registry
            or the directory; EFBIG; the kernel's error for a link or a FIFO
    """
    require_owner(os.fstat(dir_fd), os.geteuid())
    return read_file(STORES, MAX_BYTES, dir_fd=dir_fd, owner=os.geteuid())


def read_own_lines() -> list[RegistryLine]:
    """Read the lines of the caller's own registry, newest last; return [] if there is no valid registry."""
    try:
        return decode_lines(read_own_registry())
    except OSError:
        return []  # `explain_unused_registry` reports why


def explain_unused_registry() -> tuple[bytes, str] | None:
    """Return the path of the caller's registry and why it is not used; None if it is used, or does not exist."""
    try:
        read_own_registry()
    except FileNotFoundError:
        return None
    except OSError as error:
        return os.path.join(persistent_dir(), STORES), error.strerror or "it can't be read"
    return None


def read_own_registry() -> bytes:
    with Fd(os.open(persistent_dir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        return read_registry(directory)


XATTR = "security.trashd"
"""Attributes in `security.` can be set only with CAP_SYS_ADMIN in the user namespace that mounted the filesystem.

Source  xattr(7), cap_inode_setxattr() in security/commoncap.c
"""
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.E2BIG, errno.EROFS, *NO_SPACE_ERRNOS)
NO_ROOT_MARK = (
    "only this machine's list of stores (/var/lib/trashd/stores) records that root created it, not the store itself"
)
"""Reported for root's store if it could not be marked."""


class StoreMaker(Enum):
    """The user who made a store, as far as that can be known.

    COPY     root made the original, and a user who could set root's attribute copied it
    """

    BY_ROOT = "by root"
    COPY = "copy"
    UNKNOWN = "unknown"


_WHOLE = [0, 0, (1 << 32) - 1]
"""/proc/self/uid_map in the initial user namespace."""


def makes_root_store() -> bool:
    """Return whether the caller can make root's store for all users, and mark it as made by root.

    Without CAP_SYS_ADMIN, or in a user namespace, the store can't be marked, and a Linux container started later could
    not find out who made it. In that case, root makes a store of its own, like any other user.
    """
    if os.geteuid() != 0:
        return False
    from fusefs.linux.credentials import Capability, may_use  # late: a swap into an existing store does not need it

    with open("/proc/self/uid_map", "rb") as ids:
        return may_use(Capability.SYS_ADMIN) and [int(word) for word in ids.read().split()] == _WHOLE


def set_root_mark(kernel: Kernel, fd: Fd) -> bool:
    """Mark an opened `.trashd` as made by root; return whether that was possible. Raises  OSError"""
    with suppress_errno(*_CANNOT):
        kernel.set_xattr(fd, XATTR, format_identity(kernel.identify(fd)).encode())
        return True
    return False


def has_root_mark(kernel: Kernel, fd: Fd) -> bool:
    """Return whether an opened `.trashd` is marked as made by root, and is not a copy. Raises  OSError"""
    return find_maker(kernel, fd) is StoreMaker.BY_ROOT


def can_have_root_mark(kernel: Kernel, fd: Fd) -> bool:
    """Return whether the filesystem of an opened `.trashd` supports the attribute for root's mark.

    Return False for a network or FUSE filesystem that reports a missing attribute, because it may refuse to set one.
    """
    try:
        os.getxattr(fd, XATTR)
    except OSError as error:
        return error.errno == errno.ENODATA and kernel.is_local(fd)
    return True


def explain_missing_mark(base_path: bytes) -> str:
    """Return, for messages, the consequences of a missing root mark, and the remedy."""
    volume = shell_word(base_path)
    return (
        "without that list, and on other machines, root's commands and service ignore the store until root runs "
        f"trashd init --known {volume}; with CAP_SYS_ADMIN (which containers lack), trashd init {volume} records this "
        "in the store, if the filesystem supports security.* attributes"
    )


def find_maker(kernel: Kernel, fd: Fd, base_paths: Collection[bytes] = ()) -> StoreMaker:
    """Find out which user made an opened `.trashd` that belongs to root.

    base_paths  paths of the directory that holds it; if root's registry of stores lists it there, root made it
    Raises  OSError
    """
    identity, marked = kernel.identify(fd), parse_identity(kernel.get_xattr(fd, XATTR) or b"")
    if marked is not None and compare(marked, identity) is not IdentityMatch.OTHER:
        return StoreMaker.BY_ROOT
    named = (line.identity for line in (read_own_lines() if base_paths else ()) if line.path in base_paths)
    if any(compare(one, identity) is not IdentityMatch.OTHER for one in named):
        return StoreMaker.BY_ROOT
    return StoreMaker.UNKNOWN if marked is None else StoreMaker.COPY


def hint_for_unknown_maker(base_path: bytes) -> str:
    """Return, for messages, the remedy for a store whose maker is unknown."""
    volume = shell_word(base_path)
    ours = f"if root created it, on another machine or before it was copied, run trashd init --known {volume}"
    other = f"otherwise trashd init --replace {volume} replaces it, and its owners' next commands move their orphans"
    return f"inspect it; {ours}; {other}"
