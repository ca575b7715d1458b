"""Requests without a kernel: a socket for /dev/fuse, a client that asks by it, and a vfs of which nothing works."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import REQUEST_BYTES_MAX, Opcode
from fusefs.core.metadata_cache import ROOT, Attributes, NodeId
from fusefs.core.mount_options import Coherence, MountOptions, parse_options
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.mount.native._core import Tables
from fusefs.mount.places.counters import Counters
from fusefs.mount.requests.fuse_requests import FuseRequests, Patience
from fusefs.mount.requests.thread_pool import PoolTask, ThreadPool
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.kernel_timeouts import AttrTimeouts
from fusefs.mount.tree.vfs import Vfs


class Broken:
    """A vfs of which nothing works, nor of its parts."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.lock, self.stats = TablesLock(), Counters.in_memory()
        self.nodes = Tables((1, b""), Attributes(1, 1, 0o040755, *[0] * 11))
        self.timeouts = AttrTimeouts(self.nodes)
        self.retries = EstaleRetries(self.lock, self.nodes)
        self.is_shared = False

    def __getattr__(self, name: str) -> Broken:
        return self

    def __call__(self, *_args: object, **_named: object) -> NoReturn:
        raise self.error

    def count(self, cell: int, begun_ns: int, *, has_failed: bool) -> None:
        """A failure is counted; not here."""


class AtOnce(ThreadPool):
    """No threads."""

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, task: PoolTask) -> bool:
        task.function(False)
        return True


class Later(ThreadPool):
    """No threads: what is to be done is left to the test."""

    def __init__(self) -> None:
        super().__init__(1)
        self.tasks: list[PoolTask] = []

    def submit(self, task: PoolTask) -> bool:
        self.tasks.append(task)
        return True


_ANSWER_BYTES_MAX = 2 << 20
SO_SNDBUFFORCE: Final = 32


class FuseReply(NamedTuple):
    """An answer."""

    unique: int
    error: int
    body: bytes


class FakeKernel:
    """What asks a Direct, and is told."""

    def __init__(self, vfs: Any, pool: ThreadPool | None = None, *, opens_directories: bool = True) -> None:
        self.end, self.session = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.setblocking(False)
        with suppress(PermissionError):  # only root's may be large
            self.session.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, _ANSWER_BYTES_MAX)
        self.stats: Counters = vfs.stats
        pool = pool or AtOnce()
        vfs.nodes.opens_directories = opens_directories
        self.requests = FuseRequests(vfs, self.session.fileno(), pool)
        self._numbers = count(2, 2)

    def close(self) -> None:
        self.session.close()
        self.end.close()

    def send(self, opcode: int, body: bytes = b"", nodeid: int = 1, *, pid: int = 1) -> int:
        """Ask, and have it served; its number."""
        unique = next(self._numbers)
        self.end.send(struct.pack("=IIQQIIII", 40 + len(body), opcode, unique, nodeid, 0, 0, pid, 0) + body)
        return unique

    def serve(self) -> bool:
        """Have what was sent answered to the end; whether there was anything."""
        request = b""
        with suppress(BlockingIOError):
            request = os.read(self.requests.device, REQUEST_BYTES_MAX)
            self.requests.answer(request, self.requests.write, Patience.NO_WAITING)
        while self.requests.n_unnumbered:
            self.requests.retry_numbers(is_idle=True)
        return bool(request)

    def receive_reply(self) -> FuseReply | None:
        """Return the next reply; None if there is none yet."""
        with suppress(BlockingIOError):
            message = self.end.recv(_ANSWER_BYTES_MAX)
            size, error, unique = struct.unpack_from("=IiQ", message)
            assert size == len(message)
            return FuseReply(unique, -error, message[16:])
        return None

    def request(self, opcode: int, body: bytes = b"", nodeid: int = 1) -> FuseReply:
        """Send a request, serve it, and return its reply, which must be the only one."""
        unique = self.send(opcode, body, nodeid)
        assert self.serve() is True
        reply = self.receive_reply()
        assert reply is not None
        assert reply.unique == unique
        assert self.receive_reply() is None
        return reply


@contextmanager
def a_broken(error: Exception, pool: ThreadPool | None = None) -> Iterator[FakeKernel]:
    kernel = FakeKernel(Broken(error), pool, opens_directories=False)
    try:
        yield kernel
    finally:
        kernel.close()


@contextmanager
def a_real(
    *, is_shared: bool = False, below: Path | None = None, **named: Any
) -> Iterator[tuple[FakeKernel, Vfs, Path]]:
    with tempfile.TemporaryDirectory(prefix="trashd-direct-", dir=below) as name, ExitStack() as stack:
        root = stack.enter_context(Fd(os.open(name, os.O_PATH)))
        options = options_of(is_shared=is_shared, timeout_s=1000, cache_bytes=1 << 20)
        vfs = Vfs(root, TablesLock(), Counters.in_memory(), options, 1000)
        stack.callback(vfs.close)
        kernel = FakeKernel(vfs, **named)
        stack.callback(kernel.close)
        yield kernel, vfs, Path(name)


SWITCH_S: Final = 1e-6
"""After which a thread that wants Python's lock asks for it; the shortest that Python takes. It is 5 ms elsewhere."""
_PREPARE: Final = """
import sys
sys.argv[0] = "trashd"
if interval_s := float(sys.argv.pop(1)):
    sys.setswitchinterval(interval_s)
if core := sys.argv.pop(1):
    import fusefs.mount.native
    fusefs.mount.native.__path__.insert(0, core)
"""
_RUN: Final = """
from fusefs.cli.main import main
sys.exit(main())
"""
_OPTIONS: Final = {
    # Python ends with much of its memory in use.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:abort_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=0:report_signal_unsafe=0:history_size=4",
    "PYTHONMALLOC": "malloc",  # else objects would be parts of large pieces, in which nothing is seen
}
_RUNTIMES: Final = ("libasan.so", "libubsan.so", "libtsan.so")


def daemon_command(*, switch_s: float = 0) -> list[str | Path]:
    """What runs `trashd` as a mount's daemon. switch_s: Python's switch interval; 0: as it is"""
    return python_command(_RUN, switch_s=switch_s)


def python_command(program: str, *, switch_s: float = 0) -> list[str | Path]:
    """Return the command that runs a Python program in the way a mount's daemon is run."""
    core = os.environ.get("TRASHD_TEST_SANITIZED", "")
    words = [sys.executable, "-P", "-c", _PREPARE + program, str(switch_s), core]
    return [*(_sanitized(Path(core)) if core else ()), *words]


def _sanitized(core: Path) -> list[str]:
    """What has a program find faults. Raises  AssertionError: the core was built without sanitizers"""
    needed = subprocess.run(["ldd", core / "_core.abi3.so"], capture_output=True, text=True, check=True).stdout.split()
    runtimes = [word for word in needed if word.startswith("/") and Path(word).name.startswith(_RUNTIMES)]
    assert runtimes, f"{core} needs no sanitizer's runtime"
    return ["env", f"LD_PRELOAD={' '.join(runtimes)}", *(f"{name}={value}" for name, value in _OPTIONS.items())]


_XATTR_ROOM = 1 << 16


class Somebody(NamedTuple):
    """The process that makes a request."""

    uid: int
    gid: int
    pid: int
    umask: int


class NameReply(NamedTuple):
    """What a reply says of a name."""

    nodeid: NodeId
    attributes: Attributes
    timeout_s: float
    attr_s: float


class OpenedFile(NamedTuple):
    """What a reply says of a handle."""

    fh: int
    backing_id: int
    keeps: bool


class Changes(NamedTuple):
    """What SETATTR is to change; None: left as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Files:
    """Requests about nodes and files to a vfs, as a kernel makes them."""

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs

    def _request(self, opcode: Opcode, nodeid: int, caller: Somebody | None, body: bytes = b"") -> bytes:
        ids = (0, 0, os.getpid()) if caller is None else (caller.uid, caller.gid, caller.pid)
        return self._vfs.answer(wire.encode_request(opcode, nodeid, ids, body))

    def _name_reply(self, nodeid: int, reply: bytes) -> NameReply:
        attr_out, node = wire.read_attr(reply), self._vfs.nodes.get(nodeid)
        of_node = (0, nodeid, 0) if node is None else (node.dev, node.ino, node.btime_ns)
        return NameReply(NodeId(nodeid), attr_out.attributes_of(*of_node), 0, attr_out.attr_s)

    def getattr(self, nodeid: int, caller: Somebody) -> NameReply:
        return self._name_reply(nodeid, self._request(Opcode.GETATTR, nodeid, caller, bytes(wire.GETATTR_IN.size)))

    def setattr(self, nodeid: int, changes: Changes, fh: int | None, caller: Somebody) -> NameReply:
        bits = wire.FATTR_MODE, wire.FATTR_UID, wire.FATTR_GID, wire.FATTR_SIZE, wire.FATTR_ATIME, wire.FATTR_MTIME
        valid = sum(bit for bit, change in zip(bits, changes, strict=True) if change is not None)
        mode, uid, gid, size, atime_ns, mtime_ns = (change or 0 for change in changes)
        (atime_s, atime_ns), (mtime_s, mtime_ns) = divmod(atime_ns, wire.NANO), divmod(mtime_ns, wire.NANO)
        own = wire.SETATTR_IN.pack(
            valid | (0 if fh is None else wire.FATTR_FH),
            fh or 0,
            size,
            atime_s,
            mtime_s,
            atime_ns,
            mtime_ns,
            mode,
            uid,
            gid,
        )
        return self._name_reply(nodeid, self._request(Opcode.SETATTR, nodeid, caller, own))

    def statfs(self) -> tuple[int, ...]:
        """As wire.STATFS_OUT."""
        return wire.STATFS_OUT.unpack(self._request(Opcode.STATFS, ROOT, None))

    def open(self, nodeid: int, flags: int, caller: Somebody) -> OpenedFile:
        fh, how, backing_id = wire.read_opened(self._request(Opcode.OPEN, nodeid, caller, wire.OPEN_IN.pack(flags)))
        return OpenedFile(fh, backing_id, bool(how & wire.FOPEN_KEEP_CACHE))

    def release(self, fh: int) -> None:
        self._request(Opcode.RELEASE, ROOT, None, wire.HANDLE_IN.pack(fh))

    def read(self, fh: int, offset: int, size: int) -> bytes:
        return self._request(Opcode.READ, ROOT, None, wire.READ_IN.pack(fh, offset, size))

    def write(self, fh: int, offset: int, data: bytes) -> int:
        own = wire.WRITE_IN.pack(fh, offset, len(data), 0)
        return wire.read_written(self._request(Opcode.WRITE, ROOT, None, own + data))

    def fsync(self, fh: int) -> None:
        self._request(Opcode.FSYNC, ROOT, None, wire.FSYNC_IN.pack(fh, 0))

    def getxattr(self, nodeid: int, name: bytes, caller: Somebody) -> bytes:
        return self._request(Opcode.GETXATTR, nodeid, caller, wire.GETXATTR_IN.pack(_XATTR_ROOM) + name + b"\0")

    def listxattr(self, nodeid: int, caller: Somebody) -> list[bytes]:
        listed = self._request(Opcode.LISTXATTR, nodeid, caller, wire.GETXATTR_IN.pack(_XATTR_ROOM))
        return listed.split(b"\0")[:-1]

    def setxattr(self, nodeid: int, name: bytes, value: bytes, caller: Somebody) -> None:
        self._request(Opcode.SETXATTR, nodeid, caller, wire.SETXATTR_IN.pack(len(value), 0) + name + b"\0" + value)

    def removexattr(self, nodeid: int, name: bytes, caller: Somebody) -> None:
        self._request(Opcode.REMOVEXATTR, nodeid, caller, name + b"\0")


class Names:
    """Requests about names to a vfs, as a kernel makes them."""

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs

    def _request(self, opcode: Opcode, nodeid: int, caller: Somebody, own: bytes = b"", *strings: bytes) -> bytes:
        body = own + b"".join(string + b"\0" for string in strings)
        return self._vfs.answer(wire.encode_request(opcode, nodeid, (caller.uid, caller.gid, caller.pid), body))

    def _entry(self, reply: bytes) -> NameReply:
        entry_out = wire.read_entry(reply)
        node = self._vfs.nodes.get(entry_out.nodeid) if entry_out.nodeid else None
        of_node = (0, entry_out.nodeid, 0) if node is None else (node.dev, node.ino, node.btime_ns)
        return NameReply(
            NodeId(entry_out.nodeid), entry_out.attributes_of(*of_node), entry_out.name_s, entry_out.attr_s
        )

    def lookup(self, parent: int, name: bytes, caller: Somebody) -> NameReply:
        return self._entry(self._request(Opcode.LOOKUP, parent, caller, b"", name))

    def forget(self, nodeid: int, n: int) -> None:
        self._vfs.lock.call(self._vfs.core.do, wire.encode_batch_forget([(nodeid, n)]))

    def readlink(self, nodeid: int, caller: Somebody) -> bytes:
        return self._request(Opcode.READLINK, nodeid, caller)

    def _opened(self, reply: bytes) -> tuple[OpenedFile, NameReply]:
        return OpenedFile(wire.read_handle(reply), 0, keeps=True), self._entry(reply)

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Somebody) -> tuple[OpenedFile, NameReply]:
        own = wire.CREATE_IN.pack(flags, mode, caller.umask)
        return self._opened(self._request(Opcode.CREATE, parent, caller, own, name))

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Somebody) -> NameReply:
        own = wire.MKNOD_IN.pack(mode, rdev, caller.umask)
        return self._entry(self._request(Opcode.MKNOD, parent, caller, own, name))

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Somebody) -> NameReply:
        return self._entry(self._request(Opcode.MKDIR, parent, caller, wire.MKDIR_IN.pack(mode, caller.umask), name))

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Somebody) -> NameReply:
        return self._entry(self._request(Opcode.SYMLINK, parent, caller, b"", name, target))

    def link(self, nodeid: int, parent: int, name: bytes, caller: Somebody) -> NameReply:
        return self._entry(self._request(Opcode.LINK, parent, caller, wire.LINK_IN.pack(nodeid), name))

    def unlink(self, parent: int, name: bytes, caller: Somebody) -> None:
        self._request(Opcode.UNLINK, parent, caller, b"", name)

    def rmdir(self, parent: int, name: bytes, caller: Somebody) -> None:
        self._request(Opcode.RMDIR, parent, caller, b"", name)

    def rename(self, old_parent: int, old: bytes, parent: int, new: bytes, flags: int, caller: Somebody) -> None:
        self._request(Opcode.RENAME2, old_parent, caller, wire.RENAME2_IN.pack(parent, flags), old, new)


def options_of(*, is_shared: bool = False, timeout_s: float = 0, cache_bytes: int = 0) -> MountOptions:
    """Root's, for all users."""
    words = f"timeout={timeout_s},cache_size={cache_bytes},in_flight=1"
    return parse_options(
        [words], as_root=True, default_coherence=Coherence.SHARED if is_shared else Coherence.EXCLUSIVE
    )


@contextmanager
def vfs_at(
    path: Path, *, max_fds: int = 100, timeout_s: float = 0, is_shared: bool = False, is_slow: bool = False
) -> Iterator[Vfs]:
    """The tree below a directory, as a daemon has it."""
    with Fd(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        lock = TablesLock(is_slow=is_slow)
        options = options_of(is_shared=is_shared, timeout_s=timeout_s)
        vfs = Vfs(root, lock, Counters.in_memory(), options, max_fds)
        try:
            yield vfs
        finally:
            vfs.close()


class DirectoryRequests:
    """Requests about directories that are read to a vfs, as a kernel makes them."""

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs

    def _request(self, opcode: Opcode, nodeid: int, own: bytes, caller: Somebody | None = None) -> bytes:
        ids = (0, 0, os.getpid()) if caller is None else (caller.uid, caller.gid, caller.pid)
        with self._vfs.lock:
            return self._vfs.listings.answer(wire.encode_request(opcode, nodeid, ids, own))

    def opendir(self, nodeid: int, caller: Somebody) -> int:
        return wire.read_handle(self._request(Opcode.OPENDIR, nodeid, bytes(wire.OPEN_IN.size), caller))

    def entries(self, nodeid: int, offset: int = 0, *, fh: int = 0, room: int = 4096) -> list[wire.ListedDirent]:
        """Those of one reply."""
        return list(
            wire.read_direntplus(self._request(Opcode.READDIRPLUS, nodeid, wire.READ_IN.pack(fh, offset, room)))
        )

    def releasedir(self, fh: int) -> None:
        self._request(Opcode.RELEASEDIR, 0, wire.HANDLE_IN.pack(fh) + bytes(16))


def move_into_drop(volume: Path, path: Path, kernel: Kernel) -> None:
    """What a daemon does when the owner of something below a volume moves it to the owner's drop folder."""
    with vfs_at(volume) as vfs:
        uid = path.lstat().st_uid
        [drop] = [found for found in volume.glob(".trashd/[un]*/*/drop") if found.stat().st_uid == uid]
        mover = Somebody(uid, uid, os.getpid(), 0o022)
        vfs.node_operations.adoption.kernel = kernel

        def nodeid(at: Path) -> int:
            above = ROOT if at == volume else nodeid(at.parent)
            return above if at == volume else Names(vfs).lookup(above, os.fsencode(at.name), mover).nodeid

        old, new = os.fsencode(path.name), b"dropped"
        Names(vfs).rename(nodeid(path.parent), old, nodeid(drop), new, 0, mover)
