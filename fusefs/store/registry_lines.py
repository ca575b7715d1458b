"""The lines of a registry of stores: their format, and reading them without trust in their writer."""

from __future__ import annotations

import os
from typing import NamedTuple

from fusefs.core.identity import Identity, from_words, in_words, is_marked
from fusefs.core.names import STORE, Name, VolumeId, is_hex, is_volume_id, split, whose_store
from fusefs.core.printable_names import unescape
from fusefs.linux.fd import Fd
from fusefs.linux.runtime_directories import lasting_dir, read_file, require_owner

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
    return [one for line in text.split(b"\n", MAX_LINES)[:MAX_LINES] if (one := _decode_line(line)) is not None]


def _decode_line(line: bytes) -> RegistryLine | None:
    words = line.rsplit(b" ", 3)
    if len(words) != len(("identity", "volume", "filesystem", "path")) or not line.isascii():
        return None
    identity = from_words(words[0])
    volume, filesystem, quoted = (word.decode() for word in words[1:])
    is_number = 0 < len(filesystem) <= _FILESYSTEM_DIGITS and is_hex(filesystem)
    if identity is None or is_marked(identity) or not is_volume_id(volume) or not is_number:
        return None
    path = _unquoted(quoted)
    if path is None or not path.startswith(b"/") or not _is_plain(path):
        return None
    above, name = os.path.split(path)
    where = (path, STORE) if whose_store(name) is None else (above, Name(name))
    return RegistryLine(identity, VolumeId(volume), int(filesystem, 16), *where)


def _unquoted(text: str) -> bytes | None:
    """The path in a line; None for what has a character in it that is in no line."""
    return unescape(text.encode(), b"%", 2, 16) if text.isprintable() else None


def _is_plain(path: bytes) -> bool:
    try:
        return path == b"/" or bool(split(path[1:]))
    except ValueError:
        return False


def read_registry(dir_fd: int) -> bytes:
    """The text of the registry in a directory, which must be the caller's own and no other user's to write.

    Raises  FileNotFoundError if there is none; OSError EPERM if it is another's, or others can write it, or the
            directory; EFBIG; whatever the kernel says of a link, a FIFO
    """
    require_owner(os.fstat(dir_fd), os.geteuid())
    return read_file(STORES, MAX_BYTES, dir_fd=dir_fd, owner=os.geteuid())


def open_directory(path: bytes) -> Fd:
    """The directory that holds a registry. Raises  OSError"""
    return Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


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
    with open_directory(lasting_dir()) as directory:
        return read_registry(directory)
