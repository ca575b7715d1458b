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
from fusefs.linux.thread_credentials import in_no_group
from fusefs.linux.xattrs import is_selinux_enabled
from fusefs.mount.native._core import Core, Tables
from fusefs.mount.places.counters import CELL_OF, LAYOUT, Counters
from fusefs.mount.tables.tables_lock import TablesLock

_WITHOUT_HANDLES = 1 << 30
"""As in core.h."""
OPERATIONS = {
    Opcode.LOOKUP: "lookup", Opcode.FORGET: "forget", Opcode.BATCH_FORGET: "forget", Opcode.READLINK: "readlink",
    Opcode.GETATTR: "getattr", Opcode.STATX: "statx", Opcode.SETATTR: "setattr", Opcode.ACCESS: "access",
    Opcode.SYMLINK: "symlink", Opcode.MKNOD: "mknod", Opcode.MKDIR: "mkdir", Opcode.CREATE: "create",
    Opcode.TMPFILE: "tmpfile", Opcode.LINK: "link", Opcode.UNLINK: "unlink", Opcode.RMDIR: "rmdir",
    Opcode.RENAME: "rename", Opcode.RENAME2: "rename", Opcode.OPEN: "open", Opcode.READ: "read", Opcode.WRITE: "write",
    Opcode.LSEEK: "lseek", Opcode.FALLOCATE: "fallocate", Opcode.COPY_FILE_RANGE: "copy_file_range",
    Opcode.COPY_FILE_RANGE_64: "copy_file_range", Opcode.FLUSH: "flush", Opcode.FSYNC: "fsync",
    Opcode.RELEASE: "release", Opcode.STATFS: "statfs", Opcode.SETXATTR: "setxattr", Opcode.GETXATTR: "getxattr",
    Opcode.LISTXATTR: "listxattr", Opcode.REMOVEXATTR: "removexattr", Opcode.OPENDIR: "opendir",
    Opcode.READDIRPLUS: "readdir", Opcode.FSYNCDIR: "fsyncdir", Opcode.RELEASEDIR: "releasedir",
}  # fmt: skip
"""What it does, and Python too; and where that is counted."""

_log = logging.getLogger(__name__)


def make_core(
    lock: TablesLock,
    nodes: Tables,
    stats: Counters,
    calls: dict[str, object],
    *,
    mount_fd: int,
    has_handles: bool,
    asks: bool,
    is_shared: bool,
    is_flushed: bool,
    shows_xattrs: bool,
    is_for_all: bool,
    hides_trash: bool,
    lifetime_s: float,
) -> Core:
    """Make it.

    calls         what it calls when it has let the tables go
    mount_fd      that file handles are opened with, or -1
    asks          another machine, or a daemon, if a statx takes one
    is_flushed    the backing filesystem may tell of a failed write as late as at a close
    shows_xattrs  there are extended attributes
    is_for_all    the filesystem has the same of them for every user
    """
    with lock:
        root_dev = nodes.root.dev
    return Core(
        parts={
            "lock": lock, "mutex_of": lock.mutex, "counters": stats, "nodes": nodes, "latency": lock.latency,
            "took": lock.took, "fails": errno_of,
        } | calls,
        cells=stats.cells,
        rests=stats.rests,
        cell_of={int(opcode): CELL_OF[name] for opcode, name in OPERATIONS.items()},
        layout=LAYOUT,
        mount_fd=mount_fd,
        root_dev=root_dev,
        statx_flags=(0 if asks else syscalls.AT_STATX_DONT_SYNC) | (0 if has_handles else _WITHOUT_HANDLES),
        is_shared=is_shared,
        is_flushed=is_flushed,
        shows_xattrs=shows_xattrs,
        is_for_all=is_for_all,
        hides_labels=not is_selinux_enabled(),
        acts_as_others=os.geteuid() == 0,
        hides_trash=hides_trash,
        lifetime_s=lifetime_s,
        quick_ns=QUICK_NS,
        nobody_gid=in_no_group().gid,
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
