"""The FUSE wire format: requests as read from /dev/fuse, and replies.

Source  linux/fuse.h, version 7.31 and later: fuse_in_header, fuse_out_header, fuse_attr, and the structs named below
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from fusefs.core.metadata_cache import Attributes

Request = bytes | memoryview
"""A request as it was read, with its header."""
Answer = bytes | int
"""The body of a reply, or an errno."""

NANO = 1_000_000_000
_ANSWER_HEAD = Struct("=IiQ")
REQUEST_HEAD_SIZE: Final = 40
_REQUEST_HEAD = Struct("=IIQQIII4x")
read_head: Final[Callable[[Request], tuple[int, ...]]] = _REQUEST_HEAD.unpack_from
"""The header of a request: its size, opcode, unique number, nodeid, and the caller's uid, gid and pid."""
_BODY_BYTES_MAX = 1 << 20
"""The size of the largest reply body: the kernel never requests more bytes in a read than it sends in a write."""
REQUEST_BYTES_MAX: Final = (1 << 20) + (1 << 12)
"""The largest write that libfuse negotiates, plus its header: the kernel refuses to read into a smaller buffer."""
FOPEN_KEEP_CACHE, FOPEN_CACHE_DIR = 1 << 1, 1 << 3

_ATTRIBUTES = "QQQqqqIIIIIIIII4x"
_ATTR = Struct("=QI4x" + _ATTRIBUTES)
_ENTRY = Struct("=QQQQII" + _ATTRIBUTES)
_TIME = "qI4x"
_STATX = Struct("=QI20x" + "II8xIIIHxxQQQ8x" + 4 * _TIME + "II120x")
"""fuse_statx_out, without the fields that we leave 0: attributes, and a device, which the kernel sets."""
_STATX_BASIC, _STATX_BTIME = 0x7FF, 0x800
_DIRENT = Struct("=QQII")
_DIRENT_PLUS = "=QQQQII" + _ATTRIBUTES + "QQII{}s"
"""fuse_direntplus with its name, padded to a multiple of eight bytes."""
_NUMBER, _ATTRIBUTES_AT = Struct("=Q"), 40
_NO_ATTRIBUTES = (0,) * 21
_OPEN = Struct("=QIi")
_WRITTEN = Struct("=I4x")
_BATCH_FORGET_IN = Struct("=I4x")
_FORGET_NODE = Struct("=QQ")


class Opcode(IntEnum):
    """The requests that we answer ourselves."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    TMPFILE = 51
    STATX = 52
    COPY_FILE_RANGE_64 = 53


NAME_OPCODES: Final = frozenset({
    Opcode.LOOKUP, Opcode.READLINK, Opcode.SYMLINK, Opcode.MKNOD, Opcode.MKDIR, Opcode.UNLINK, Opcode.RMDIR,
    Opcode.RENAME, Opcode.RENAME2, Opcode.LINK, Opcode.CREATE, Opcode.TMPFILE,
})  # fmt: skip
"""Requests that contain or return names."""
XATTR_OPCODES: Final = frozenset({Opcode.SETXATTR, Opcode.GETXATTR, Opcode.LISTXATTR, Opcode.REMOVEXATTR})


# The body of a request consists of numbers, then names, each followed by a NUL byte.

NO_NUMBERS: Final = Struct("=")
FORGET_IN: Final = Struct("=Q")
MKDIR_IN: Final = Struct("=II")
MKNOD_IN: Final = Struct("=III4x")
LINK_IN: Final = Struct("=Q")
GETATTR_IN: Final = Struct("=16x")
SETATTR_IN: Final = Struct("=I4xQQ8xqq8xII4xI4xII4x")
"""The fields to change (FATTR_*), the handle, and the values: size; atime and mtime; their ns; mode, uid, gid."""
FATTR_MODE, FATTR_UID, FATTR_GID, FATTR_SIZE, FATTR_ATIME, FATTR_MTIME, FATTR_FH = (1 << n for n in range(7))
FATTR_ATIME_NOW, FATTR_MTIME_NOW = 1 << 7, 1 << 8
RENAME_IN: Final = Struct("=Q")
RENAME2_IN: Final = Struct("=QI4x")
OPEN_IN: Final = Struct("=I4x")
CREATE_IN: Final = Struct("=III4x")
HANDLE_IN: Final = Struct("=Q")
READ_IN: Final = Struct("=QQI20x")
FSYNC_IN: Final = Struct("=QI4x")
FSYNC_DATA_ONLY: Final = 1
WRITE_IN: Final = Struct("=QQI12xI4x")
GETXATTR_IN: Final = Struct("=I4x")
GETXATTR_OUT: Final = Struct("=I4x")
SETXATTR_IN: Final = Struct("=II")
ACCESS_IN: Final = Struct("=I4x")
INTERRUPT_IN: Final = Struct("=Q")
STATFS_OUT: Final = Struct("=QQQQQIII28x")
"""Blocks: total, free, available to all users; inodes: total, free; block size, longest name, unit of block counts."""
FALLOCATE_IN: Final = Struct("=QqqI4x")
LSEEK_IN: Final = Struct("=QqI4x")
COPY_IN: Final = Struct("=Qq8xQqQ8x")
_BEFORE_NAME: Final[dict[int, Struct]] = {
    Opcode.LOOKUP: NO_NUMBERS, Opcode.SYMLINK: NO_NUMBERS, Opcode.MKNOD: MKNOD_IN, Opcode.MKDIR: MKDIR_IN,
    Opcode.CREATE: CREATE_IN, Opcode.LINK: LINK_IN,
}  # fmt: skip
_SIZES: Final[dict[int, int]] = {
    opcode: REQUEST_HEAD_SIZE + own.size
    for own, *opcodes in (
        (FORGET_IN, Opcode.FORGET),
        (_BATCH_FORGET_IN, Opcode.BATCH_FORGET),
        (SETATTR_IN, Opcode.SETATTR),
        (MKNOD_IN, Opcode.MKNOD),
        (MKDIR_IN, Opcode.MKDIR),
        (RENAME_IN, Opcode.RENAME),
        (RENAME2_IN, Opcode.RENAME2),
        (LINK_IN, Opcode.LINK),
        (OPEN_IN, Opcode.OPEN),
        (READ_IN, Opcode.READ, Opcode.READDIRPLUS),
        (WRITE_IN, Opcode.WRITE),
        (HANDLE_IN, Opcode.RELEASE, Opcode.RELEASEDIR, Opcode.FLUSH),
        (FSYNC_IN, Opcode.FSYNC, Opcode.FSYNCDIR),
        (SETXATTR_IN, Opcode.SETXATTR),
        (GETXATTR_IN, Opcode.GETXATTR, Opcode.LISTXATTR),
        (ACCESS_IN, Opcode.ACCESS),
        (CREATE_IN, Opcode.CREATE, Opcode.TMPFILE),
        (INTERRUPT_IN, Opcode.INTERRUPT),
        (FALLOCATE_IN, Opcode.FALLOCATE),
        (LSEEK_IN, Opcode.LSEEK),
        (COPY_IN, Opcode.COPY_FILE_RANGE, Opcode.COPY_FILE_RANGE_64),
    )
    for opcode in opcodes
}
"""The size of a request's header and numbers."""


def is_cut_off(request: Request) -> bool:
    """Whether a request is too short for its header and the numbers of its opcode. The kernel sends no such request."""
    return len(request) < REQUEST_HEAD_SIZE or len(request) < _SIZES.get(read_head(request)[1], 0)


def read_strings(request: Request, after: Struct = NO_NUMBERS, n: int = 1) -> list[bytes]:
    """Return the strings in a request, which follow its numbers.

    Raises  OSError EINVAL: there are not `n` strings, or the last one is not terminated
    """
    texts = bytes(request[REQUEST_HEAD_SIZE + after.size :]).split(b"\0")
    if texts.pop() or len(texts) != n:
        raise OSError(errno.EINVAL, "a string in the request is truncated")
    return texts


def read_names(request: Request, after: Struct = NO_NUMBERS, n: int = 1) -> list[bytes]:
    """Return the names of directory entries in a request.

    Raises  OSError EINVAL: there are not `n` names, or one is not a plain name
    """
    entry_names = read_strings(request, after, n)
    for name in entry_names:
        check_name(name)
    return entry_names


def check_name(name: bytes) -> None:
    """Raise OSError EINVAL if this is not a plain name of a directory entry. The kernel sends no such name."""
    if name in {b"", b".", b".."} or b"/" in name:
        raise OSError(errno.EINVAL, "not a valid name for an entry")


class CallerIds(NamedTuple):
    """The IDs of the caller of a request. pid: the ID of the calling thread"""

    uid: int
    gid: int
    pid: int


def encode_request(opcode: Opcode, nodeid: int, caller: tuple[int, int, int], body: bytes) -> bytes:
    """Encode a whole request. caller: uid, gid, pid"""
    return _REQUEST_HEAD.pack(REQUEST_HEAD_SIZE + len(body), opcode, 0, nodeid, *caller) + body


def encode_request_like(other: Request, opcode: Opcode, body: bytes) -> bytes:
    """Encode a request from the same caller about the same node."""
    _size, _opcode, _unique, nodeid, *caller = read_head(other)
    return encode_request(opcode, nodeid, (caller[0], caller[1], caller[2]), body)


def read_entry_name(request: Request) -> bytes:
    """Return the name in a request that looks up or creates an entry."""
    at = REQUEST_HEAD_SIZE + _BEFORE_NAME[read_head(request)[1]].size
    return bytes(request[at:]).partition(b"\0")[0]


def replace_nodeid(body: bytes, nodeid: int) -> bytes:
    """Replace both the nodeid and the inode number that users see in a reply that begins with fuse_entry_out."""
    number = _NUMBER.pack(nodeid)
    return number + body[8:_ATTRIBUTES_AT] + number + body[_ATTRIBUTES_AT + 8 :]


class Entry(NamedTuple):
    """The content of fuse_entry_out or fuse_attr_out.

    nodeid          0: there is no such name
    name_s, attr_s  how long the name and the attributes stay valid
    numbers         the fields of struct fuse_attr
    """

    nodeid: int
    name_s: float
    attr_s: float
    numbers: tuple[int, ...]

    def attributes_of(self, dev: int, ino: int, btime_ns: int) -> Attributes:
        """Return the attributes, completed with the fields that are not sent to the kernel."""
        (
            _ino, size, blocks, atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns, mode, nlink, uid, gid, rdev,
            blksize,
        ) = self.numbers  # fmt: skip
        times = (atime_s * NANO + atime_ns, mtime_s * NANO + mtime_ns, ctime_s * NANO + ctime_ns)
        return Attributes(dev, ino, mode, nlink, uid, gid, rdev, size, blocks, blksize, *times, btime_ns)


def read_entry(body: bytes, at: int = 0) -> Entry:
    """Read fuse_entry_out."""
    nodeid, _generation, name_s, attr_s, name_ns, attr_ns, *numbers = _ENTRY.unpack_from(body, at)
    return Entry(nodeid, name_s + name_ns / NANO, attr_s + attr_ns / NANO, tuple(numbers))


class ListedDirent(NamedTuple):
    """An entry of a READDIRPLUS reply: fuse_dirent and fuse_entry_out; its nodeid is 0 if only the name is sent."""

    name: bytes
    ino: int
    offset: int
    kind: int
    entry: Entry


def encode_batch_forget(forgotten: Sequence[tuple[int, int]]) -> bytes:
    """Encode a whole BATCH_FORGET. forgotten: nodeids, each with the number of references to forget"""
    pairs = b"".join(_FORGET_NODE.pack(*one) for one in forgotten)
    return encode_request(Opcode.BATCH_FORGET, 0, (0, 0, 0), _BATCH_FORGET_IN.pack(len(forgotten)) + pairs)


def read_attr(body: bytes) -> Entry:
    """Read fuse_attr_out."""
    attr_s, attr_ns, *numbers = _ATTR.unpack_from(body)
    return Entry(numbers[0], 0, attr_s + attr_ns / NANO, tuple(numbers))


def read_opened(body: bytes) -> tuple[int, int, int]:
    """Return the handle in a reply to OPEN, the FOPEN_* flags, and the backing ID for passthrough (0: none)."""
    fh, flags, backing_id = _OPEN.unpack(body)
    return fh, flags, backing_id


def read_written(body: bytes) -> int:
    """Return the number of bytes written, from a reply to WRITE or COPY_FILE_RANGE."""
    (n,) = _WRITTEN.unpack(body)
    return int(n)


def read_caller(request: Request) -> CallerIds:
    return CallerIds(*read_head(request)[4:])


def encode_attr(ino: int, attributes: Attributes, attr_s: float = 0) -> bytes:
    """Encode fuse_attr_out with a node's attributes."""
    seconds, ns = _timeout(attr_s)
    return _ATTR.pack(seconds, ns, *_attributes(ino, attributes))


def encode_statx(ino: int, attributes: Attributes, attr_s: float = 0) -> bytes:
    """Encode fuse_statx_out with a node's attributes and birth time."""
    (
        _dev, _ino, mode, nlink, uid, gid, rdev, size, blocks, blksize, atime_ns, mtime_ns, ctime_ns, btime_ns,
    ) = attributes  # fmt: skip
    mask = _STATX_BASIC | _STATX_BTIME if btime_ns else _STATX_BASIC
    return _STATX.pack(
        *_timeout(attr_s), mask, blksize, nlink, uid, gid, mode, ino, size, blocks,
        *divmod(atime_ns, NANO), *divmod(btime_ns, NANO), *divmod(ctime_ns, NANO), *divmod(mtime_ns, NANO),
        rdev >> 8 & 0xFFF, rdev & 0xFF | rdev >> 12 & 0xFFF00,
    )  # fmt: skip


def read_in(request: Request) -> tuple[int, int, int]:
    """Return the handle, the offset and the size of the largest reply body of a READ or READDIRPLUS request."""
    fh, offset, size = READ_IN.unpack_from(request, REQUEST_HEAD_SIZE)
    return fh, offset, min(size, _BODY_BYTES_MAX)


def replace_handle(request: Request, fh: int) -> bytes:
    """Replace the handle in a request whose numbers begin with it."""
    at = REQUEST_HEAD_SIZE + HANDLE_IN.size
    return bytes(request[:REQUEST_HEAD_SIZE]) + HANDLE_IN.pack(fh) + bytes(request[at:])


def encode_error(unique: int, error: int) -> bytes:
    """Encode the reply to a failed request. error: an errno"""
    return _ANSWER_HEAD.pack(_ANSWER_HEAD.size, -error, unique)


def encode_head(unique: int, body_size: int) -> bytes:
    return _ANSWER_HEAD.pack(_ANSWER_HEAD.size + body_size, 0, unique)


def _attributes(ino: int, attributes: Attributes) -> tuple[int, ...]:
    """Return the fields of struct fuse_attr. ino: the inode number that users see"""
    (
        _dev, _ino, mode, nlink, uid, gid, rdev, size, blocks, blksize, atime_ns, mtime_ns, ctime_ns, _btime,
    ) = attributes  # fmt: skip
    return (
        ino, size, blocks, atime_ns // NANO, mtime_ns // NANO, ctime_ns // NANO,
        atime_ns % NANO, mtime_ns % NANO, ctime_ns % NANO, mode, nlink, uid, gid, rdev & 0xFFFFFFFF, blksize,
    )  # fmt: skip


def encode_missing_entry(entry_s: float) -> bytes:
    """Encode fuse_entry_out for a name that does not exist."""
    seconds, ns = _timeout(entry_s)
    return _ENTRY.pack(0, 0, seconds, 0, ns, 0, *[0] * 15)


def encode_entry(nodeid: int, ino: int, attributes: Attributes, entry_s: float, attr_s: float) -> bytes:
    """Encode fuse_entry_out.

    ino              the inode number that users see
    entry_s, attr_s  how long the name and the attributes stay valid
    """
    seconds, ns = _timeout(entry_s)
    attr_seconds, attr_ns = _timeout(attr_s)
    return _ENTRY.pack(nodeid, 0, seconds, attr_seconds, ns, attr_ns, *_attributes(ino, attributes))


def read_handle(message: bytes) -> int:
    """Return the handle in the fuse_open_out at the end of a reply."""
    fh: int = _OPEN.unpack_from(message, len(message) - _OPEN.size)[0]
    return fh


def encode_open(fh: int, flags: int) -> bytes:
    """Encode fuse_open_out. flags: FOPEN_*"""
    return _OPEN.pack(fh, flags, 0)


def read_open_flags(body: bytes) -> int:
    """Return the flags in fuse_open_out."""
    flags: int = _OPEN.unpack(body)[1]
    return flags


@lru_cache(maxsize=32)
def _direntplus(n_words: int) -> Callable[..., bytes]:
    """Return the function that packs struct fuse_direntplus with a name of this many eight-byte words."""
    return Struct(_DIRENT_PLUS.format(8 * n_words)).pack


def encode_direntplus(
    name: bytes, offset: int, nodeid: int, ino: int, attributes: Attributes, entry_s: float, attr_s: float
) -> bytes:
    """Encode an entry of a listing with its node's attributes. offset: the offset of the next entry"""
    seconds, ns = _timeout(entry_s)
    attr_seconds, attr_ns = _timeout(attr_s)
    return _direntplus((len(name) + 7) >> 3)(
        nodeid, 0, seconds, attr_seconds, ns, attr_ns, *_attributes(ino, attributes),
        ino, offset, len(name), attributes.mode >> 12, name,
    )  # fmt: skip


def direntplus_size(name: bytes) -> int:
    return _ENTRY.size + _DIRENT.size + (len(name) + 7 & ~7)


def read_direntplus(reply: bytes) -> Iterator[ListedDirent]:
    at = 0
    while at < len(reply):
        ino, offset, n_name, kind = _DIRENT.unpack_from(reply, at + _ENTRY.size)
        name_at = at + _ENTRY.size + _DIRENT.size
        name = reply[name_at : name_at + n_name]
        yield ListedDirent(name, ino, offset, kind, read_entry(reply, at))
        at += direntplus_size(name)


def encode_dirent_without_node(name: bytes, offset: int, ino: int, kind: int) -> bytes:
    """Encode an entry of a listing without its node, which the kernel looks up when needed. kind: DT_DIR etc."""
    return _direntplus((len(name) + 7) >> 3)(*_NO_ATTRIBUTES, ino, offset, len(name), kind, name)


@lru_cache(maxsize=64)
def _timeout(timeout_s: float) -> tuple[int, int]:
    return divmod(int(timeout_s * NANO), NANO)
