"""Requests that the native core is asked without a kernel: by a socket, or by memory as a ring's entry has it."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Protocol, cast

import pytest

from fusefs.core.fuse_protocol import Opcode
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_ring import FuseRing, RingEntry
from fusefs.linux.io_uring import READ, IoUring
from fusefs.mount.requests.fuse_requests import RequestReader
from fusefs.mount.requests.native_core import NativeCore, native_core
from fusefs.mount.requests.ring_servers import RingOf
from fusefs.mount.tree.vfs import Vfs
from tests.support.fake_dev_fuse import FakeKernel, FuseReply, a_real

_HEAD = struct.Struct("=IIQQIIII")
_OWN_AT, _ENTRY_AT, _SIZE_AT, _PAYLOAD_AT = 128, 256, 272, 4096
_ANSWER = struct.Struct("=IiQ")
_PAYLOAD_BYTES = 1 << 20
_TOKEN = 1


class CoreClient(Protocol):
    """What asks a core."""

    def asked(self, opcode: Opcode, own: bytes = b"", names: bytes = b"", nodeid: int = 1) -> FuseReply | None:
        """What it answers; None: it leaves that to Python."""


class CoreReading:
    """A core that reads /dev/fuse, which a socket stands for."""

    def __init__(self, core: NativeCore, kernel: FakeKernel) -> None:
        self._kernel = kernel
        self._device = core.for_device(0, RequestReader(), kernel.wake)

    def asked(self, opcode: Opcode, own: bytes = b"", names: bytes = b"", nodeid: int = 1) -> FuseReply | None:
        """What it answers; None: it leaves that to Python."""
        unique = self._kernel.send(opcode, own + names, nodeid, pid=os.getpid())
        if self._device.read(False):
            return None
        told = self._kernel.told()
        assert told is not None
        assert told.unique == unique
        return told


class CoreAsked:
    """A core, and who asks it: a read of nothing stands for a request that has come.

    It commits its answer to what is no connection, which refuses that: so what it answers comes back with an error.
    """

    def __init__(self, core: RingOf, stack: ExitStack) -> None:
        self._numbers = count(2, 2)
        self._ring = stack.enter_context(IoUring(8, 1, is_wide=True))
        self._nothing = stack.enter_context(Fd(os.open("/dev/null", os.O_RDONLY)))
        self._buffer = ctypes.create_string_buffer(8)
        self._answering = core(cast(FuseRing, self._ring), _none_later)
        self._entries: list[RingEntry] = []
        self._memory = self._new_entry()

    def _new_entry(self) -> memoryview:
        """Add an entry with the next token; its memory."""
        entry = RingEntry(0, _TOKEN + len(self._entries), _PAYLOAD_BYTES, set())
        self._entries.append(entry)
        self._answering.add(entry.token, entry.address, 0)
        n_bytes = _PAYLOAD_AT + _PAYLOAD_BYTES
        return memoryview((ctypes.c_char * n_bytes).from_address(entry.address)).cast("B")

    def asked(self, opcode: Opcode, own: bytes = b"", names: bytes = b"", nodeid: int = 1) -> FuseReply | None:
        """What it answers; None: it leaves that to Python."""
        memory = self._memory
        unique = self._put(memory, opcode, own, names, nodeid)
        self._ring.submit(READ, self._nothing, _TOKEN, address=ctypes.addressof(self._buffer), length=8)
        found = self._answering.enter(1, inf)
        ((token, result),) = found
        assert token == _TOKEN
        if not result:
            return None
        assert result == -errno.EOPNOTSUPP, "the commit is refused"
        size, error, answered = _ANSWER.unpack_from(memory)
        assert answered == unique
        return FuseReply(unique, -error, bytes(memory[_PAYLOAD_AT : _PAYLOAD_AT + size - _ANSWER.size]))

    def _put(self, memory: memoryview, opcode: Opcode, own: bytes, names: bytes, nodeid: int) -> int:
        """Put a request into an entry's memory; its number."""
        unique, size = next(self._numbers), _HEAD.size + len(own) + len(names)
        memory[: _HEAD.size] = _HEAD.pack(size, opcode, unique, nodeid, 0, 0, os.getpid(), 0)
        memory[_OWN_AT : _OWN_AT + len(own)] = own
        memory[_ENTRY_AT : _SIZE_AT + 4] = struct.pack("=QQI", 0, unique, len(names))
        memory[_PAYLOAD_AT : _PAYLOAD_AT + len(names)] = names
        return unique

    def answered_at_once(self, opcode: Opcode, names: bytes, n: int) -> list[int]:
        """Ask the same in n entries at a time; the tokens of the entries whose answers were submitted."""
        reading, writing = os.pipe()
        with Fd(reading):
            with Fd(writing):
                for _ in range(n):
                    self._put(self._new_entry(), opcode, b"", names, 1)
                    self._ring.submit(
                        READ, reading, self._entries[-1].token, address=ctypes.addressof(self._buffer), length=8
                    )
                    assert self._answering.enter(0, 0.0) == []
            found = self._answering.enter(1, inf)  # at the end of the pipe all requests have come
            while more := self._answering.enter(0, 0.0):
                found += more
        return [token for token, result in found if result == -errno.EOPNOTSUPP]


def _none_later(*_asked: object) -> None:
    pytest.fail("it is answered in steps")


@contextmanager
def asked_core(*, is_shared: bool) -> Iterator[tuple[CoreAsked, FakeKernel, Vfs, Path]]:
    """A core that is asked by a ring, the Python code that answers what it does not, what both work on, and the
    directory below."""
    with core_threads(is_shared=is_shared) as (new_thread, kernel, vfs, path):
        yield new_thread(), kernel, vfs, path


@contextmanager
def reading_core(*, is_shared: bool) -> Iterator[tuple[CoreReading, FakeKernel, Vfs, Path]]:
    """What `asked_core` has, of a core that reads /dev/fuse."""
    with _core(None, is_shared=is_shared) as (core, kernel, vfs, path):
        yield CoreReading(core, kernel), kernel, vfs, path


@contextmanager
def core_threads(
    below: Path | None = None, *, is_shared: bool = False
) -> Iterator[tuple[Callable[[], CoreAsked], FakeKernel, Vfs, Path]]:
    """What makes the calling thread's part of a core, and what `asked_core` has. below: what the directory lies in"""
    with _core(below, is_shared=is_shared) as (core, kernel, vfs, path), ExitStack() as stack:
        yield partial(CoreAsked, core.for_ring, stack), kernel, vfs, path


@contextmanager
def _core(below: Path | None, *, is_shared: bool) -> Iterator[tuple[NativeCore, FakeKernel, Vfs, Path]]:
    with a_real(is_shared=is_shared, below=below) as (kernel, vfs, path), Fd(os.eventfd(0)) as wake:
        yield native_core(vfs, kernel.requests, wake), kernel, vfs, path
