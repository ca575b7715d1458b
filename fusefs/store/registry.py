"""The stores that somebody uses: a registry of his own names each, so that one in a home directory is found too.

Each user has his below his home, and root its own, which no user can write. A line tells the store's identity besides
its path: a copy is another store, and nobody has vouched for it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import NamedTuple

from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.names import VolumeId, is_volume_id, split
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.places import HOME, lasting_dir
from fusefs.store.layout import Store

STORES = b"stores"
MAX_BYTES = 64 * 1024
MAX_LINES = 1000
_LINE = re.compile(rb"(-|-?\d{1,10}:[0-9a-f]{2,256}) (\d{1,20}) (\d{1,20}) ([0-9a-f]{32}) ([0-9a-f]{1,16}) (/[!-~]*)")
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~/+,:@=")


class Line(NamedTuple):
    """A line: a store, as it was when it was used last.

    identity    of `.trashd`
    volume      its id
    filesystem  f_fsid of what it is on, as far as that has one; 0 for none
    path        of the directory that holds it, without links
    """

    identity: Identity
    volume: VolumeId
    filesystem: int
    path: bytes


def encode(one: Line) -> bytes:
    """Its line, with the newline."""
    handle, ino, btime_ns = one.identity
    quoted = b"".join(b"%c" % byte if byte in _PLAIN else b"%%%02X" % byte for byte in one.path)
    told = f"{handle or '-'} {ino} {btime_ns} {one.volume} {one.filesystem:x} "
    return told.encode() + quoted + b"\n"


def decode(text: bytes) -> list[Line]:
    """What a registry says; what is no line of one is left out. Somebody else may have written all of it."""
    found = []
    for line in text.split(b"\n", MAX_LINES)[:MAX_LINES]:
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        handle, ino, btime_ns, volume, filesystem, quoted = match.groups()
        path = re.sub(rb"%([0-9A-F]{2})", lambda byte: bytes([int(byte[1], 16)]), quoted)
        if is_volume_id(volume.decode()) and _is_plain(path):
            identity = Identity("" if handle == b"-" else handle.decode(), int(ino), int(btime_ns))
            found.append(Line(identity, VolumeId(volume.decode()), int(filesystem, 16), path))
    return found


def _is_plain(path: bytes) -> bool:
    try:
        return path == b"/" or bool(split(path[1:]))
    except ValueError:
        return False


def read_registry(dir_fd: int) -> bytes:
    """The text of the registry in a directory, which must be the caller's own and nobody else's to write.

    Raises  FileNotFoundError if there is none; OSError EPERM if it is another's, or others can write it, or the
            directory; EFBIG; whatever the kernel says of a link, a FIFO
    """
    _must_be_own(os.fstat(dir_fd))
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with Fd(os.open(STORES, flags, dir_fd=dir_fd)) as fd:
        st = os.fstat(fd)
        _must_be_own(st)
        if not stat.S_ISREG(st.st_mode) or st.st_nlink != 1:
            raise OSError(errno.EPERM, "it is no regular file with one name")
        if st.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"it is larger than {MAX_BYTES // 1024} KiB")
        return os.pread(fd, MAX_BYTES, 0)


def _must_be_own(st: os.stat_result) -> None:
    if st.st_uid != os.geteuid() or st.st_mode & OTHERS_WRITE:
        raise OSError(errno.EPERM, f"it belongs to uid {st.st_uid}, or others can write it")


def open_directory(path: bytes) -> Fd:
    """The directory that holds a registry. Raises  OSError"""
    return Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def registered() -> list[Line]:
    """What the caller's own registry names, the newest last; nothing if he has none that could be his."""
    try:
        return decode(_read_own())
    except OSError:
        return []  # `why_unread` says why


def why_unread() -> tuple[bytes, str] | None:
    """Where the caller's registry is, and why it counts for nothing; None if it does, or if there is none."""
    try:
        _read_own()
    except FileNotFoundError:
        return None
    except OSError as error:
        return os.path.join(lasting_dir(), STORES), error.strerror or "it can't be read"
    return None


def _read_own() -> bytes:
    with open_directory(lasting_dir()) as directory:
        return read_registry(directory)


def describe(store: Store) -> Line:
    """What a registry is to say of a store. Raises  OSError"""
    filesystem = os.fstatvfs(store.fd).f_fsid & (1 << 64) - 1
    return Line(store.kernel.identify(store.fd), store.volume.id, filesystem, place_of_store(store))


def place_of_store(store: Store) -> bytes:
    """The directory that holds a store, where it is without a mount of ours. Raises  OSError"""
    path = os.readlink(store.base_fd.path())
    if store.mounted is not None and (path.startswith(HOME + b"/") or not _leads_to(store.kernel, path, store)):
        return store.base_path  # of a mount over itself: when that is gone, the store is there
    return path


def _leads_to(kernel: Kernel, path: bytes, store: Store) -> bool:
    try:
        return os.path.samestat(os.stat(path), kernel.fstat(store.base_fd))
    except OSError:
        return False


def is_remembered(store: Store) -> bool:
    """Whether the caller's registry names a store: its identity, and a path that leads to just that one.

    A copy that stands elsewhere is another store, be it a copy of the whole disk.
    """
    try:
        one = describe(store)
        text = _read_own()
    except OSError:
        return False
    return _has(text, encode(one)) or any(is_same(one, other) for other in decode(text))


def is_vouched(store: Store) -> bool:
    """Whether somebody who may says of a store that it is no copy: root of his by having made it, a user of his own.

    To be asked by its user. What nobody vouches for is shown and restored from, and nothing in it is reaped unasked. A
    user who can have no registry vouches for what he uses, and so does a pointer for where it leads; for a copy that
    can be known as one only `init` does, which makes it a store of its own.
    """
    if store.owner == 0 or is_remembered(store):
        return True
    return not _is_copy(store, store.kernel.identify(store.fd)) and (store.is_named or not _has_place())


def _is_copy(store: Store, found: Identity) -> bool:
    """Whether a store's own file says that it was another one."""
    return compare(found, store.volume.store) is Likelihood.OTHER


def _has_place() -> bool:
    """Whether the caller has a registry, or could have one."""
    try:
        path = lasting_dir()
    except FileNotFoundError:
        return False
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


def is_same(one: Line, other: Line) -> bool:
    """Whether two lines mean one store at one place."""
    known = compare(one.identity, other.identity)
    return known is not Likelihood.OTHER and (one.volume, one.path) == (other.volume, other.path)


def _has(text: bytes, line: bytes) -> bool:
    return text.startswith(line) or b"\n" + line in text


def remember(store: Store) -> str:
    """Have the caller's registry name a store that he uses; why it does not, a clause for a person, or nothing.

    Without a home, or in one that can't be written, it does not: then whatever is told of the store says where it is.
    Root's names no user's store: that is its owner's to do. Nor is a copy vouched for by being used.
    """
    if os.geteuid() == 0 != store.owner:
        return "it is a user's own: he notes it"
    try:
        one = describe(store)
        try:
            if _has(_read_own(), encode(one)):
                return ""
        except FileNotFoundError:
            pass
        if _is_copy(store, one.identity):
            return "it is a copy of another one"
        from fusefs.store.registering import write  # only the first use of a store needs it

        return write(store.kernel, one)
    except OSError as error:
        return error.strerror or "it can't be written"
