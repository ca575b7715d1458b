"""A vfs without a mount: what the daemon has below pyfuse3, asked directly, and who asks it."""

from __future__ import annotations

from typing import NamedTuple

from fusefs.linux.fd import Fd
from fusefs.mount.places.counters import Counters
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.vfs import Vfs


class Somebody(NamedTuple):
    """A process; linux.caller.Caller says what of it counts."""

    uid: int
    gid: int
    pid: int
    umask: int


def vfs_on(root: Fd, *, max_fds: int, is_shared: bool = False) -> Vfs:
    """The tree below a directory of a local filesystem; `close` must follow."""
    return Vfs(root, TablesLock(), Counters.in_memory(), max_fds=max_fds, is_shared=is_shared)
