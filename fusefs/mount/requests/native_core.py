"""The native core of a mount: the parts that it works on."""

from __future__ import annotations

import os

from fusefs.core.fuse_protocol import Opcode
from fusefs.core.latency import QUICK_NS
from fusefs.linux import syscalls
from fusefs.linux.capabilities import at_rest, with_effective
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_ring import FuseRing
from fusefs.linux.xattrs import has_getxattrat, is_selinux_enabled
from fusefs.mount.native._core import Core, CoreDevice, CoreRing
from fusefs.mount.places.counters import CELL_OF, LAYOUT
from fusefs.mount.requests.failures import errno_of
from fusefs.mount.requests.fuse_requests import FuseRequests, RequestReader
from fusefs.mount.requests.ring_servers import Later
from fusefs.mount.tree.act_as import NOBODY
from fusefs.mount.tree.opening import OpenedFile
from fusefs.mount.tree.validity import EntryParam
from fusefs.mount.tree.vfs import Vfs

_OPERATIONS = {
    Opcode.LOOKUP: "lookup", Opcode.FORGET: "forget", Opcode.BATCH_FORGET: "forget",
    Opcode.GETATTR: "getattr", Opcode.SETATTR: "setattr",
    Opcode.MKDIR: "mkdir", Opcode.UNLINK: "unlink",
    Opcode.RMDIR: "rmdir", Opcode.RENAME: "rename", Opcode.RENAME2: "rename", Opcode.OPEN: "open",
    Opcode.RELEASE: "release", Opcode.GETXATTR: "getxattr", Opcode.LISTXATTR: "listxattr",
    Opcode.CREATE: "create",
    Opcode.OPENDIR: "opendir", Opcode.READDIRPLUS: "readdir", Opcode.FSYNCDIR: "fsyncdir",
    Opcode.RELEASEDIR: "releasedir",
}  # fmt: skip
"""What it answers, and where that is counted."""
_OF_DIRECTORIES = ("opendir", "readdir", "fsyncdir", "releasedir")
_NO_REQUESTS = {"requests": None, "numbered": None}


def native_core(vfs: Vfs, requests: FuseRequests | None, wake: int) -> NativeCore:
    """What reads a mount's requests, and answers the commonest: listings alone where there are no file handles.

    requests  None: others read them
    wake      an eventfd: see HeldUpWatch
    """
    answers = bool(vfs.directories.handle_of(vfs.root))  # a node is known by its handle
    operations = {opcode: name for opcode, name in _OPERATIONS.items() if answers or name in _OF_DIRECTORIES}
    with vfs.lock:
        root_dev = vfs.nodes.root.dev
    nobody = vfs.passthrough.writers_of.of(root_dev, vfs.root, NOBODY)
    core = Core(
        parts=vfs.native_parts() | (_NO_REQUESTS if requests is None else requests.native_parts()) | {
            "fails": errno_of, "EntryParam": EntryParam, "OpenedFile": OpenedFile,
        },
        cells=vfs.stats.cells,
        rests=vfs.stats.rests,
        cell_of={int(opcode): CELL_OF[name] for opcode, name in operations.items()},
        layout=LAYOUT,
        device=-1 if requests is None else requests.device,
        wake_fd=wake,
        root_fd=vfs.root,
        root_dev=root_dev,
        statx_flags=0 if vfs.reader.asks else syscalls.AT_STATX_DONT_SYNC,
        is_shared=vfs.reader.is_shared,
        tells_xattrs=vfs.xattrs.are_told_alike and has_getxattrat(),
        hides_labels=not is_selinux_enabled(),
        acts_as_others=os.geteuid() == 0,
        hides_trash=not vfs.listings.shows_trash,
        lifetime_s=vfs.cache.lifetime_s,
        quick_ns=QUICK_NS,
        nobody_uid=nobody.uid,
        nobody_gid=nobody.gid,
        at_rest=at_rest(),
        no_capabilities=with_effective(0),
    )  # fmt: skip

    if answers:
        vfs.references.forget_by(core.forget)
    vfs.listings.do = core.do
    return NativeCore(core, requests, answers=answers)


class NativeCore:
    """What reads the requests of one mount and answers the commonest, for each thread."""

    def __init__(self, core: Core, requests: FuseRequests | None, *, answers: bool) -> None:
        """answers: else it leaves all of them to Python"""
        self.core, self._requests = core, requests
        self.answers = answers

    def for_ring(self, ring: FuseRing, later: Later) -> CoreRing:
        """For a thread's ring. later: answers what takes several steps"""
        return CoreRing(self.core, ring, later, ring.fileno(), ring.layout())

    def for_device(self, rest_ms: int, reader: RequestReader, wake: Fd) -> CoreDevice:
        """For a thread that reads /dev/fuse.

        rest_ms  how long what has come may wait: beside a ring no client waits for it
        wake     ends its waiting when it can be read
        """
        requests = self._requests
        assert requests is not None
        return CoreDevice(self.core, requests.answer_later, requests.lose_answer, reader.to, int(wake), rest_ms)
