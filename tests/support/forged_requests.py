"""FUSE requests as no kernel sends them: valid ones with fields, lengths and names changed, and their replies.

Each step of a case has dice of its own, so a case of fewer steps has the same ones otherwise.
"""

import os
import stat
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from fusefs.core.fuse_protocol import REQUEST_HEAD_SIZE, Opcode

_HEAD, _REPLY_HEAD = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
REPLY_HEAD_SIZE: Final = _REPLY_HEAD.size
_ENTRY_SIZE, _ATTR_SIZE, _OPEN_SIZE, _STATX_SIZE, _STATFS_SIZE = 128, 104, 16, 288, 80
_ENTRY_OUT, _DIRENT = struct.Struct("=Q92xI"), struct.Struct("=QQII")
_ERRNO_MAX = 511
"""The kernel refuses a reply with more."""

READDIR, POLL, IOCTL, NOTIFY_REPLY, INIT, SYNCFS = 28, 40, 39, 41, 26, 50
UNANSWERED: Final = {Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT}
_OTHER_OPCODES = (0, 7, READDIR, 31, 37, IOCTL, POLL, INIT, 48, 49, SYNCFS, 54, 200, 4096, 1 << 20, (1 << 32) - 1)

# The numbers of a request's own part: a letter of `struct`, and what it means; then how many names follow.
_OF_HANDLE = "Q:fh I:flags I:flags Q:any"
_OF_READ = "Q:fh Q:offset I:size I:any Q:any I:flags I:any"
_LAYOUTS: Final[dict[int, tuple[str, int]]] = {
    Opcode.LOOKUP: ("", 1),
    Opcode.FORGET: ("Q:count", 0),
    Opcode.GETATTR: ("I:flags I:any Q:fh", 0),
    Opcode.SETATTR: (
        "I:valid I:any Q:fh Q:offset Q:any Q:time Q:time Q:time I:ns I:ns I:ns I:mode I:any I:uid I:uid I:any", 0,
    ),
    Opcode.READLINK: ("", 0),
    Opcode.SYMLINK: ("", 2),
    Opcode.MKNOD: ("I:mode I:any I:umask I:any", 1),
    Opcode.MKDIR: ("I:mode I:umask", 1),
    Opcode.UNLINK: ("", 1),
    Opcode.RMDIR: ("", 1),
    Opcode.RENAME: ("Q:node", 2),
    Opcode.LINK: ("Q:node", 1),
    Opcode.OPEN: ("I:open I:any", 0),
    Opcode.READ: (_OF_READ, 0),
    Opcode.WRITE: (_OF_READ, 0),
    Opcode.STATFS: ("", 0),
    Opcode.RELEASE: (_OF_HANDLE, 0),
    Opcode.FSYNC: ("Q:fh I:flags I:any", 0),
    Opcode.SETXATTR: ("I:size I:flags", 1),
    Opcode.GETXATTR: ("I:size I:any", 1),
    Opcode.LISTXATTR: ("I:size I:any", 0),
    Opcode.REMOVEXATTR: ("", 1),
    Opcode.FLUSH: (_OF_HANDLE, 0),
    Opcode.OPENDIR: ("I:open I:any", 0),
    Opcode.RELEASEDIR: (_OF_HANDLE, 0),
    Opcode.FSYNCDIR: ("Q:fh I:flags I:any", 0),
    Opcode.ACCESS: ("I:flags I:any", 0),
    Opcode.CREATE: ("I:open I:mode I:umask I:any", 1),
    Opcode.INTERRUPT: ("Q:unique", 0),
    Opcode.FALLOCATE: ("Q:fh Q:offset Q:offset I:flags I:any", 0),
    Opcode.READDIRPLUS: (_OF_READ, 0),
    Opcode.RENAME2: ("Q:node I:flags I:any", 2),
    Opcode.LSEEK: ("Q:fh Q:offset I:flags I:any", 0),
    Opcode.COPY_FILE_RANGE: ("Q:fh Q:offset Q:node Q:fh Q:offset Q:offset Q:any", 0),
    Opcode.COPY_FILE_RANGE_64: ("Q:fh Q:offset Q:node Q:fh Q:offset Q:offset Q:any", 0),
    Opcode.TMPFILE: ("I:open I:mode I:umask I:any", 1),
    Opcode.STATX: ("I:flags I:any Q:fh I:flags I:any", 0),
    Opcode.BATCH_FORGET: ("I:n_pairs I:any", 0),
}  # fmt: skip
_OFTEN = (
    Opcode.LOOKUP, Opcode.LOOKUP, Opcode.LOOKUP, Opcode.CREATE, Opcode.CREATE, Opcode.MKDIR, Opcode.OPEN,
    Opcode.OPENDIR, Opcode.READDIRPLUS, Opcode.RENAME2, Opcode.GETATTR, Opcode.SETATTR, Opcode.RELEASE, Opcode.FORGET,
)  # fmt: skip
_OF_DIRECTORIES = {Opcode.OPENDIR, Opcode.READDIRPLUS, Opcode.RELEASEDIR, Opcode.FSYNCDIR}
_NAMES = (b"file", b"link", b"deep", b"er", b"leaf", b"shared", b"other", b"fifo", b"a", b"b", b"c", b"d", b".trashd")
_XATTRS = (b"user.x", b"user.y", b"system.posix_acl_access", b"security.selinux", b"security.capability", b"trusted.t")
_ODD_NAMES = (
    b"", b".", b"..", b"a/b", b"../..", b"/", b"/etc/passwd", b"deep/er/leaf", b"n" * 255, b"n" * 256, b"n" * 4096,
    b"\xff\xfe", b"a\0b", b"a\0", b"\0", b"drop",
)  # fmt: skip
_ODD_NUMBERS = (
    0, 1, 2, 3, 127, 4095, 4096, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 63) + 1,
    (1 << 64) - 2, (1 << 64) - 1,
)  # fmt: skip
_OPEN_FLAGS = (0, 1, 2, os.O_TRUNC | 1, os.O_APPEND | 1, os.O_EXCL, os.O_DIRECTORY, os.O_PATH, 1 << 5, os.O_DIRECT)
_MODES = (
    stat.S_IFREG | 0o644, stat.S_IFREG | 0o4755, stat.S_IFDIR | 0o777, stat.S_IFIFO | 0o600, stat.S_IFSOCK | 0o600,
    stat.S_IFCHR | 0o666, stat.S_IFBLK | 0o666, stat.S_IFLNK | 0o777, 0o644, 0,
)  # fmt: skip
_ROOM = 1 << 16


class ForgedCaller(NamedTuple):
    """Who asks."""

    uid: int
    gid: int
    pid: int


@dataclass(frozen=True)
class Message:
    """A request; `unique` names its reply."""

    content: bytes
    unique: int
    opcode: int
    n_answers: tuple[int, ...]
    room: int
    """Bytes that a reply's body may have at most; -1: whatever it is."""

    def __str__(self) -> str:
        head = _HEAD.unpack_from(self.content.ljust(REQUEST_HEAD_SIZE, b"\0"))
        name = Opcode(self.opcode).name if self.opcode in _LAYOUTS else str(self.opcode)
        size, _opcode, _unique, nodeid, uid, _gid, pid, _more = head
        body = self.content[REQUEST_HEAD_SIZE:]
        shown = body[:100].hex() + (f"... ({len(body)} bytes)" if len(body) > 100 else "")
        wrong = "" if size == len(self.content) else f" len={size} of {len(self.content)}"
        return f"{name} nodeid={nodeid} uid={uid} pid={pid}{wrong} {shown}"


@dataclass
class ServerObjects:
    """The objects of the server that replies have named: nodes with their nlookup, and handles."""

    n_lookups: Counter[int] = field(default_factory=Counter)
    nodeids: list[int] = field(default_factory=lambda: [1])
    parents: list[int] = field(default_factory=lambda: [1])
    files: list[int] = field(default_factory=list)
    directories: list[int] = field(default_factory=list)
    uniques: list[int] = field(default_factory=lambda: [0])

    def count_lookup(self, nodeid: int, mode: int) -> None:
        """Count the lookup of a reply's entry, as the kernel does."""
        if nodeid:
            self.n_lookups[nodeid] += 1
            if nodeid not in self.nodeids:
                self.nodeids.append(nodeid)
            if stat.S_ISDIR(mode) and nodeid not in self.parents:
                self.parents.append(nodeid)

    def note_request(self, message: Message) -> None:
        """Note that a request is sent, which may forget nodes."""
        for nodeid, n in _forgotten(message):
            if n < self.n_lookups[nodeid]:
                self.n_lookups[nodeid] -= n
                continue
            del self.n_lookups[nodeid]
            for nodeids in (self.nodeids, self.parents):
                if nodeid in nodeids and nodeid != 1:
                    nodeids.remove(nodeid)

    def note_reply(self, message: Message, error: int, body: bytes) -> None:
        """Note the objects that a reply names. Raises  AssertionError: the kernel would refuse the reply"""
        assert 0 <= error <= _ERRNO_MAX, f"error {error}"
        assert not (error and body), "a body beside an error"
        if error:
            return
        opcode = message.opcode
        if opcode in _REPLY_SIZES:
            assert len(body) == _REPLY_SIZES[opcode], f"{len(body)} bytes"
        elif message.room >= 0:
            assert len(body) <= message.room, f"{len(body)} bytes for {message.room}"
        if opcode in _REPLIES_WITH_ENTRY:
            self.count_lookup(*_ENTRY_OUT.unpack_from(body))
        if opcode in {Opcode.CREATE, Opcode.TMPFILE}:
            self.files += struct.unpack_from("=Q", body, _ENTRY_SIZE)
        elif opcode == Opcode.OPEN:
            self.files += struct.unpack_from("=Q", body)
        elif opcode == Opcode.OPENDIR:
            self.directories += struct.unpack_from("=Q", body)
        elif opcode == Opcode.READDIRPLUS:
            self._listed(body)
        elif opcode in {Opcode.RELEASE, Opcode.RELEASEDIR}:
            (fh,) = struct.unpack_from("=Q", message.content, REQUEST_HEAD_SIZE)
            for handles in (self.files, self.directories):
                if fh in handles:
                    handles.remove(fh)

    def _listed(self, body: bytes) -> None:
        at = 0
        while at < len(body):
            assert at + _ENTRY_SIZE + _DIRENT.size <= len(body), "an entry is cut off"
            nodeid, mode = _ENTRY_OUT.unpack_from(body, at)
            _ino, _offset, n_name, _kind = _DIRENT.unpack_from(body, at + _ENTRY_SIZE)
            assert 0 < n_name <= 1024, f"a name of {n_name} bytes"
            name_at = at + _ENTRY_SIZE + _DIRENT.size
            name = body[name_at : name_at + n_name]
            assert len(name) == n_name, "a name is cut off"
            assert not {0, 0x2F} & {*name}, f"a name is {name!r}"
            if name not in {b".", b".."}:
                self.count_lookup(nodeid, mode)
            at = name_at + (n_name + 7) // 8 * 8
        assert at == len(body), "the last entry is not padded"


_REPLIES_WITH_ENTRY = {
    Opcode.LOOKUP, Opcode.SYMLINK, Opcode.MKNOD, Opcode.MKDIR, Opcode.LINK, Opcode.CREATE, Opcode.TMPFILE,
}  # fmt: skip
_REPLY_SIZES: Final[dict[int, int]] = {
    **dict.fromkeys(_REPLIES_WITH_ENTRY, _ENTRY_SIZE),
    Opcode.CREATE: _ENTRY_SIZE + _OPEN_SIZE, Opcode.TMPFILE: _ENTRY_SIZE + _OPEN_SIZE,
    Opcode.GETATTR: _ATTR_SIZE, Opcode.SETATTR: _ATTR_SIZE, Opcode.STATX: _STATX_SIZE, Opcode.STATFS: _STATFS_SIZE,
    Opcode.OPEN: _OPEN_SIZE, Opcode.OPENDIR: _OPEN_SIZE, Opcode.WRITE: 8, Opcode.LSEEK: 8,
    Opcode.COPY_FILE_RANGE: 8, Opcode.COPY_FILE_RANGE_64: 8,
    **dict.fromkeys((
        Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RENAME2, Opcode.RELEASE, Opcode.RELEASEDIR, Opcode.FSYNC,
        Opcode.FSYNCDIR, Opcode.FLUSH, Opcode.SETXATTR, Opcode.REMOVEXATTR, Opcode.ACCESS, Opcode.FALLOCATE,
    ), 0),
}  # fmt: skip


def parse_reply(reply: bytes) -> tuple[int, int, bytes]:
    """The unique, the errno and the body. Raises  AssertionError: its head is wrong"""
    assert len(reply) >= REPLY_HEAD_SIZE, f"a reply of {len(reply)} bytes"
    size, error, unique = _REPLY_HEAD.unpack_from(reply)
    assert size == len(reply), f"len={size} of {len(reply)}"
    return unique, -error, reply[REPLY_HEAD_SIZE:]


def plain(opcode: int, own: bytes, nodeid: int, unique: int, caller: ForgedCaller) -> Message:
    """A request as a kernel sends it."""
    content = _HEAD.pack(REQUEST_HEAD_SIZE + len(own), opcode, unique, nodeid, *caller, 0) + own
    return Message(content, unique, opcode, (0,) if opcode in UNANSWERED else (1,), -1)


class Forger:
    """Draws one request after the other."""

    def __init__(self, objects: ServerObjects, callers: tuple[ForgedCaller, ...], oddness: float) -> None:
        """oddness: the probability that something of a request is not as the kernel sends it"""
        self.objects, self._callers, self._oddness = objects, callers, oddness

    def draw(self, dice: Random, unique: int) -> Message:
        opcode = int(dice.choice(_OFTEN) if dice.random() < 0.6 else dice.choice([*_LAYOUTS]))
        layout, n_names = _LAYOUTS[opcode]
        own = b"".join(self._number(dice, opcode, *word.split(":")) for word in layout.split())
        own += self._names(dice, opcode, n_names)
        if opcode == Opcode.WRITE:
            own += dice.randbytes(dice.choice((0, 1, 100, 5000)))
        elif opcode == Opcode.SETXATTR:
            own += dice.randbytes(dice.choice((0, 1, 44, 300)))
        elif opcode == Opcode.BATCH_FORGET:
            (n,) = struct.unpack_from("=I", own)
            own += b"".join(self._pair(dice) for _ in range(min(n, 200)))
        nodeid = self._nodeid(dice, is_parent=n_names > 0 or opcode in _OF_DIRECTORIES)
        caller = dice.choice(self._callers)
        if self._is_odd(dice):
            uid, gid, pid = caller
            nobody = (1 << 32) - 1
            caller = ForgedCaller(
                *dice.choice(((0, 0, 0), (nobody, nobody, pid), (uid, gid, 1 << 30), (1234, 77, pid)))
            )
        if self._is_odd(dice):
            unique = dice.choice((0, 1, unique + 1, (1 << 64) - 1, dice.choice(self.objects.uniques)))
        if self._is_odd(dice):
            opcode = dice.choice((*_OTHER_OPCODES, *_LAYOUTS))
        size = REQUEST_HEAD_SIZE + len(own)
        if self._is_odd(dice):
            own = self._spoiled(dice, own)
            size = REQUEST_HEAD_SIZE + len(own)
        if self._is_odd(dice):
            size = dice.choice((0, 39, 40, size - 1, size + 1, size + 4096, (1 << 32) - 1))
        content = _HEAD.pack(size, opcode, unique, nodeid, *caller, 0) + own
        if self._is_odd(dice):
            content = content[: dice.choice((1, 4, 8, 16, 39, 40, dice.randrange(1, len(content) + 1)))]
        return self._message(content, unique, opcode)

    def _message(self, content: bytes, unique: int, opcode: int) -> Message:
        n_answers: tuple[int, ...] = (0,) if opcode in UNANSWERED else (1,)
        if opcode == NOTIFY_REPLY:
            n_answers = (0, 1)
        if len(content) < REQUEST_HEAD_SIZE:
            n_answers = (0,)
        self.objects.uniques.append(unique)
        del self.objects.uniques[:-8]
        return Message(content, unique, opcode, n_answers, _room(opcode, content))

    def _is_odd(self, dice: Random) -> bool:
        return dice.random() < self._oddness

    def _number(self, dice: Random, opcode: int, letter: str, role: str) -> bytes:
        bits = {"I": 32, "Q": 64}[letter]
        number = dice.choice(_ODD_NUMBERS) if self._is_odd(dice) else self._usual(dice, opcode, role)
        return (number & (1 << bits) - 1).to_bytes(bits // 8, "little")

    def _usual(self, dice: Random, opcode: int, role: str) -> int:
        objects = self.objects
        match role:
            case "fh":
                handles = objects.directories if opcode in _OF_DIRECTORIES else objects.files
                return dice.choice(handles[-4:] or [0])
            case "node":
                return self._nodeid(dice, is_parent=opcode != Opcode.LINK)
            case "unique":
                return dice.choice(objects.uniques)
            case "offset":
                return dice.choice((0, 0, 1, 2, 3, 100, 4096, 10_000))
            case "size":
                return dice.choice((0, 8, 100, 1024, 4096, _ROOM, 1 << 20))
            case "count":
                return 1
            case "n_pairs":
                return dice.choice((0, 1, 2, 3, 64, 65, 100))
            case "flags":
                return dice.choice((0, 0, 0, 1, 2, 4, dice.getrandbits(8)))
            case "valid":
                return dice.choice((1, 6, 8, 0x1B0, 0x30, dice.getrandbits(12), dice.getrandbits(32)))
            case "open":
                return dice.choice(_OPEN_FLAGS) | os.O_NONBLOCK * dice.getrandbits(1)
            case "mode":
                return dice.choice(_MODES)
            case "umask":
                return dice.choice((0o022, 0, 0o777))
            case "uid":
                return dice.choice(self._callers).uid
            case "time":
                return dice.choice((0, 1, 1_700_000_000, (1 << 64) - 5))
            case "ns":
                return dice.choice((0, 1, 999_999_999, 1_000_000_000))
            case _:
                return 0

    def _nodeid(self, dice: Random, *, is_parent: bool = False) -> int:
        if self._is_odd(dice):
            return dice.choice((*_ODD_NUMBERS, dice.getrandbits(40)))
        nodeids = self.objects.parents if is_parent else self.objects.nodeids
        return dice.choice((1, dice.choice(nodeids), dice.choice(nodeids[-8:])))

    def _pair(self, dice: Random) -> bytes:
        return struct.pack("=Q", self._nodeid(dice)) + self._number(dice, Opcode.BATCH_FORGET, "Q", "count")

    def _names(self, dice: Random, opcode: int, n: int) -> bytes:
        usual = _XATTRS if opcode in {Opcode.GETXATTR, Opcode.SETXATTR, Opcode.REMOVEXATTR} else _NAMES
        names = [dice.choice(_ODD_NAMES if self._is_odd(dice) else usual) for _ in range(n)]
        joined = b"".join(name + b"\0" for name in names)
        return joined[:-1] if joined and self._is_odd(dice) else joined

    @staticmethod
    def _spoiled(dice: Random, own: bytes) -> bytes:
        match dice.randrange(4):
            case 0:
                return own[: dice.randrange(len(own) + 1)]
            case 1:
                return own + dice.randbytes(dice.choice((1, 8, 5000)))
            case 2:
                return dice.randbytes(len(own))
            case _:
                changed = bytearray(own)
                for _ in range(min(len(own), 3)):
                    changed[dice.randrange(len(own))] = dice.choice((0, 0x2F, 0xFF, dice.getrandbits(8)))
                return bytes(changed)


def _forgotten(message: Message) -> Iterable[tuple[int, int]]:
    """Nodes and numbers that a request says the kernel forgets."""
    own = message.content[REQUEST_HEAD_SIZE:]
    if message.opcode not in {Opcode.FORGET, Opcode.BATCH_FORGET} or len(own) < 8:
        return ()
    if message.opcode == Opcode.FORGET:
        return ((struct.unpack_from("=16xQ", message.content)[0], struct.unpack_from("=Q", own)[0]),)
    n = min(struct.unpack_from("=I", own)[0], (len(own) - 8) // 16)
    return struct.iter_unpack("=QQ", own[8 : 8 + 16 * n])


def _room(opcode: int, content: bytes) -> int:
    """Bytes for which a request asks."""
    if opcode == Opcode.READLINK:
        return 4096
    places: dict[int, int] = {Opcode.READ: 16, Opcode.READDIRPLUS: 16, Opcode.GETXATTR: 0, Opcode.LISTXATTR: 0}
    at = places.get(opcode)
    if at is None or len(content) < REQUEST_HEAD_SIZE + at + 4:
        return -1
    room = int(struct.unpack_from("=I", content, REQUEST_HEAD_SIZE + at)[0])
    return room or (8 if opcode in {Opcode.GETXATTR, Opcode.LISTXATTR} else 0)
