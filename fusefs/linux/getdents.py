"""Directory entries from getdents64(2), with fields that os.scandir omits: types, inode numbers, offsets.

To read a whole directory at once, use `Kernel.scan`, which is os.scandir and thus C. `read_more` is for code that
passes the fd to another process: scandir would read ahead, to the end of the directory. `Dirents` is for code that
needs the filesystem's own offsets, which stay valid when the directory changes. The two don't share a loop over the
buffer, because that would take a sixth longer for each entry (measured).
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fusefs.linux.fd import Fd
from fusefs.linux.syscalls import getdents64

if TYPE_CHECKING:  # only a mount's daemon needs the cache
    from fusefs.core.metadata_cache import Dirent

    Call = Callable[[Callable[[int, int], list[Dirent]], int, int], list[Dirent]]

_SIZE, _LEAST_SIZE = 32768, 512
_HEAD = struct.Struct("=QqHB")
"""struct linux_dirent64: inode number, offset of the next entry, length of this one, and type; the name follows."""
_NAME_AT = 19

_DOTS = (b".", b"..")
_DOT_LENGTH = 24
"""The length of an entry whose name has at most four bytes."""


class DirentBlock(NamedTuple):
    """Some entries of a directory, without `.` and `..`: names (decoded with os.fsdecode), inode numbers and types.

    text    the names joined with slashes, which can be searched quickly
    n_seen  number of entries including those that were omitted
    """

    text: str
    names: list[str]
    inos: list[int]
    kinds: Sequence[int]
    n_seen: int


def read_more(fd: int) -> DirentBlock | None:
    """Read the next entries with one system call, starting at the fd's position; return None at the end.

    Nothing is read ahead: another process that gets the fd continues right after these entries.
    """
    raw = getdents64(fd, _SIZE)
    if not raw:
        return None
    size = len(raw)
    head_at, end_of_name = _HEAD.unpack_from, raw.index
    names: list[bytes] = []
    inos: list[int] = []
    kinds: list[int] = []
    at = 0
    while at < size:
        ino, _following, length, kind = head_at(raw, at)
        name_at = at + _NAME_AT
        name = raw[name_at : end_of_name(0, name_at)]
        at += length
        if length == _DOT_LENGTH and name in _DOTS:
            continue
        names.append(name)
        inos.append(ino)
        kinds.append(kind)
    text = os.fsdecode(b"/".join(names))
    return DirentBlock(text, text.split("/") if names else [], inos, kinds, len(names))


def _call(function: Callable[[int, int], list[Dirent]], offset: int, size: int) -> list[Dirent]:
    return function(offset, size)


class Dirents:
    """An open directory that can be read from any offset; entries that were read ahead need no system call."""

    def __init__(self, fd: Fd) -> None:
        """fd: readable; still belongs to the caller"""
        self.fd = fd
        self._entries_ahead: list[Dirent] = []
        self._offset = 0
        self._position = -1

    def read_from(self, offset: int, size: int = _SIZE, call: Call = _call) -> Iterator[Dirent]:
        """Iterate over the entries from an offset to the end. To continue later, pass the offset of the last entry.

        size  bytes of entries to read at a time; more if that is too few for one entry
        call  runs each system call, for example with a lock released
        """
        if offset == 0 or offset != self._offset:
            self._entries_ahead = []
            self._offset = offset
        while True:
            ahead = self._entries_ahead
            while ahead:
                entry = ahead[-1]
                yield entry
                ahead.pop()
                self._offset = entry[2]
            self._entries_ahead = call(self.block, self._offset, size)[::-1]
            if not self._entries_ahead:
                return

    def block(self, offset: int, size: int = _SIZE) -> list[Dirent]:
        """Read entries from an offset with one system call; return [] at the end. size: as for `read_from`"""
        if offset == 0 or offset != self._position:
            self._seek(offset)
        entries = self._read(max(size, _LEAST_SIZE))
        self._position = entries[-1][2] if entries else -1
        return entries

    def _seek(self, offset: int) -> None:
        try:
            os.lseek(self.fd, offset, os.SEEK_SET)
        except OSError as error:
            # On ext4, no offset is valid once the directory has been removed. On other filesystems, reading would
            # then fail with ENOENT, which libc treats as the end.
            if error.errno != errno.EINVAL or os.fstat(self.fd).st_nlink:
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error

    def _read(self, room: int) -> list[Dirent]:
        raw = getdents64(self.fd, room)
        size = len(raw)
        head_at, end_of_name = _HEAD.unpack_from, raw.index
        entries = []
        at = 0
        while at < size:
            ino, following, length, kind = head_at(raw, at)
            name_at = at + _NAME_AT
            entries.append((raw[name_at : end_of_name(0, name_at)], ino, following, kind))
            at += length
        return entries
