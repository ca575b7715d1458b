"""The mount's engine behind a socket in place of /dev/fuse, in a process of its own: what the fuzzer asks.

The process forks a child for each case. The child sees every filesystem read-only but a scratch tmpfs, which holds the
backing tree: a name that leads out of the tree can't change the machine.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fusefs.core.mount_counters import Gauges
from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.mount.places.counters import Counters
from fusefs.mount.requests.device_readers import DeviceReaders
from fusefs.mount.requests.fuse_requests import FuseRequests
from fusefs.mount.requests.thread_pool import ThreadPool
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.vfs import Vfs
from tests.support.fake_dev_fuse import SO_SNDBUFFORCE
from tests.support.odd_daemon import python_command
from tests.support.vfs_without_mount import options_of

_CLONE_NEWNS, _MS_REC_PRIVATE = 0x20000, 0x4000 | 0x40000
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 0x8000, 1
_MESSAGE_BYTES_MAX = 4 << 20
_N_THREADS, _N_FDS, _N_MANY = 16, 400, 3000
_CANARY = b"content"
_TREE_FILES = {"file": b"content", "deep/er/leaf": b"x" * 10_000, "shared/other": b"other"}


class EngineOptions(NamedTuple):
    """How a case's engine is configured."""

    is_slow: bool = False
    is_shared: bool = False
    opens_directories: bool = True
    has_many_names: bool = False
    """A directory whose listing is larger than a reply may be."""


@contextmanager
def running_engine(root: Fd, device: int, options: EngineOptions) -> Iterator[Callable[[], Gauges]]:
    """The engine that reads requests from `device`. All that depends on how an engine is built is in here.

    Yields  what returns its gauges
    """
    lock = TablesLock(is_slow=options.is_slow)
    mount_options = options_of(is_shared=options.is_shared, timeout_s=1000, cache_bytes=1 << 20)
    vfs = Vfs(root, lock, Counters.in_memory(), mount_options, _N_FDS)
    pool = ThreadPool(_N_THREADS)
    vfs.nodes.opens_directories = options.opens_directories
    requests = FuseRequests(vfs, device, pool)
    readers = DeviceReaders(requests, vfs.core, lambda: os._exit(3))
    readers.begin()
    yield vfs.gauges
    readers.end(10.0)
    vfs.close()


# The process.


def serve_cases(socket_fd: int) -> None:
    """Fork a child for each case that is asked for on a socket, until that is closed."""
    control = socket.socket(fileno=socket_fd)
    gc.freeze()
    while message := control.recv(1 << 12):
        words = json.loads(message)
        _data, fds, _flags, _address = socket.recv_fds(control, 1, 3)
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve_case(Path(words["scratch"]), EngineOptions(*words["options"]), *fds)
        for fd in fds:
            os.close(fd)
        control.send(b"%d" % pid)
        control.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _serve_case(scratch: Path, options: EngineOptions, device: int, control_fd: int, log: int) -> None:
    """Answer requests, and on the control socket what is asked of the process; never returns."""
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 1
    try:
        with (
            Fd(_scratch_tree(scratch, options)) as root,
            socket.socket(fileno=control_fd) as control,
            ExitStack() as stack,
        ):
            gauges = stack.enter_context(running_engine(root, device, options))
            while control.recv(1) == b"g":
                control.send(json.dumps({**gauges()._asdict(), "n_fds": len(os.listdir("/proc/self/fd"))}).encode())
        code = 0
    finally:
        os._exit(code)


def _scratch_tree(scratch: Path, options: EngineOptions) -> int:
    """The backing tree, in a mount namespace in which nothing else can be changed: an fd of its root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None):
        raise OSError(ctypes.get_errno(), "a mount namespace of its own")
    syscalls.mount_setattr(-1, b"/", _AT_RECURSIVE, struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0))
    flags = ctypes.c_ulong(_MS_NOSUID_NODEV_NOEXEC)
    if libc.mount(b"tests", os.fsencode(scratch), b"tmpfs", flags, b"size=32m,nr_inodes=4096,mode=0777"):
        raise OSError(ctypes.get_errno(), "a tmpfs")
    tree = scratch / "tree"
    tree.mkdir()
    tree.chmod(0o777)
    for name, content in _TREE_FILES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    (tree / "shared").chmod(0o1777)
    (tree / "link").symlink_to("file")
    os.mkfifo(tree / "fifo")
    for number in range(_N_MANY if options.has_many_names else 0):
        os.link(tree / "file", tree / "deep" / str(number).ljust(250, "x"))
    return os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


# The fuzzer's side.


class EngineProcess:
    """The process, and the child that serves the present case."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        run = f"from tests.support.fuzzed_engine import serve_cases; serve_cases({theirs.fileno()})"
        self._canary = scratch.with_suffix(".canary")
        self.has_changed_canary()
        with self._canary.open("r+b") as canary:  # a file that no request is about
            self._process = subprocess.Popen(
                python_command(run), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=canary
            )
        theirs.close()

    def close(self) -> None:
        self._control.close()
        self._process.wait()

    @contextmanager
    def case(self, options: EngineOptions, log: Path) -> Iterator[EngineCase]:
        """A child of its own for a case. log: what it prints"""
        ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        for end in (*ends[0], *ends[1]):
            end.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, _MESSAGE_BYTES_MAX)
        with log.open("wb") as file:
            self._control.send(json.dumps({"scratch": str(self._scratch), "options": options}).encode())
            socket.send_fds(self._control, [b"."], [ends[0][1].fileno(), ends[1][1].fileno(), file.fileno()])
        ends[0][1].close()
        ends[1][1].close()
        with ends[0][0] as device, ends[1][0] as control:
            yield EngineCase(int(self._control.recv(20)), device, control, self._exit_code)

    def has_changed_canary(self) -> bool:
        """Whether a file of the process was changed that no request is about; it is as at the start then."""
        is_changed = not self._canary.exists() or self._canary.read_bytes() != _CANARY
        if is_changed:
            self._canary.write_bytes(_CANARY)
        return is_changed

    def _exit_code(self) -> int:
        return int(self._control.recv(20))


class EngineCase(NamedTuple):
    """The child that serves a case: its pid, the other end of its device, and what it is asked by."""

    pid: int
    device: socket.socket
    control: socket.socket
    exit_code: Callable[[], int]

    def open_paths(self) -> list[str]:
        """What it has open."""
        fds = Path(f"/proc/{self.pid}/fd")
        return [os.readlink(fds / fd) for fd in os.listdir(fds)]

    def gauges(self) -> dict[str, Any]:
        """What its engine holds at this moment. Raises  OSError: it has ended"""
        self.control.send(b"g")
        found: dict[str, Any] = json.loads(self.control.recv(1 << 12) or b"{}")
        return found
