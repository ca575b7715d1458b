"""The native core answers what it is for, as Python does: where it left that to Python nobody would see it."""

import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import Opcode
from fusefs.mount.tree.vfs import Vfs
from tests.support.acls import ACCESS, CAN_BIND, CAPABILITY, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.core_requests import CoreClient, open_core
from tests.support.fake_dev_fuse import FakeKernel, FuseReply, Names, Somebody, vfs_at

pytestmark = [pytest.mark.needs("root"), pytest.mark.takes_engine]

ACL = acl((USER_OBJ, 6, NOBODY), (USER, 6, 1000), (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 4, NOBODY))
NONE, TRUSTED = b"user.none\0", "trusted.name"
ROOM = 4096
MIB = 1 << 20
ROOT = 1
_ROOM_OF = struct.Struct("=II")
_ENTRY = struct.Struct("=Q")


class Both:
    """The core and Python, by one vfs."""

    def __init__(self, core: CoreClient, kernel: FakeKernel, vfs: Vfs, path: Path) -> None:
        self.core, self.kernel, self.vfs, self.path = core, kernel, vfs, path

    def find(self, name: bytes) -> int:
        """The nodeid of a name in the root."""
        reply = self.kernel.request(Opcode.LOOKUP, name + b"\0")
        assert not reply.error
        return int(_ENTRY.unpack_from(reply.body)[0])

    def answer(self, opcode: Opcode, own: bytes = b"", names: bytes = b"", nodeid: int = ROOT) -> FuseReply:
        """What both answer."""
        reply = self.core.request(opcode, own, names, nodeid)
        assert reply is not None, "it is left to Python"
        other = self.kernel.request(opcode, own + names, nodeid)
        assert reply[1:] == other[1:]
        return reply


@pytest.fixture(params=[False, True], ids=["alone", "shared"])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """shared: others may rename behind the mount"""
    with open_core(is_shared=request.param) as (core, kernel, vfs, path):
        (path / "file").touch()
        (path / "link").symlink_to("file")
        (path / "directory").mkdir()
        os.mkfifo(path / "fifo")
        both = Both(core, kernel, vfs, path)
        both.find(b"file")  # Python finds out whether letter case matters
        yield both


def of_an_open_file(both: Both) -> int:
    nodeid = both.find(b"file")
    reply = both.kernel.request(Opcode.OPEN, struct.pack("=II", os.O_RDONLY, 0), nodeid)
    assert not reply.error
    return nodeid


def of_an_open_directory(both: Both) -> int:
    nodeid = both.find(b"directory")
    assert not both.kernel.request(Opcode.LOOKUP, b"none\0", nodeid).body[:8].strip(b"\0")
    return nodeid


NODES: dict[str, Callable[[Both], int]] = {
    "root": lambda _both: ROOT,
    "file": lambda both: both.find(b"file"),
    "link": lambda both: both.find(b"link"),
    "pipe": lambda both: both.find(b"fifo"),
    "open file": of_an_open_file,
    "open directory": of_an_open_directory,
}
LABELLED = {"root": ".", "file": "file", "open file": "file", "open directory": "directory"}


@pytest.mark.parametrize("node", [node for node in NODES if node != "link"])  # to which ACLs are unknown
def test_that_an_attribute_is_absent_is_told(both: Both, node: str) -> None:
    nodeid = NODES[node](both)
    for name in (NONE, ACCESS.encode() + b"\0"):
        assert both.answer(Opcode.GETXATTR, _ROOM_OF.pack(0, 0), name, nodeid).error == errno.ENODATA


@pytest.mark.parametrize("node", LABELLED)
@pytest.mark.parametrize("room", [0, 1, ROOM])
def test_an_acl_is_told(both: Both, node: str, room: int) -> None:
    nodeid = NODES[node](both)
    os.setxattr(both.path / LABELLED[node], ACCESS, ACL)
    reply = both.answer(Opcode.GETXATTR, _ROOM_OF.pack(room, 0), ACCESS.encode() + b"\0", nodeid)
    assert reply.error == (errno.ERANGE if room == 1 else 0)
    assert reply.body == {0: _ROOM_OF.pack(len(ACL), 0), 1: b"", ROOM: ACL}[room]


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("room", [0, ROOM])
def test_the_names_of_none_are_told(both: Both, node: str, room: int) -> None:
    reply = both.answer(Opcode.LISTXATTR, _ROOM_OF.pack(room, 0), nodeid=NODES[node](both))
    assert reply[1:] == (0, b"" if room else bytes(8))


@pytest.mark.parametrize("node", LABELLED)
@pytest.mark.parametrize("room", [0, 1, ROOM])
def test_the_names_of_some_are_told(both: Both, node: str, room: int) -> None:
    nodeid = NODES[node](both)
    os.setxattr(both.path / LABELLED[node], ACCESS, ACL)
    os.setxattr(both.path / LABELLED[node], CAPABILITY, CAN_BIND)
    reply = both.answer(Opcode.LISTXATTR, _ROOM_OF.pack(room, 0), nodeid=nodeid)
    assert reply.error == (errno.ERANGE if room == 1 else 0)
    if room == ROOM:
        assert sorted(reply.body.split(b"\0")) == sorted([b"", CAPABILITY.encode(), ACCESS.encode()])


MODE, UID, GID, ATIME, MTIME, FH = (
    wire.FATTR_MODE, wire.FATTR_UID, wire.FATTR_GID, wire.FATTR_ATIME, wire.FATTR_MTIME, wire.FATTR_FH,
)  # fmt: skip
KILL_BITS = 1 << 11
CHANGES = [MODE, UID, GID, UID | GID | KILL_BITS, ATIME, MTIME, ATIME | MTIME, UID | FH]


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("wanted", CHANGES)
def test_a_mode_an_owner_and_times_are_changed(both: Both, node: str, wanted: int) -> None:
    nodeid = NODES[node](both)
    own = wire.SETATTR_IN.pack(wanted, 0, 0, 10, 20, 30, 40, 0o741, 1234, 5678).ljust(88, b"\0")
    before = seen(both, nodeid)
    reply = both.core.request(Opcode.SETATTR, own, nodeid=nodeid)
    assert reply is not None, "it is left to Python"
    if wanted == MODE and node == "link":
        assert reply.error == errno.EOPNOTSUPP
        return
    assert not reply.error
    wants = {MODE: "mode", UID: "uid", GID: "gid", ATIME: "atime", MTIME: "mtime"}
    values = {"mode": 0o741, "uid": 1234, "gid": 5678, "atime": 10 * 10**9 + 30, "mtime": 20 * 10**9 + 40}
    assert seen(both, nodeid) == before | {name: values[name] for bit, name in wants.items() if wanted & bit}


def seen(both: Both, nodeid: int) -> dict[str, int]:
    """What Python, and so the filesystem, says of a node."""
    reply = both.kernel.request(Opcode.GETATTR, bytes(16), nodeid=nodeid)
    atime, mtime, atime_ns, mtime_ns, mode, uid, gid = struct.unpack_from("=QQ8xII4xI4xII", reply.body, 16 + 24)
    times = {"atime": atime * 10**9 + atime_ns, "mtime": mtime * 10**9 + mtime_ns}
    return {"mode": mode & 0o7777, "uid": uid, "gid": gid} | times


@pytest.mark.parametrize("wanted", [UID, GID, UID | GID | KILL_BITS, MODE])
def test_a_change_takes_set_id_bits_along(both: Both, wanted: int) -> None:
    nodeid = both.find(b"file")
    (both.path / "file").chmod(0o6755)
    own = wire.SETATTR_IN.pack(wanted, 0, 0, 0, 0, 0, 0, 0o741, 1234, 5678).ljust(88, b"\0")
    reply = both.core.request(Opcode.SETATTR, own, nodeid=nodeid)
    assert reply is not None, "it is left to Python"
    assert not reply.error
    assert not (both.path / "file").stat().st_mode & 0o6000


def test_labels_are_not_among_the_names(both: Both) -> None:
    nodeid = both.find(b"file")
    os.setxattr(both.path / "file", "security.selinux", b"label\0")
    os.setxattr(both.path / "file", ACCESS, ACL)
    assert both.answer(Opcode.LISTXATTR, _ROOM_OF.pack(ROOM, 0), nodeid=nodeid).body == ACCESS.encode() + b"\0"


def test_trusted_names_are_shown_to_root(both: Both) -> None:
    nodeid = both.find(b"file")
    os.setxattr(both.path / "file", TRUSTED, b"")
    assert both.answer(Opcode.LISTXATTR, _ROOM_OF.pack(ROOM, 0), nodeid=nodeid).body == TRUSTED.encode() + b"\0"


def test_the_attributes_of_another_file_that_has_the_name_now_are_not_told(both: Both) -> None:
    nodeid = both.find(b"file")
    (both.path / "file").unlink()
    (both.path / "file").touch()
    os.setxattr(both.path / "file", ACCESS, ACL)
    for opcode, name in ((Opcode.GETXATTR, ACCESS.encode() + b"\0"), (Opcode.LISTXATTR, b"")):
        reply = both.core.request(opcode, _ROOM_OF.pack(ROOM, 0), name, nodeid)
        assert reply is not None, "it is left to Python"
        assert reply.error == errno.ESTALE
        both.vfs.retries.remove_process(os.getpid())


def entries_of(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Nodeid, offset and name of each entry of a listing."""
    at = 0
    while at < len(body):
        offset, n_name = struct.unpack_from("=QI", body, at + 136)
        yield _ENTRY.unpack_from(body, at)[0], offset, body[at + 152 : at + 152 + n_name]
        at += 152 + (n_name + 7) // 8 * 8


def test_a_listing_is_told_in_as_many_answers_as_it_takes(both: Both) -> None:
    """And each entry once."""
    names = {f"file-{number:0{number % 60 + 3}}" for number in range(1000)}
    for name in names:
        (both.path / name).touch()
    found: list[bytes] = []
    offset = 0
    while True:
        reply = both.core.request(Opcode.READDIRPLUS, wire.READ_IN.pack(0, offset, ROOM).ljust(40, b"\0"))
        assert reply is not None
        assert not reply.error
        if not reply.body:
            break
        assert len(reply.body) <= ROOM
        entries = list(entries_of(reply.body))
        found += [entry for _nodeid, _offset, entry in entries]
        offset = entries[-1][1]
    assert sorted(map(os.fsdecode, found)) == sorted(names | {".", "..", "file", "link", "directory", "fifo"})


def test_a_listing_takes_no_more_than_a_reply_has_room_for(both: Both) -> None:
    """Whatever the request says. The kernel asks for less."""
    for number in range(3000):
        os.link(both.path / "file", both.path / f"{number}".ljust(250, "x"))
    reply = both.core.request(Opcode.READDIRPLUS, wire.READ_IN.pack(0, 0, (1 << 32) - 1).ljust(40, b"\0"))
    assert reply is not None
    assert MIB - 500 < len(reply.body) <= MIB


@pytest.mark.parametrize("name", [b".", b"..", b"directory/..", b"/etc"])
def test_a_name_that_leads_elsewhere_is_left_to_python_which_refuses_it(both: Both, name: bytes) -> None:
    assert both.core.request(Opcode.LOOKUP, names=name + b"\0") is None
    assert both.kernel.request(Opcode.LOOKUP, name + b"\0").error == errno.EINVAL


@pytest.mark.parametrize("n", [2, 1 << 63, (1 << 64) - 1])
def test_to_forget_more_references_than_there_are_is_to_forget_all(both: Both, n: int) -> None:
    nodeid = both.find(b"file")
    both.kernel.send(Opcode.BATCH_FORGET, struct.pack("=IIQQ", 1, 0, nodeid, n))
    assert both.kernel.serve()
    assert both.vfs.nodes.get(nodeid) is None


def test_what_is_mounted_inside_is_listed_by_its_name_alone(both: Both) -> None:
    """A look at such a name may have to wait for another machine; a listing has it without one."""
    both.vfs.lock.submounts.names = frozenset({b"directory"})
    both.vfs.lock.submounts.on_change()
    reply = both.core.request(Opcode.READDIRPLUS, wire.READ_IN.pack(0, 0, ROOM).ljust(40, b"\0"))
    assert reply is not None
    nodeids = {name: nodeid for nodeid, _offset, name in entries_of(reply.body)}
    assert nodeids[b"directory"] == 0
    assert nodeids[b"file"] == both.find(b"file")


def test_who_was_told_estale_is_left_to_python_which_holds_what_he_finds(both: Both) -> None:
    """And nobody else is."""
    both.vfs.retries.add_process(os.getpid() + 1)
    assert both.core.request(Opcode.LOOKUP, names=b"file\0") is not None
    both.vfs.retries.add_process(os.getpid())
    assert both.core.request(Opcode.LOOKUP, names=b"file\0") is None
    both.vfs.retries.remove_process(os.getpid())
    assert both.core.request(Opcode.LOOKUP, names=b"file\0") is not None


def test_a_refused_opendir_leaves_the_thread_its_own_identity(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    with vfs_at(tmp_path) as vfs:
        vfs.nodes.opens_directories = True
        nodeid = Names(vfs).lookup(ROOT, b"private", Somebody(0, 0, os.getpid(), 0)).nodeid
        with pytest.raises(PermissionError):
            vfs.core.do(wire.encode_request(Opcode.OPENDIR, nodeid, (1000, 1000, 0), wire.OPEN_IN.pack(0)))
        assert "\nUid:\t0\t0\t0\t0\n" in Path("/proc/thread-self/status").read_text(encoding="utf-8")


UNENDED_LISTS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>

long syscall(long number, ...) {
    long a[6];
    va_list all;
    va_start(all, number);
    for (int at = 0; at < 6; at++)
        a[at] = va_arg(all, long);
    va_end(all);
    if (number == 465 && a[4] == 65536) { /* listxattrat(2), as the core calls it */
        memset((char *)a[3], 'x', 65536);
        memcpy((char *)a[3], "security.selinux\0user.a", 24);
        return 65536;
    }
    return ((long (*)(long, ...))dlsym(RTLD_NEXT, "syscall"))(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""
ASKS_FOR_A_LIST = f"""
from tests.support.core_requests import open_core
from fusefs.core.fuse_protocol import Opcode

with open_core(is_shared=False) as (core, kernel, vfs, path):
    print(core.request(Opcode.LISTXATTR, {_ROOM_OF.pack(ROOM, 0)!r}, b"", {ROOT}))
"""


def test_a_list_of_xattrs_that_lacks_its_last_nul_is_read_to_its_end(tmp_path: Path) -> None:
    """The kernel's own filesystems end their lists; one from elsewhere, below a daemon of root's, may not."""
    code, library = tmp_path / "unended.c", tmp_path / "unended.so"
    code.write_text(UNENDED_LISTS)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, code], check=True)
    env = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", ASKS_FOR_A_LIST], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("error=0, body=b'user.a\\x00')\n"), done
