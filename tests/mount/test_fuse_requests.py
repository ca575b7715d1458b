"""Requests that we answer ourselves: each has one answer, whatever goes wrong."""

import ctypes
import errno
import logging
import os
import socket
import struct
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import Opcode
from fusefs.linux.fd import Fd
from fusefs.mount.requests.fuse_requests import FuseRequests, Patience
from tests.support.acls import ACCESS
from tests.support.fake_dev_fuse import FuseReply, Later, a_broken, a_real
from tests.support.real_filesystems import unmount

MIB = 1 << 20
LIMIT_S = 60.0
MNT_FORCE = 1
_libc = ctypes.CDLL(None, use_errno=True)


BODIES: dict[Opcode, bytes] = {
    Opcode.LOOKUP: b"name\0",
    Opcode.FORGET: bytes(8),
    Opcode.GETATTR: bytes(16),
    Opcode.SETATTR: bytes(88),
    Opcode.READLINK: b"",
    Opcode.SYMLINK: b"name\0target\0",
    Opcode.MKNOD: bytes(16) + b"name\0",
    Opcode.LINK: bytes(8) + b"name\0",
    Opcode.STATFS: b"",
    Opcode.FSYNC: bytes(16),
    Opcode.ACCESS: bytes(8),
    Opcode.SETXATTR: bytes(8) + b"user.name\0",
    Opcode.LISTXATTR: bytes(8),
    Opcode.REMOVEXATTR: b"user.name\0",
    Opcode.MKDIR: bytes(8) + b"name\0",
    Opcode.UNLINK: b"name\0",
    Opcode.RMDIR: b"name\0",
    Opcode.RENAME: bytes(8) + b"old\0new\0",
    Opcode.OPEN: bytes(8),
    Opcode.READ: bytes(40),
    Opcode.WRITE: bytes(40),
    Opcode.RELEASE: bytes(24),
    Opcode.GETXATTR: bytes(8) + b"user.name\0",
    Opcode.FLUSH: bytes(24),
    Opcode.OPENDIR: bytes(8),
    Opcode.RELEASEDIR: bytes(24),
    Opcode.FSYNCDIR: bytes(16),
    Opcode.CREATE: bytes(16) + b"name\0",
    Opcode.BATCH_FORGET: struct.pack("=II", 1, 0) + bytes(16),
    Opcode.READDIRPLUS: bytes(40),
    Opcode.RENAME2: bytes(16) + b"old\0new\0",
    Opcode.FALLOCATE: bytes(32),
    Opcode.LSEEK: bytes(24),
    Opcode.COPY_FILE_RANGE: bytes(56),
    Opcode.COPY_FILE_RANGE_64: bytes(56),
    Opcode.STATX: bytes(24),
    Opcode.TMPFILE: bytes(16) + b"/\0",
}
NAMED = (b"a\0", b"b\0")
FORGETS_MANY = Opcode.BATCH_FORGET, struct.pack("=II", 128, 0) + bytes(16 * 128)
"""It runs in a task of its own."""
EACH_REQUEST = pytest.mark.parametrize(
    "asked", [*BODIES.items(), FORGETS_MANY], ids=lambda asked: f"{asked[0].name}-{len(asked[1])}"
)


def test_every_request_that_we_know_is_tried_here() -> None:
    assert BODIES.keys() == set(Opcode) - {Opcode.INIT, Opcode.INTERRUPT}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@EACH_REQUEST
def test_error_of_the_kernel_goes_to_who_asked(asked: tuple[Opcode, bytes], number: int) -> None:
    with a_broken(OSError(number, "refused")) as kernel:
        assert kernel.request(*asked).error == number


@pytest.mark.allows_warnings
@pytest.mark.parametrize("error", [KeyError("a bug"), OSError("no errno"), ValueError("embedded null byte")])
@EACH_REQUEST
def test_bug_is_told_as_eio_and_in_the_log(
    asked: tuple[Opcode, bytes], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with a_broken(error) as kernel:
        assert kernel.request(*asked).error == errno.EIO
    has_logged = any(record.levelno == logging.ERROR for record in caplog.records)
    assert has_logged is not isinstance(error, OSError)


# What no kernel sends. tests/mount/test_forged_requests.py found what these tests are of.


@pytest.mark.allows_warnings
@pytest.mark.parametrize("opcode", BODIES)
def test_a_request_that_is_cut_off_is_refused(opcode: Opcode) -> None:
    with a_real() as (kernel, _vfs, _path):
        if opcode in (Opcode.FORGET, Opcode.BATCH_FORGET):
            kernel.send(opcode)
            assert kernel.serve()
            assert kernel.receive_reply() is None
        elif opcode not in (Opcode.GETATTR, Opcode.STATX, Opcode.STATFS, Opcode.READLINK, Opcode.OPENDIR):
            assert kernel.request(opcode).error == errno.EINVAL


@pytest.mark.allows_warnings
def test_a_request_without_a_whole_head_is_left_out() -> None:
    with a_real() as (kernel, _vfs, _path):
        kernel.end.send(bytes(39))
        assert kernel.serve()
        assert kernel.receive_reply() is None
        assert not kernel.request(Opcode.STATFS).error


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/etc", b"a\0b"])
@pytest.mark.parametrize("opcode", [opcode for opcode, body in BODIES.items() if b"name\0" in body or b"old" in body])
def test_no_name_leads_out_of_a_directory(opcode: Opcode, name: bytes) -> None:
    if opcode in (Opcode.SETXATTR, Opcode.GETXATTR, Opcode.REMOVEXATTR):
        return  # these are no entries' names
    with a_real() as (kernel, _vfs, path):
        (path / "directory").mkdir()
        body = BODIES[opcode].replace(b"name", name).replace(b"old", name)
        assert kernel.request(opcode, body).error == errno.EINVAL


@pytest.mark.parametrize(
    "opcode",
    [
        Opcode.READ, Opcode.WRITE, Opcode.FSYNC, Opcode.RELEASE, Opcode.RELEASEDIR, Opcode.FALLOCATE, Opcode.LSEEK,
        Opcode.COPY_FILE_RANGE, Opcode.COPY_FILE_RANGE_64,
    ],
)  # fmt: skip
def test_a_handle_that_nobody_has_is_refused(opcode: Opcode) -> None:
    with a_real() as (kernel, _vfs, _path):
        assert kernel.request(opcode, b"\xff" * 8 + BODIES[opcode][8:]).error == errno.EBADF


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_is_cut_by_a_handle_of_its_own_alone(tmp_path: Path, is_open: bool) -> None:
    """A handle's number is that of an fd, and the daemon has others."""
    (tmp_path / "daemons").write_bytes(b"content")
    with a_real() as (kernel, _vfs, path), (tmp_path / "daemons").open("r+b") as own:
        for name in ("file", "other"):
            (path / name).write_bytes(b"content")
        nodeid, other = (
            struct.unpack_from("=Q", kernel.request(Opcode.LOOKUP, name).body)[0] for name in (b"file\0", b"other\0")
        )
        fh = own.fileno()
        if is_open:
            fh = struct.unpack_from("=Q", kernel.request(Opcode.OPEN, struct.pack("=II", os.O_RDWR, 0), other).body)[0]
        cut = wire.SETATTR_IN.pack(wire.FATTR_SIZE | wire.FATTR_FH, fh, 0, 0, 0, 0, 0, 0, 0, 0)
        assert kernel.request(Opcode.SETATTR, cut, nodeid).error == errno.EBADF
        assert {file.read_bytes() for file in (tmp_path / "daemons", path / "file", path / "other")} == {b"content"}


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
def test_a_number_that_no_system_call_takes_is_refused(number: int) -> None:
    with a_real() as (kernel, _vfs, path):
        (path / "file").touch()
        nodeid = struct.unpack_from("=Q", kernel.request(Opcode.LOOKUP, b"file\0").body)[0]
        fh = struct.unpack_from("=Q", kernel.request(Opcode.OPEN, struct.pack("=II", os.O_RDWR, 0), nodeid).body)[0]
        assert kernel.request(Opcode.READ, struct.pack("=QQIIQII", fh, number, 1, 0, 0, 0, 0)).error == errno.EINVAL
        times = wire.SETATTR_IN.pack(wire.FATTR_ATIME, 0, 0, (1 << 63) - 1, 0, 2 * 10**9, 0, 0, 0, 0)
        assert kernel.request(Opcode.SETATTR, times, nodeid).error == errno.EINVAL


def test_a_time_after_the_year_2262_is_told_and_listed() -> None:
    """Ns since 1970 do not fit into 64 bits. A listing that failed there kept the references counted until then."""
    late_s = 12 * 10**9
    with a_real() as (kernel, vfs, path):
        for name in ("late", "other"):
            (path / name).touch()
        os.utime(path / "late", ns=(late_s * 10**9, late_s * 10**9 + 7))
        reply_body = kernel.request(Opcode.LOOKUP, b"late\0").body
        assert struct.unpack_from("=qq8xII", reply_body, 64) == (late_s, late_s, 0, 7)
        assert not kernel.request(Opcode.READDIRPLUS, wire.READ_IN.pack(0, 0, MIB).ljust(40, b"\0")).error
        assert len(vfs.nodes) == 3


@pytest.mark.parametrize("flag", [os.O_PATH, os.O_TMPFILE])
def test_a_file_is_opened_whatever_the_flags_say_that_the_kernel_sees_to(flag: int) -> None:
    with a_real() as (kernel, vfs, path):
        (path / "file").write_bytes(b"content")
        nodeid = struct.unpack_from("=Q", kernel.request(Opcode.LOOKUP, b"file\0").body)[0]
        flags = struct.pack("=II", os.O_RDWR | os.O_APPEND | flag, 0)
        fh = struct.unpack_from("=Q", kernel.request(Opcode.OPEN, flags, nodeid).body)[0]
        assert kernel.request(Opcode.READ, struct.pack("=QQIIQII", fh, 0, 100, 0, 0, 0, 0)).body == b"content"
        assert not kernel.request(Opcode.RELEASE, struct.pack("=QIIQ", fh, 0, 0, 0)).error
        created = kernel.request(Opcode.CREATE, flags + struct.pack("=II", 0o022, 0) + b"name\0")
        assert not created.error
        assert (path / "name").stat().st_size == 0
        assert vfs.read_gauges().n_handles == 1


@pytest.mark.needs("root")
def test_no_more_is_read_than_a_reply_has_room_for() -> None:
    with a_real() as (kernel, _vfs, path):
        with (path / "file").open("wb") as file:
            file.truncate(1 << 40)
        nodeid = struct.unpack_from("=Q", kernel.request(Opcode.LOOKUP, b"file\0").body)[0]
        fh = struct.unpack_from("=Q", kernel.request(Opcode.OPEN, struct.pack("=II", os.O_RDONLY, 0), nodeid).body)[0]
        read = struct.pack("=QQIIQII", fh, 0, (1 << 32) - 1, 0, 0, 0, 0)
        assert len(kernel.request(Opcode.READ, read).body) == MIB


@pytest.mark.parametrize("opcode", [7, 19, 26, 28, 31, 37, 38, 39, 40, 41, 48, 50, 54, 4711])
def test_what_nobody_knows_is_refused(opcode: int) -> None:
    with a_real() as (kernel, _vfs, _path):
        assert kernel.request(opcode, bytes(64)).error == errno.ENOSYS


def test_an_interruption_is_left_to_nobody() -> None:
    with a_real() as (kernel, _vfs, _path):
        kernel.send(Opcode.INTERRUPT, bytes(8))
        assert kernel.serve()
        assert kernel.receive_reply() is None


def test_the_filesystem_may_become_slow_between_any_two_requests() -> None:
    later = Later()
    with a_real(pool=later) as (kernel, _vfs, path):
        (path / "a").touch()
        lock = kernel.requests._lock
        for number in range(20):
            unique = kernel.send(Opcode.LOOKUP, b"a\0")
            lock.is_slow = bool(number % 2)
            assert kernel.serve()
            is_done = not later.tasks
            for task in later.tasks:
                task.function(False)
            later.tasks.clear()
            told = kernel.receive_reply()
            assert told is not None
            assert (told.unique, told.error) == (unique, 0)
            assert is_done or number == 1, "the second time it is remembered"


def test_what_is_remembered_of_a_slow_filesystem_is_answered_at_once() -> None:
    later = Later()
    with a_real(pool=later) as (kernel, vfs, path):
        (path / "a").touch()
        os.setxattr(path / "a", "user.a", b"1")
        lock = kernel.requests._lock
        lock.is_slow = True
        ask_acl = struct.pack("=II", 100, 0) + ACCESS.encode() + b"\0"

        def asked(opcode: Opcode, body: bytes, nodeid: int = 1) -> tuple[bool, FuseReply]:
            """Whether a thread had to do it, and the answer."""
            kernel.send(opcode, body, nodeid)
            assert kernel.serve()
            tasks = [*later.tasks]
            later.tasks.clear()
            for task in tasks:
                task.function(False)
            told = kernel.receive_reply()
            assert told is not None
            return bool(tasks), told

        has_looked, told = asked(Opcode.LOOKUP, b"a\0")
        assert has_looked
        (nodeid,) = struct.unpack_from("=Q", told.body)
        has_looked, told = asked(Opcode.LOOKUP, b"a\0")
        assert (has_looked, told.error) == (False, 0)
        node = vfs.nodes.get(nodeid)
        assert node is not None
        assert node.nlookup == 2
        has_looked, told = asked(Opcode.GETATTR, bytes(16), nodeid)
        assert (has_looked, told.error) == (False, 0)
        assert [asked(Opcode.GETXATTR, ask_acl, nodeid)[0] for _ in range(2)] == [True, False]
        assert asked(Opcode.GETXATTR, struct.pack("=II", 100, 0) + b"user.a\0", nodeid)[0]
        assert asked(Opcode.OPEN, bytes(8), nodeid)[0]


def test_to_forget_more_references_than_the_kernel_has_is_to_forget_all() -> None:
    with a_real() as (kernel, vfs, path):
        (path / "file").touch()
        nodeid = struct.unpack_from("=Q", kernel.request(Opcode.LOOKUP, b"file\0").body)[0]
        fh = struct.unpack_from("=Q", kernel.request(Opcode.OPEN, bytes(8), nodeid).body)[0]
        kernel.send(Opcode.FORGET, struct.pack("=Q", (1 << 64) - 1), nodeid)
        assert kernel.serve()
        node = vfs.nodes.get(nodeid)
        assert node is not None
        assert node.nlookup == 0
        del node
        assert not kernel.request(Opcode.RELEASE, struct.pack("=QIIQ", fh, 0, 0, 0), nodeid).error
        assert vfs.nodes.get(nodeid) is None


@pytest.mark.parametrize("n_forgotten", [1, 512, 513, 20_000])
def test_many_are_forgotten_without_an_answer(n_forgotten: int) -> None:
    with a_real() as (kernel, vfs, path):
        (path / "a").touch()
        nodeid = struct.unpack_from("=Q", kernel.request(Opcode.LOOKUP, b"a\0").body)[0]
        pairs = struct.pack("=QQ", 1 << 50, 1) * (n_forgotten - 1) + struct.pack("=QQ", nodeid, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            kernel.end.setsockopt(socket.SOL_SOCKET, option, 2 * MIB)
        kernel.send(Opcode.BATCH_FORGET, struct.pack("=II", n_forgotten, 0) + pairs)
        assert kernel.serve() is True
        assert kernel.receive_reply() is None
        assert len(vfs.nodes) == 1


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_nobody_else_can_answer_is_answered_of_a_slow_filesystem_too(is_slow: bool) -> None:
    """One ENOSYS, and the kernel would never ask again."""
    with a_real(opens_directories=False) as (kernel, _vfs, path):
        made = [kernel.request(Opcode.CREATE, struct.pack("=IIII", os.O_RDWR, 0o100644, 0, 0) + name) for name in NAMED]
        nodeid = struct.unpack_from("=Q", made[0].body)[0]
        one, other = (struct.unpack_from("=Q", told.body, 128)[0] for told in made)
        kernel.requests._lock.is_slow = is_slow
        assert kernel.request(Opcode.FALLOCATE, struct.pack("=QQQII", one, 0, MIB, 0, 0)).error == 0
        assert (path / "a").stat().st_size == MIB
        assert kernel.request(Opcode.LSEEK, struct.pack("=QQII", one, MIB, os.SEEK_DATA, 0)).error == errno.ENXIO
        assert kernel.request(Opcode.LSEEK, struct.pack("=QQII", one, 9, os.SEEK_HOLE, 0)).body == struct.pack(
            "=Q", MIB
        )
        copied = kernel.request(Opcode.COPY_FILE_RANGE, struct.pack("=7Q", one, 0, 0, other, 5, 7, 0))
        assert copied.body == struct.pack("=II", 7, 0)
        copied = kernel.request(Opcode.COPY_FILE_RANGE_64, struct.pack("=7Q", one, 0, 0, other, 20, 3 * MIB, 0))
        assert copied.body == struct.pack("=Q", MIB)
        assert (path / "b").stat().st_size == MIB + 20
        told = kernel.request(Opcode.STATX, bytes(24), nodeid).body
        assert struct.unpack_from("=I", told, 32)[0] & 0x7FF == 0x7FF
        assert struct.unpack_from("=Q", told, 32 + 40)[0] == MIB


@pytest.mark.parametrize(
    "opcode",
    [
        *(Opcode.FALLOCATE, Opcode.COPY_FILE_RANGE, Opcode.COPY_FILE_RANGE_64, Opcode.TMPFILE),
        *(Opcode.FSYNC, Opcode.FSYNCDIR),
    ],
)
def test_what_may_take_long_is_done_while_others_are_answered(opcode: Opcode) -> None:
    later = Later()
    with a_broken(OSError(errno.ENOSPC, "refused"), later) as kernel:
        unique = kernel.send(opcode, BODIES[opcode])
        assert kernel.serve() is True
        assert kernel.request(Opcode.LOOKUP, BODIES[Opcode.LOOKUP]).error == errno.ENOSPC
        later.tasks.pop().function(False)
        assert kernel.receive_reply() == FuseReply(unique, errno.ENOSPC, b"")


def test_a_copy_is_made_in_pieces_that_nobody_waits_long_for() -> None:
    with a_real() as (kernel, _vfs, path):
        made = [kernel.request(Opcode.CREATE, struct.pack("=IIII", os.O_RDWR, 0o100644, 0, 0) + name) for name in NAMED]
        one, other = (struct.unpack_from("=Q", told.body, 128)[0] for told in made)
        os.truncate(path / "a", 65 * MIB)
        body = struct.pack("=7Q", one, 0, 0, other, 0, 65 * MIB, 0)
        assert kernel.request(Opcode.COPY_FILE_RANGE_64, body).body == struct.pack("=Q", 64 * MIB)
        assert (path / "b").stat().st_size == 64 * MIB


# A kernel, and ourselves as its daemon.


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize("flags", ["<", ">"])
def test_a_handle_that_nobody_waits_for_is_released(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_real() as (_kernel, vfs, path), tempfile.TemporaryDirectory() as point, ExitStack() as stack:
        device = stack.enter_context(Fd(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)))
        options = f"fd={int(device)},rootmode=40000,user_id=0,group_id=0".encode()
        assert _libc.mount(b"test", os.fsencode(point), b"fuse", ctypes.c_ulong(0), options) == 0
        stack.callback(unmount, Path(point))
        later = Later()
        requests = FuseRequests(vfs, device, later)
        os.set_blocking(device, True)  # the client asks at once
        unique = struct.unpack_from("=Q", os.read(device, MIB), 8)[0]
        init_out = struct.pack("=IIIIHHIIHHI28x", 7, 31, 0, 0, 12, 9, MIB, 1, 256, 0, 0)
        os.write(device, struct.pack("=IiQ", 16 + len(init_out), 0, unique) + init_out)
        name = "there" if flags == "<" else "new"
        (path / "there").touch()
        do = vfs.answer

        def answer_and_abort(request: bytes) -> bytes:
            reply = do(request)
            if wire.read_head(request)[1] in (Opcode.OPEN, Opcode.CREATE):
                _libc.umount2(os.fsencode(point), MNT_FORCE)
            return reply

        monkeypatch.setattr(vfs, "answer", answer_and_abort)
        client = subprocess.Popen(["sh", "-c", f"true {flags}{point}/{name}"], stderr=subprocess.DEVNULL)
        with suppress(OSError):  # the connection is gone
            while client.poll() is None:
                request = os.read(device, wire.REQUEST_BYTES_MAX)
                requests.answer(request, requests.write, Patience.NO_WAITING)
        for task in later.tasks:
            task.function(False)
        assert client.wait(LIMIT_S)
        assert vfs.nodes.n_handles == 0
