"""Requests that the native core is asked without a kernel: by memory as a ring's entry has it."""

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
from typing import cast

import pytest

from fusefs.core.fuse_protocol import Opcode
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_ring import FuseRing, RingEntry
from fusefs.linux.io_uring import READ, IoUring
from fusefs.mount.native.native_core import load, native_core
from fusefs.mount.requests.ring_servers import Core
from fusefs.mount.tables.tables_lock import Turn
from fusefs.mount.tree.vfs import Vfs
from tests.support.fake_dev_fuse import FakeKernel, FuseReply, a_real

_HEAD = struct.Struct("=IIQQIIII")
_OWN_AT, _ENTRY_AT, _SIZE_AT, _PAYLOAD_AT = 128, 256, 272, 4096
_ANSWER = struct.Struct("=IiQ")
_PAYLOAD_BYTES = 1 << 16
_TOKEN = 1


class CoreAsked:
    """A core, and who asks it: a read of nothing stands for a request that has come.

    It commits its answer to what is no connection, which refuses that: so what it answers comes back with an error.
    """

    def __init__(self, core: Core, stack: ExitStack) -> None:
        self._numbers = count(2, 2)
        self._ring = stack.enter_context(IoUring(8, 1, is_wide=True))
        self._nothing = stack.enter_context(Fd(os.open("/dev/null", os.O_RDONLY)))
        self._buffer = ctypes.create_string_buffer(8)
        self._entry = RingEntry(0, _TOKEN, _PAYLOAD_BYTES, set())
        n_bytes = _PAYLOAD_AT + _PAYLOAD_BYTES
        self._memory = memoryview((ctypes.c_char * n_bytes).from_address(self._entry.address)).cast("B")
        self._answering = core(cast(FuseRing, self._ring), Turn(), _none_later)
        self._answering.add(_TOKEN, self._entry.address, 0)

    def asked(self, opcode: Opcode, own: bytes = b"", names: bytes = b"", nodeid: int = 1) -> FuseReply | None:
        """What it answers; None: it leaves that to Python."""
        unique, memory = next(self._numbers), self._memory
        size = _HEAD.size + len(own) + len(names)
        memory[: _HEAD.size] = _HEAD.pack(size, opcode, unique, nodeid, 0, 0, os.getpid(), 0)
        memory[_OWN_AT : _OWN_AT + len(own)] = own
        memory[_ENTRY_AT : _SIZE_AT + 4] = struct.pack("=QQI", 0, unique, len(names))
        memory[_PAYLOAD_AT : _PAYLOAD_AT + len(names)] = names
        self._ring.submit(READ, self._nothing, _TOKEN, address=ctypes.addressof(self._buffer), length=8)
        found = self._answering.enter(1, inf) or self._answering.enter(
            1, inf
        )  # at once if the tables were taken from it
        ((token, result),) = found
        assert token == _TOKEN
        if not result:
            return None
        assert result == -errno.EOPNOTSUPP, "the commit is refused"
        size, error, answered = _ANSWER.unpack_from(memory)
        assert answered == unique
        return FuseReply(unique, -error, bytes(memory[_PAYLOAD_AT : _PAYLOAD_AT + size - _ANSWER.size]))


def _none_later(*_asked: object) -> None:
    pytest.fail("it is answered in steps")


@contextmanager
def asked_core(*, is_shared: bool) -> Iterator[tuple[CoreAsked, FakeKernel, Vfs, Path]]:
    """A core, the Python code that answers what it does not, what both work on, and the directory below."""
    with core_threads(is_shared=is_shared) as (new_thread, kernel, vfs, path):
        yield new_thread(), kernel, vfs, path


@contextmanager
def core_threads(
    below: Path | None = None, *, is_shared: bool = False
) -> Iterator[tuple[Callable[[], CoreAsked], FakeKernel, Vfs, Path]]:
    """What makes the calling thread's part of a core, and what `asked_core` has. below: what the directory lies in"""
    module = load()
    if isinstance(module, str):
        pytest.skip(module)
    mutex = module.TurnsLock()
    with a_real(is_shared=is_shared, mutex=mutex, below=below) as (kernel, vfs, path), ExitStack() as stack:
        device = stack.enter_context(Fd(os.eventfd(0)))
        core = native_core(module, vfs, kernel.requests, device)
        assert core is not None
        yield partial(CoreAsked, core, stack), kernel, vfs, path
