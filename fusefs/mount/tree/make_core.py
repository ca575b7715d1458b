"""The native core of a mount: the parts that it works on, and calls (native/core.h)."""

from __future__ import annotations

import errno
import logging
import os
import struct

from fusefs.core.fuse_protocol import Opcode
from fusefs.core.latency import QUICK_NS
from fusefs.linux import syscalls
from fusefs.linux.capabilities import at_rest, with_effective
from fusefs.linux.fd import Fd
from fusefs.linux.xattrs import has_getxattrat, is_selinux_enabled
from fusefs.mount.native._core import Core, Tables
from fusefs.mount.places.counters import CELL_OF, LAYOUT, Counters
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.act_as import NOBODY
from fusefs.mount.tree.passthrough import Passthrough

_WITHOUT_HANDLES = 1 << 30
"""As in core.h."""
_OPERATIONS = {
    Opcode.LOOKUP: "lookup", Opcode.FORGET: "forget", Opcode.BATCH_FORGET: "forget", Opcode.GETATTR: "getattr",
    Opcode.SETATTR: "setattr", Opcode.READLINK: "readlink", Opcode.SYMLINK: "symlink", Opcode.MKNOD: "mknod",
    Opcode.MKDIR: "mkdir", Opcode.UNLINK: "unlink", Opcode.RMDIR: "rmdir", Opcode.RENAME: "rename",
    Opcode.RENAME2: "rename", Opcode.LINK: "link", Opcode.OPEN: "open", Opcode.RELEASE: "release",
    Opcode.GETXATTR: "getxattr", Opcode.LISTXATTR: "listxattr", Opcode.CREATE: "create", Opcode.READDIRPLUS: "readdir",
    Opcode.TMPFILE: "tmpfile",
}  # fmt: skip
"""What it does, and where that is counted."""

_log = logging.getLogger(__name__)


def make_core(
    root: Fd,
    lock: TablesLock,
    nodes: Tables,
    stats: Counters,
    directories: DirectoryFds,
    passthrough: Passthrough,
    calls: dict[str, object],
    *,
    asks: bool,
    is_shared: bool,
    tells_xattrs: bool,
    hides_trash: bool,
    lifetime_s: float,
) -> Core:
    """Make it.

    calls  what it calls when it has let the tables go
    asks   another machine, or a daemon, if a statx takes one
    """
    with lock:
        root_dev = nodes.root.dev
    nobody = passthrough.writers_of.of(root_dev, root, NOBODY)
    return Core(
        parts={
            "lock": lock, "mutex_of": lock.mutex, "counters": stats, "nodes": nodes, "latency": lock.latency,
            "took": lock.took, "fails": errno_of,
        } | calls,
        cells=stats.cells,
        rests=stats.rests,
        cell_of={int(opcode): CELL_OF[name] for opcode, name in _OPERATIONS.items()},
        layout=LAYOUT,
        mount_fd=-1 if directories.mount is None else directories.mount,
        root_dev=root_dev,
        statx_flags=(0 if asks else syscalls.AT_STATX_DONT_SYNC) | (0 if directories.has_handles else _WITHOUT_HANDLES),
        is_shared=is_shared,
        tells_xattrs=tells_xattrs and has_getxattrat(),
        hides_labels=not is_selinux_enabled(),
        acts_as_others=os.geteuid() == 0,
        hides_trash=hides_trash,
        lifetime_s=lifetime_s,
        quick_ns=QUICK_NS,
        nobody_uid=nobody.uid,
        nobody_gid=nobody.gid,
        at_rest=at_rest(),
        no_capabilities=with_effective(0),
    )  # fmt: skip


def errno_of(error: Exception, failed: object) -> int:
    """The errno for the client; what is no OSError is a fault of ours, and in the log."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if isinstance(error, (OverflowError, struct.error)):  # a number of the client's that no system call takes
        return errno.EINVAL
    _log.exception("%s failed", failed)
    return errno.EIO
