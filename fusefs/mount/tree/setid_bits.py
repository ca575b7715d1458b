"""Set-user-ID and set-group-ID bits: taken away, and kept, as for the caller and not as for the daemon."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fusefs.core.inode_attributes import Attributes
from fusefs.linux.capabilities import Capability
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller, is_capable, keeps_group
from fusefs.linux.statx import look_at
from fusefs.linux.thread_credentials import call_as, in_group, in_no_group
from fusefs.mount.native._core import Node
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.act_as import by_owner_alone
from fusefs.mount.tree.node_access import NodeAccess


@dataclass(eq=False, repr=False)
class SetidBits:
    """Those of one mount's files. To be used with the tables' lock."""

    _lock: TablesLock
    _access: NodeAccess

    def take(self, node: Node, fd: Fd, caller: Caller) -> None:
        """Set-user-ID and set-group-ID go, as for any chown; before the write, or the kernel would go by them.

        Raises  OSError EPERM for a caller that is not the owner, unless it may be writing
        Source  setattr_should_drop_suidgid in the kernel's fs/attr.c; it has taken capabilities away itself
        """
        seen = self._lock.call(look_at, fd)
        if seen.is_directory():
            return
        is_group_kept = not seen.mode & stat.S_IXGRP and keeps_group(caller, seen.uid, seen.gid)
        if not seen.mode & (stat.S_ISUID if is_group_kept else stat.S_ISUID | stat.S_ISGID):
            return
        if not node.has_writer:
            gid = seen.gid if is_group_kept else None
            self._access.as_caller(caller, (by_owner_alone(seen),), (node,), gid=gid).call(os.chown, fd.path(), -1, -1)
            return
        who = in_group(seen.gid) if is_group_kept else in_no_group()
        with suppress(PermissionError):  # in a user's own mount, to another's file: the write itself takes them away
            self._lock.call(call_as, who, os.chown, fd.path(), -1, -1)

    def are_taken_by(self, node: Node, fd: Fd, mode: int) -> bool:
        """Whether that mode takes such bits away alone, and a process may be writing that is not the owner's.

        In plain mode the kernel asks for that, as libfuse does not say that the write does it.
        """
        before = stat.S_IMODE(self._lock.call(look_at, fd).mode)
        return mode | stat.S_ISUID | stat.S_ISGID == before | stat.S_ISUID | stat.S_ISGID and (
            not mode & ~before and node.has_writer
        )


def group_for(seen: Attributes, caller: Caller) -> int:
    """The group to act in so that a file keeps its set-group-ID bit, if the caller may give that; else its own."""
    return seen.gid if keeps_group(caller, seen.uid, seen.gid) else caller.gid


@contextmanager
def kept(lock: TablesLock, fd: Fd, caller: Caller) -> Iterator[None]:
    """What changes a file's content in the block leaves the bits if the caller may keep them: we would take them away.

    The kernel lets no other process change the file's mode meanwhile.
    """
    before = lock.call(look_at, fd).mode
    try:
        yield
    finally:
        if before & (stat.S_ISUID | stat.S_ISGID) and is_capable(caller, Capability.FSETID):
            chmod(lock, fd, before)


def chmod(lock: TablesLock, fd: Fd, mode: int) -> None:
    """As root; below it would be asked whether the daemon is in that group, for its set-group-ID bit."""
    gid = lock.call(look_at, fd).gid
    lock.call(call_as, in_group(gid), os.chmod, fd.path(), stat.S_IMODE(mode))
