"""The kernel's messages, against its structs as linux/fuse.h has them."""

import ctypes
import os
import re
from ctypes import c_int32, c_int64, c_uint16, c_uint32, c_uint64
from struct import Struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import Opcode
from fusefs.core.metadata_cache import Attributes

_TYPES: dict[str, Any] = {"u16": c_uint16, "u32": c_uint32, "u64": c_uint64, "s32": c_int32, "s64": c_int64}


def kernel_struct(name: str, fields: str) -> type[ctypes.Structure]:
    """A struct of linux/fuse.h, of `type name` or `type[n] name`; types are the kernel's and the structs before."""
    found = re.findall(r"(\w+)(?:\[(\d+)\])? (\w+)", fields)
    types = [(field, _TYPES[kind] * int(n) if n else _TYPES[kind]) for kind, n, field in found]
    made = type(name, (ctypes.Structure,), {"_fields_": types})
    _TYPES[name] = made
    return made


InHeader = kernel_struct(
    "InHeader",
    "u32 len, u32 opcode, u64 unique, u64 nodeid, u32 uid, u32 gid, u32 pid, u16 total_extlen, u16 padding",
)
OutHeader = kernel_struct("OutHeader", "u32 len, s32 error, u64 unique")
Attr = kernel_struct(
    "Attr",
    "u64 ino, u64 size, u64 blocks, u64 atime, u64 mtime, u64 ctime, u32 atimensec, u32 mtimensec, "
    "u32 ctimensec, u32 mode, u32 nlink, u32 uid, u32 gid, u32 rdev, u32 blksize, u32 flags",
)
EntryOut = kernel_struct(
    "EntryOut",
    "u64 nodeid, u64 generation, u64 entry_valid, u64 attr_valid, u32 entry_valid_nsec, u32 attr_valid_nsec, Attr attr",
)
AttrOut = kernel_struct("AttrOut", "u64 attr_valid, u32 attr_valid_nsec, u32 dummy, Attr attr")
OpenOut = kernel_struct("OpenOut", "u64 fh, u32 open_flags, s32 backing_id")
WriteOut = kernel_struct("WriteOut", "u32 size, u32 padding")
Dirent = kernel_struct("Dirent", "u64 ino, u64 off, u32 namelen, u32 type")
WriteIn = kernel_struct(
    "WriteIn",
    "u64 fh, u64 offset, u32 size, u32 write_flags, u64 lock_owner, u32 flags, u32 padding",
)
ReadIn = kernel_struct("ReadIn", "u64 fh, u64 offset, u32 size, u32 read_flags, u64 lock_owner, u32 flags, u32 padding")
CreateIn = kernel_struct("CreateIn", "u32 flags, u32 mode, u32 umask, u32 open_flags")
OpenIn = kernel_struct("OpenIn", "u32 flags, u32 open_flags")
MkdirIn = kernel_struct("MkdirIn", "u32 mode, u32 umask")
RenameIn = kernel_struct("RenameIn", "u64 newdir")
Rename2In = kernel_struct("Rename2In", "u64 newdir, u32 flags, u32 padding")
FsyncIn = kernel_struct("FsyncIn", "u64 fh, u32 fsync_flags, u32 padding")
GetxattrIn = kernel_struct("GetxattrIn", "u32 size, u32 padding")
FallocateIn = kernel_struct("FallocateIn", "u64 fh, u64 offset, u64 length, u32 mode, u32 padding")
LseekIn = kernel_struct("LseekIn", "u64 fh, u64 offset, u32 whence, u32 padding")
CopyFileRangeIn = kernel_struct(
    "CopyFileRangeIn",
    "u64 fh_in, u64 off_in, u64 nodeid_out, u64 fh_out, u64 off_out, u64 len, u64 flags",
)
SxTime = kernel_struct("SxTime", "s64 tv_sec, u32 tv_nsec, s32 reserved")
StatxStruct = kernel_struct(
    "StatxStruct",
    "u32 mask, u32 blksize, u64 attributes, u32 nlink, u32 uid, u32 gid, u16 mode, u16 spare0, u64 ino, "
    "u64 size, u64 blocks, u64 attributes_mask, SxTime atime, SxTime btime, SxTime ctime, SxTime mtime, "
    "u32 rdev_major, u32 rdev_minor, u32 dev_major, u32 dev_minor, u64[14] spare2",
)
StatxOut = kernel_struct("StatxOut", "u64 attr_valid, u32 attr_valid_nsec, u32 flags, u64[2] spare, StatxStruct stat")
ForgetIn = kernel_struct("ForgetIn", "u64 nlookup")
ReleaseIn = kernel_struct("ReleaseIn", "u64 fh, u32 flags, u32 release_flags, u64 lock_owner")
BatchForgetIn = kernel_struct("BatchForgetIn", "u32 count, u32 dummy")
ForgetOne = kernel_struct("ForgetOne", "u64 nodeid, u64 nlookup")

NANO = 1_000_000_000
NODEIDS = st.integers(1, (1 << 64) - 1)
WORDS = st.integers(0, (1 << 32) - 1)
TIMES_NS = st.integers(-(1 << 62), 1 << 62)
NAMES = (
    st.binary(min_size=1, max_size=255)
    .filter(lambda name: b"\0" not in name and b"/" not in name)
    .filter(lambda name: name not in (b".", b".."))  # the kernel never sends these
)
TIMEOUTS_S = st.floats(0, 1e9)
ATTRIBUTES = st.builds(
    Attributes,
    dev=NODEIDS, ino=NODEIDS, mode=st.integers(0, 0o177777), nlink=WORDS, uid=WORDS, gid=WORDS, rdev=NODEIDS,
    size=st.integers(0, (1 << 63) - 1), blocks=st.integers(0, (1 << 54) - 1), blksize=WORDS,
    atime_ns=TIMES_NS, mtime_ns=TIMES_NS, ctime_ns=TIMES_NS, btime_ns=TIMES_NS,
)  # fmt: skip


def request_of(opcode: int, *parts: ctypes.Structure | bytes, unique: int = 6, nodeid: int = 1) -> bytes:
    """As the kernel writes it."""
    body = b"".join(map(bytes, parts))
    size = ctypes.sizeof(InHeader) + len(body)
    return bytes(InHeader(size, opcode, unique, nodeid, 1000, 100, 4711, 0, 0)) + body


def body_of(message: bytes | bytearray) -> bytes:
    """What follows the head, which must be that of an answer of this length, and no error."""
    head = OutHeader.from_buffer_copy(message)
    assert (head.len, head.error) == (len(message), 0)
    return bytes(message[ctypes.sizeof(OutHeader) :])


def tells(attr: ctypes.Structure, ino: int, seen: Attributes) -> bool:
    """Whether the kernel takes a fuse_attr for these attributes: times are signed for it, device numbers short."""
    seconds = [ctypes.c_int64(word).value for word in (attr.atime, attr.mtime, attr.ctime)]
    nanoseconds = [attr.atimensec, attr.mtimensec, attr.ctimensec]
    times_ns = tuple(s * NANO + ns for s, ns in zip(seconds, nanoseconds, strict=True))
    assert all(ns < NANO for ns in nanoseconds)
    plain = (attr.ino, attr.mode, attr.nlink, attr.uid, attr.gid, attr.size, attr.blocks, attr.blksize, attr.flags)
    wanted = (ino, seen.mode, seen.nlink, seen.uid, seen.gid, seen.size, seen.blocks, seen.blksize, 0)
    return (
        plain == wanted
        and attr.rdev == seen.rdev & 0xFFFFFFFF
        and times_ns == (seen.atime_ns, seen.mtime_ns, seen.ctime_ns)
    )


def is_near(seconds: int, ns: int, timeout_s: float) -> bool:
    """Whether it is the time, to the microsecond as far as a float can tell."""
    return ns < NANO and abs(seconds + ns / NANO - timeout_s) <= max(1e-6, timeout_s * 1e-12)


# Requests.


@given(opcode=WORDS, unique=NODEIDS, nodeid=NODEIDS)
def test_the_head_of_a_request_is_read(opcode: int, unique: int, nodeid: int) -> None:
    request = request_of(opcode, unique=unique, nodeid=nodeid)
    assert wire.read_head(request) == (40, opcode, unique, nodeid, 1000, 100, 4711)
    assert len(request) == wire.REQUEST_HEAD_SIZE


@pytest.mark.parametrize(
    ("struct", "body", "fields"),
    [
        (wire.FORGET_IN, ForgetIn(7), (7,)),
        (wire.MKDIR_IN, MkdirIn(0o1777, 0o22), (0o1777, 0o22)),
        (wire.RENAME_IN, RenameIn(7), (7,)),
        (wire.RENAME2_IN, Rename2In(7, 2, 99), (7, 2)),
        (wire.OPEN_IN, OpenIn(0o100002, 99), (0o100002,)),
        (wire.CREATE_IN, CreateIn(0o2, 0o100644, 0o22, 99), (0o2, 0o100644, 0o22)),
        (wire.FSYNC_IN, FsyncIn(7, 1, 99), (7, 1)),
        (wire.WRITE_IN, WriteIn(7, 1 << 40, 9, 99, 99, 8, 99), (7, 1 << 40, 9, 8)),
        (wire.GETXATTR_IN, GetxattrIn(255, 99), (255,)),
        (wire.FALLOCATE_IN, FallocateIn(7, 1 << 40, 9, 3, 99), (7, 1 << 40, 9, 3)),
        (wire.LSEEK_IN, LseekIn(7, (1 << 64) - 5, 4, 99), (7, -5, 4)),
        (wire.COPY_IN, CopyFileRangeIn(7, 1 << 40, 99, 8, 1 << 41, 1 << 63, 99), (7, 1 << 40, 8, 1 << 41, 1 << 63)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_of_a_request_are_read_and_all_of_them_is_passed(
    struct: Struct, body: ctypes.Structure, fields: tuple[int, ...]
) -> None:
    assert struct.unpack_from(request_of(1, body), wire.REQUEST_HEAD_SIZE) == fields
    assert struct.size == ctypes.sizeof(body)


def test_what_follows_in_a_request_to_read_or_release_is_not_read() -> None:
    read = request_of(Opcode.READ, ReadIn(7, 1 << 40, 1 << 20, 99, 99, 99, 99))
    assert wire.READ_IN.unpack_from(read, wire.REQUEST_HEAD_SIZE) == (7, 1 << 40, 1 << 20)
    release = request_of(Opcode.RELEASE, ReleaseIn(7, 99, 99, 99))
    assert wire.HANDLE_IN.unpack_from(release, wire.REQUEST_HEAD_SIZE) == (7,)


@given(name=NAMES)
def test_any_name_comes_through(name: bytes) -> None:
    assert wire.read_names(request_of(Opcode.LOOKUP, name + b"\0")) == [name]
    assert wire.read_names(request_of(Opcode.MKDIR, MkdirIn(), name + b"\0"), wire.MKDIR_IN) == [name]


@given(old=NAMES, new=NAMES)
def test_two_names_come_apart(old: bytes, new: bytes) -> None:
    request = memoryview(request_of(Opcode.RENAME2, Rename2In(), old + b"\0" + new + b"\0"))
    assert wire.read_names(request, wire.RENAME2_IN, 2) == [old, new]


@given(forgotten=st.lists(st.tuples(NODEIDS, NODEIDS), max_size=200))
def test_all_that_is_forgotten_is_in_the_request(forgotten: list[tuple[int, int]]) -> None:
    ones = b"".join(bytes(ForgetOne(nodeid, n)) for nodeid, n in forgotten)
    own = bytes(BatchForgetIn(len(forgotten), 0))
    assert wire.encode_batch_forget(forgotten)[wire.REQUEST_HEAD_SIZE :] == own + ones


# Answers.


@given(unique=NODEIDS, error=st.integers(1, 133))
def test_a_refusal_is_an_errno_below_zero(unique: int, error: int) -> None:
    head = OutHeader.from_buffer_copy(wire.encode_error(unique, error))
    assert (head.len, head.error, head.unique) == (16, -error, unique)


@given(unique=NODEIDS, body=st.binary(max_size=50))
def test_a_body_comes_after_its_head(unique: int, body: bytes) -> None:
    message = wire.encode_head(unique, len(body)) + body
    assert body_of(message) == body
    assert OutHeader.from_buffer_copy(message).unique == unique


@given(nodeid=NODEIDS, ino=NODEIDS, seen=ATTRIBUTES, entry_s=TIMEOUTS_S, attr_s=TIMEOUTS_S)
def test_an_entry_is_what_the_kernel_reads(
    nodeid: int, ino: int, seen: Attributes, entry_s: float, attr_s: float
) -> None:
    body = wire.encode_entry(nodeid, ino, seen, entry_s, attr_s)
    entry = EntryOut.from_buffer_copy(body)
    assert len(body) == ctypes.sizeof(EntryOut)
    assert (entry.nodeid, entry.generation) == (nodeid, 0)
    assert tells(entry.attr, ino, seen)
    assert is_near(entry.entry_valid, entry.entry_valid_nsec, entry_s)
    assert is_near(entry.attr_valid, entry.attr_valid_nsec, attr_s)


@given(ino=NODEIDS, seen=ATTRIBUTES, attr_s=TIMEOUTS_S)
def test_attributes_are_what_the_kernel_reads(ino: int, seen: Attributes, attr_s: float) -> None:
    body = wire.encode_attr(ino, seen, attr_s)
    answer = AttrOut.from_buffer_copy(body)
    assert len(body) == ctypes.sizeof(AttrOut)
    assert tells(answer.attr, ino, seen)
    assert is_near(answer.attr_valid, answer.attr_valid_nsec, attr_s)


def time_ns(told: ctypes.Structure) -> int:
    assert (told.tv_nsec < NANO, told.reserved) == (True, 0)
    return int(told.tv_sec * NANO + told.tv_nsec)


@given(ino=NODEIDS, seen=ATTRIBUTES, attr_s=TIMEOUTS_S)
def test_attributes_with_a_birth_are_what_the_kernel_reads(ino: int, seen: Attributes, attr_s: float) -> None:
    rdev = seen.rdev & 0xFFFFFFFF
    body = wire.encode_statx(ino, seen._replace(rdev=rdev), attr_s)
    answer = StatxOut.from_buffer_copy(body)
    told = answer.stat
    assert len(body) == ctypes.sizeof(StatxOut)
    assert is_near(answer.attr_valid, answer.attr_valid_nsec, attr_s)
    assert told.mask == (0xFFF if seen.btime_ns else 0x7FF)
    plain = (told.ino, told.mode, told.nlink, told.uid, told.gid, told.size, told.blocks, told.blksize)
    assert plain == (ino, seen.mode, seen.nlink, seen.uid, seen.gid, seen.size, seen.blocks, seen.blksize)
    assert (told.rdev_major, told.rdev_minor) == (os.major(rdev), os.minor(rdev))
    times_ns = tuple(map(time_ns, (told.atime, told.mtime, told.ctime, told.btime)))
    assert times_ns == (seen.atime_ns, seen.mtime_ns, seen.ctime_ns, seen.btime_ns)
    unused = (answer.flags, told.attributes, told.attributes_mask, told.dev_major, told.dev_minor)
    assert not any((*unused, *answer.spare, *told.spare2))


@given(name=NAMES, offset=NODEIDS, nodeid=NODEIDS, ino=NODEIDS, seen=ATTRIBUTES, entry_s=TIMEOUTS_S, attr_s=TIMEOUTS_S)
def test_an_entry_of_a_listing_is_what_the_kernel_reads(
    name: bytes, offset: int, nodeid: int, ino: int, seen: Attributes, entry_s: float, attr_s: float
) -> None:
    message = wire.encode_direntplus(name, offset, nodeid, ino, seen, entry_s, attr_s)
    entry = EntryOut.from_buffer_copy(message)
    dirent = Dirent.from_buffer_copy(message, ctypes.sizeof(EntryOut))
    assert entry.nodeid == nodeid
    assert tells(entry.attr, ino, seen)
    assert (dirent.ino, dirent.off, dirent.namelen, dirent.type) == (ino, offset, len(name), seen.mode >> 12)
    name_at = ctypes.sizeof(EntryOut) + ctypes.sizeof(Dirent)
    assert message[name_at:] == name.ljust((len(name) + 7) // 8 * 8, b"\0")


@given(name=NAMES, offset=NODEIDS, ino=NODEIDS, kind=st.integers(0, 15))
def test_a_name_alone_is_an_entry_without_a_node(name: bytes, offset: int, ino: int, kind: int) -> None:
    message = wire.encode_dirent_without_node(name, offset, ino, kind)
    assert not any(message[: ctypes.sizeof(EntryOut)])
    dirent = Dirent.from_buffer_copy(message, ctypes.sizeof(EntryOut))
    assert (dirent.ino, dirent.off, dirent.namelen, dirent.type) == (ino, offset, len(name), kind)
    assert len(message) % 8 == 0


@given(timeout_s=TIMEOUTS_S)
def test_what_is_missing_has_no_node_and_is_missing_for_a_time(timeout_s: float) -> None:
    body = wire.encode_missing_entry(timeout_s)
    entry = EntryOut.from_buffer_copy(body)
    assert (entry.nodeid, entry.attr_valid, entry.attr_valid_nsec) == (0, 0, 0)
    assert not any(bytes(entry.attr))
    assert is_near(entry.entry_valid, entry.entry_valid_nsec, timeout_s)


@given(fh=st.integers(0, (1 << 63) - 1), flags=WORDS)
def test_a_handle_is_at_the_end_of_either_reply(fh: int, flags: int) -> None:
    for before in (b"", wire.encode_missing_entry(0)):
        reply = before + wire.encode_open(fh, flags)
        opened = OpenOut.from_buffer_copy(reply, len(before))
        assert len(reply) == len(before) + ctypes.sizeof(OpenOut)
        assert (opened.fh, opened.open_flags, opened.backing_id) == (fh, flags, 0)
        assert wire.read_handle(reply) == fh


def test_the_other_answers_are_as_long_as_the_kernel_wants_them() -> None:
    assert wire.GETXATTR_OUT.size == ctypes.sizeof(WriteOut)
