"""Requests without a kernel: a socket for /dev/fuse, a client that asks by it, and a vfs of which nothing works."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from fusefs.core.fuse_protocol import REQUEST_BYTES_MAX
from fusefs.core.metadata_cache import Attributes
from fusefs.linux.fd import Fd
from fusefs.mount.native._core import Tables
from fusefs.mount.places.counters import Counters
from fusefs.mount.requests.fuse_requests import FuseRequests, Patience
from fusefs.mount.requests.thread_pool import PoolTask, ThreadPool
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.kernel_timeouts import AttrTimeouts
from fusefs.mount.tree.vfs import Vfs
from tests.support.vfs_without_mount import options_of


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

    def do(self, task: PoolTask) -> bool:
        task.act(False)
        return True


class Later(ThreadPool):
    """No threads: what is to be done is left to the test."""

    def __init__(self) -> None:
        super().__init__(1)
        self.tasks: list[PoolTask] = []

    def do(self, task: PoolTask) -> bool:
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
            self.requests.go_on(is_idle=True)
        return bool(request)

    def told(self) -> FuseReply | None:
        """The next answer."""
        with suppress(BlockingIOError):
            message = self.end.recv(_ANSWER_BYTES_MAX)
            size, error, unique = struct.unpack_from("=IiQ", message)
            assert size == len(message)
            return FuseReply(unique, -error, message[16:])
        return None

    def asked(self, opcode: int, body: bytes = b"", nodeid: int = 1) -> FuseReply:
        """The only answer."""
        unique = self.send(opcode, body, nodeid)
        assert self.serve() is True
        told = self.told()
        assert told is not None
        assert told.unique == unique
        assert self.told() is None
        return told


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
