"""Requests that the native core is asked without a kernel: by a socket in place of /dev/fuse."""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fusefs.core.fuse_protocol import Opcode
from fusefs.linux.fd import Fd
from fusefs.mount.native._core import Core, CoreDevice
from fusefs.mount.requests.fuse_requests import FuseRequests, SendReply
from fusefs.mount.tree.vfs import Vfs
from tests.support.fake_dev_fuse import FakeKernel, FuseReply, a_real


class _LeftToPython(FuseRequests):
    """Stands in for what replies in Python: it notes the requests that the core leaves to it."""

    def __init__(self, requests: FuseRequests) -> None:
        self.__dict__.update(requests.__dict__)
        self.uniques: list[int] = []

    def answer(self, request: bytes, send: SendReply, patience: int) -> None:
        self.uniques.append(struct.unpack_from("=Q", request, 8)[0])


class CoreClient:
    """What asks a core, and reads requests for it."""

    def __init__(self, core: Core, kernel: FakeKernel, left: _LeftToPython, wake: Fd) -> None:
        self._kernel, self._left = kernel, left
        self._device = CoreDevice(core, wake, 0)

    def request(self, opcode: Opcode, own: bytes = b"", names: bytes = b"", nodeid: int = 1) -> FuseReply | None:
        """Send a request and return the core's reply; None if the core leaves the request to Python."""
        unique = self._kernel.send(opcode, own + names, nodeid, pid=os.getpid())
        self._device.read(False)
        if unique in self._left.uniques:
            return None
        reply = self._kernel.receive_reply()
        assert reply is not None
        assert reply.unique == unique
        return reply


@contextmanager
def open_core(*, is_shared: bool) -> Iterator[tuple[CoreClient, FakeKernel, Vfs, Path]]:
    """Open a client of the core, the Python code that serves the remaining requests, the Vfs of both, and the backing
    directory.
    """
    with core_threads(is_shared=is_shared) as (new_client, kernel, vfs, path):
        yield new_client(), kernel, vfs, path


@contextmanager
def core_threads(
    below: Path | None = None, *, is_shared: bool = False
) -> Iterator[tuple[Callable[[], CoreClient], FakeKernel, Vfs, Path]]:
    """Like `open_core`, with a function that makes a client for the calling thread. below: the directory's parent"""
    with a_real(is_shared=is_shared, below=below) as (kernel, vfs, path), Fd(os.eventfd(0)) as wake:
        left = _LeftToPython(kernel.requests)
        vfs.core.connect(left.device, wake, left)
        yield partial(CoreClient, vfs.core, kernel, left, wake), kernel, vfs, path
