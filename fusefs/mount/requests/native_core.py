"""The native core of a mount, for the threads that read its requests."""

from __future__ import annotations

from fusefs.linux.fd import Fd
from fusefs.linux.fuse_ring import FuseRing
from fusefs.mount.native._core import Core, CoreDevice, CoreRing
from fusefs.mount.requests.fuse_requests import FuseRequests, RequestReader
from fusefs.mount.requests.ring_servers import Later
from fusefs.mount.tree.vfs import Vfs


def native_core(vfs: Vfs, requests: FuseRequests, wake: Fd) -> NativeCore:
    """What reads a mount's requests, and answers them. wake: an eventfd: see HeldUpWatch"""
    vfs.core.connect(requests.device, wake, requests.number)
    return NativeCore(vfs.core, requests)


class NativeCore:
    """What reads the requests of one mount and answers them, for each thread."""

    def __init__(self, core: Core, requests: FuseRequests) -> None:
        self.core, self._requests = core, requests

    def for_ring(self, ring: FuseRing, later: Later) -> CoreRing:
        """For a thread's ring. later: answers what takes several steps"""
        return CoreRing(self.core, ring, later, ring.fileno(), ring.layout())

    def for_device(self, rest_ms: int, reader: RequestReader, wake: Fd) -> CoreDevice:
        """For a thread that reads /dev/fuse.

        rest_ms  how long what has come may wait: beside a ring no client waits for it
        wake     ends its waiting when it can be read
        """
        requests = self._requests
        return CoreDevice(self.core, requests.answer_later, requests.lose_answer, reader.to, int(wake), rest_ms)
