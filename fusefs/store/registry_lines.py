"""Which stores a user uses, and which root made: the lines of a registry of stores, and root's note on a store.

A registry's lines are read without trust in their writer. Each user has one below their home, and root its own, which
no user can write.

That all of a store is root's today does not prove that root made it: a user who may move root's directories can have
given them a store's names, and a mode is today's, and the moves were then. So `init` notes on `.trashd` which directory
it is, in an attribute that no user can set, whatever they may write; a copy has another identity. Users can read it, so
that root's child processes know too. Where the filesystem has no such attributes, or this root may not set them (in a
container), root's registry of stores names what it made.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from fusefs.core.identity import Identity, Likelihood, compare, from_words, in_words, is_marked
from fusefs.core.names import STORE, Name, VolumeId, is_hex, is_volume_id, split, whose_store
from fusefs.core.printable_names import shell_word, unescape
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import lasting_dir, read_file, require_owner
from fusefs.store.backing_and_mount import FULL, suppress_errno

STORES = b"stores"
MAX_BYTES = 64 * 1024
MAX_LINES = 1000
_FILESYSTEM_DIGITS = 16
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~/+,:@=")


class RegistryLine(NamedTuple):
    """A line: a store, as it was when it was used last.

    identity    of the store
    volume      its id
    filesystem  f_fsid of what it is on, as far as that has one; 0 for none
    path        of the directory that holds it, without links
    name        of the store; a line has the path of a user's own, and for any other that of the directory
    """

    identity: Identity
    volume: VolumeId
    filesystem: int
    path: bytes
    name: Name = STORE

    def store(self) -> bytes:
        """The path of the store."""
        return os.path.join(self.path, self.name)


def encode(one: RegistryLine) -> bytes:
    """Its line, with the newline."""
    path = one.path if one.name == STORE else one.store()
    quoted = b"".join(b"%c" % byte if byte in _PLAIN else b"%%%02X" % byte for byte in path)
    told = f"{in_words(one.identity)} {one.volume} {one.filesystem:x} "
    return told.encode() + quoted + b"\n"


def decode(text: bytes) -> list[RegistryLine]:
    """What a registry says; what is no line of one is left out. Another user may have written all of it."""
    lines = []
    for line in text.split(b"\n", MAX_LINES)[:MAX_LINES]:
        words = line.rsplit(b" ", 3)
        if len(words) != len(("identity", "volume", "filesystem", "path")) or not line.isascii():
            continue
        identity = from_words(words[0])
        volume, filesystem, quoted = (word.decode() for word in words[1:])
        is_number = 0 < len(filesystem) <= _FILESYSTEM_DIGITS and is_hex(filesystem)
        if identity is None or is_marked(identity) or not is_volume_id(volume) or not is_number:
            continue
        path = unescape(words[3], b"%", 2, 16)
        if not quoted.isprintable() or not path.startswith(b"/"):
            continue
        try:
            if path != b"/":
                split(path[1:])
        except ValueError:
            continue
        above, name = os.path.split(path)
        where = (path, STORE) if whose_store(name) is None else (above, Name(name))
        lines.append(RegistryLine(identity, VolumeId(volume), int(filesystem, 16), *where))
    return lines


def read_registry(dir_fd: int) -> bytes:
    """The text of the registry in a directory, which must be the caller's own and no other user's to write.

    Raises  FileNotFoundError if there is none; OSError EPERM if it is another's, or others can write it, or the
            directory; EFBIG; whatever the kernel says of a link, a FIFO
    """
    require_owner(os.fstat(dir_fd), os.geteuid())
    return read_file(STORES, MAX_BYTES, dir_fd=dir_fd, owner=os.geteuid())


def registered() -> list[RegistryLine]:
    """What the caller's own registry names, the newest last; nothing without one that can be the caller's."""
    try:
        return decode(read_own())
    except OSError:
        return []  # `why_unread` says why


def why_unread() -> tuple[bytes, str] | None:
    """Where the caller's registry is, and why it counts for nothing; None if it does, or if there is none."""
    try:
        read_own()
    except FileNotFoundError:
        return None
    except OSError as error:
        return os.path.join(lasting_dir(), STORES), error.strerror or "it can't be read"
    return None


def read_own() -> bytes:
    """The text of the caller's own registry. Raises  OSError"""
    with Fd(os.open(lasting_dir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        return read_registry(directory)


XATTR = "security.trashd"
"""Only a process with CAP_SYS_ADMIN in the user namespace that mounted the filesystem can set one in `security.`.

Source  xattr(7), cap_inode_setxattr() in security/commoncap.c
"""
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.E2BIG, errno.EROFS, *FULL)
UNNOTED = (
    "only this machine's list of stores (/var/lib/trashd/stores) records that root created it, not the store itself"
)
"""What is told of a store of root's on which that could not be noted."""


class StoreMaker(Enum):
    """Which user made a store, as far as that can be known.

    COPY     of a store that root made, by a user who could give it root's attribute
    UNKNOWN  not known
    """

    BY_ROOT = "by root"
    COPY = "copy"
    UNKNOWN = "unknown"


_WHOLE = [0, 0, (1 << 32) - 1]
"""Of /proc/self/uid_map in the first user namespace."""


def makes_common() -> bool:
    """Whether the store that the caller makes is one of root's for all users: whether what root notes on it counts.

    Without CAP_SYS_ADMIN, or in a user namespace, nothing can be noted, and in the next container nothing would show
    who made the store. There root makes one of his own, as any user.
    """
    if os.geteuid() != 0:
        return False
    from fusefs.linux.credentials import Capability, may_use  # a swap into a store that is there is spared it

    with open("/proc/self/uid_map", "rb") as ids:
        return may_use(Capability.SYS_ADMIN) and [int(word) for word in ids.read().split()] == _WHOLE


def note_made(kernel: Kernel, fd: Fd) -> bool:
    """Note on an opened `.trashd` that root made it; whether that could be. Raises  OSError"""
    with suppress_errno(*_CANNOT):
        kernel.set_xattr(fd, XATTR, in_words(kernel.identify(fd)).encode())
        return True
    return False


def is_noted(kernel: Kernel, fd: Fd) -> bool:
    """Whether it is noted on an opened `.trashd` that root made this very one. Raises  OSError"""
    return who_made(kernel, fd) is StoreMaker.BY_ROOT


def could_be_noted(kernel: Kernel, fd: Fd) -> bool:
    """Whether the filesystem of an opened `.trashd` keeps the attribute, for a root who may set it.

    A server's, or one in user space, may say that there is none, and take none: of it nobody knows before he tries.
    """
    try:
        os.getxattr(fd, XATTR)
    except OSError as error:
        return error.errno == errno.ENODATA and kernel.is_local(fd)
    return True


def what_unnoted_means(base_path: bytes) -> str:
    """What follows where nothing on the store of a directory says that root made it, and what helps."""
    volume = shell_word(base_path)
    return (
        "without that list, and on other machines, root's commands and service ignore the store until "
        f"trashd init --known {volume}; trashd init {volume} by root with CAP_SYS_ADMIN (which containers lack) "
        "records it in the store, if the filesystem supports security.* attributes"
    )


def who_made(kernel: Kernel, fd: Fd, places: Collection[bytes] = ()) -> StoreMaker:
    """Which user made the store of an opened `.trashd` of root's.

    places  paths of the directory that holds it, for which the caller, who is root, believes root's registry of stores
    Raises  OSError
    """
    found, noted = kernel.identify(fd), from_words(kernel.get_xattr(fd, XATTR) or b"")
    if noted is not None and compare(noted, found) is not Likelihood.OTHER:
        return StoreMaker.BY_ROOT
    named = (line.identity for line in (registered() if places else ()) if line.path in places)
    if any(compare(one, found) is not Likelihood.OTHER for one in named):
        return StoreMaker.BY_ROOT
    return StoreMaker.UNKNOWN if noted is None else StoreMaker.COPY


def way_out(base_path: bytes) -> str:
    """What helps where it is not known who made the store of a directory."""
    volume = shell_word(base_path)
    ours = f"if root created it, on another machine or before it was copied: trashd init --known {volume}"
    other = f"otherwise trashd init --replace {volume} replaces it, and its owners' next commands move their orphans"
    return f"inspect it; {ours}; {other}"
