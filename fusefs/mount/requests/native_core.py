"""The native core of a mount: the parts that it works on."""

from __future__ import annotations

import os

from fusefs.core.fuse_protocol import Opcode
from fusefs.core.latency import QUICK_NS
from fusefs.linux import syscalls
from fusefs.linux.capabilities import at_rest, with_effective
from fusefs.linux.fd import Fd
from fusefs.linux.xattrs import has_getxattrat, is_selinux_enabled
from fusefs.mount.native._core import Core
from fusefs.mount.places.counters import CELL_OF, LAYOUT
from fusefs.mount.requests.failures import errno_of
from fusefs.mount.requests.fuse_requests import FuseRequests
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
    Opcode.READDIRPLUS: "readdir",
}  # fmt: skip
"""What it answers, and where that is counted."""


def native_core(vfs: Vfs, requests: FuseRequests, watch_wake: Fd) -> tuple[Core, bool]:
    """Make the core of a mount; whether it answers requests: none where the filesystem has no file handles.

    watch_wake  an eventfd: see DeviceReaders
    """
    answers = bool(vfs.directories.handle_of(vfs.root))  # a node is known by its handle
    with vfs.lock:
        root_dev = vfs.nodes.root.dev
    nobody = vfs.passthrough.writers_of.of(root_dev, vfs.root, NOBODY)
    core = Core(
        parts=vfs.native_parts() | requests.native_parts() | {
            "fails": errno_of, "EntryParam": EntryParam, "OpenedFile": OpenedFile,
        },
        cells=vfs.stats.cells,
        rests=vfs.stats.rests,
        cell_of={int(opcode): CELL_OF[name] for opcode, name in _OPERATIONS.items()} if answers else {},
        layout=LAYOUT,
        device=requests.device,
        wake_fd=watch_wake,
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
    return core, answers
