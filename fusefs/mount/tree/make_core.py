"""The native core of a mount: what it works on, and what it calls (native/core.h)."""

from __future__ import annotations

import errno
import logging
import struct
from array import array
from types import SimpleNamespace
from typing import Final

from fusefs.core.fuse_protocol import Opcode
from fusefs.core.latency import QUICK_NS
from fusefs.linux import syscalls
from fusefs.linux.capabilities import at_rest, with_effective
from fusefs.linux.thread_credentials import in_no_group
from fusefs.linux.xattrs import is_selinux_enabled
from fusefs.mount.native._core import Core, Tables
from fusefs.mount.places.counters import CELL_OF, LAYOUT, Counters
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.tables_lock import TablesLock

_WITHOUT_HANDLES = 1 << 30
"""As in core.h."""
_COUNTED_AS = {
    Opcode.BATCH_FORGET: "forget", Opcode.RENAME2: "rename", Opcode.COPY_FILE_RANGE_64: "copy_file_range",
    Opcode.READDIRPLUS: "readdir",
}  # fmt: skip
CELL_OF_OPCODE: Final[dict[int, int]] = {
    opcode: CELL_OF[name] for opcode in Opcode if (name := _COUNTED_AS.get(opcode, opcode.name.lower())) in CELL_OF
}
"""Where the requests are counted that the mount replies to."""
_N_OPCODES = 64
"""As in core.h."""

_log = logging.getLogger(__name__)


def make_core(
    lock: TablesLock,
    nodes: Tables,
    stats: Counters,
    directories: DirectoryFds,
    calls: dict[str, object],
    *,
    is_flushed: bool,
    shows_xattrs: bool,
    is_for_all: bool,
    hides_trash: bool,
    lifetime_s: float,
) -> Core:
    """Make it.

    calls         what it calls when it has let the tables go
    is_flushed    the backing filesystem may tell of a failed write as late as at a close
    shows_xattrs  there are extended attributes
    is_for_all    the filesystem has the same of them for every user
    """
    statx_flags = 0 if lock.submounts.asks else syscalls.AT_STATX_DONT_SYNC
    return Core(
        calls=SimpleNamespace(**calls, took=lock.took, errno_of=errno_of, changed=stats.changed),
        mutex=lock.mutex,
        nodes=nodes,
        cells=stats.cells,
        rests=stats.rests,
        cell_of=array("I", (CELL_OF_OPCODE.get(opcode, 0) for opcode in range(_N_OPCODES))).tobytes(),
        layout=LAYOUT,
        mount_fd=-1 if directories.mount is None else directories.mount,
        statx_flags=statx_flags | (0 if directories.has_handles else _WITHOUT_HANDLES),
        is_measured=lock.latency is not None,
        is_flushed=is_flushed,
        shows_xattrs=shows_xattrs,
        is_for_all=is_for_all,
        hides_labels=not is_selinux_enabled(),
        hides_trash=hides_trash,
        lifetime_s=lifetime_s,
        quick_ns=QUICK_NS,
        nobody_gid=in_no_group().gid,
        at_rest=at_rest(),
        no_capabilities=with_effective(0),
    )


def errno_of(error: Exception, failed: object) -> int:
    """The errno for the client; what is no OSError is a fault of ours, and in the log."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if isinstance(error, (OverflowError, struct.error)):  # a number of the client's that no system call takes
        return errno.EINVAL
    _log.exception("%s failed", failed)
    return errno.EIO
