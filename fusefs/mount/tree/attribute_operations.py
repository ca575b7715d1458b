"""What is read and changed of a node itself, its content and its extended attributes left out."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from fusefs.linux.capabilities import Capability
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller
from fusefs.linux.statx import look_at, set_times, set_times_to_now
from fusefs.linux.thread_credentials import call_as, in_no_group
from fusefs.mount.native._core import Node
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.open_handles import OpenHandles
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree import setid_bits
from fusefs.mount.tree.act_as import NeededCapability, by_mode, by_owner_alone
from fusefs.mount.tree.lookup_operations import LookupOperations
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.opening import Opening
from fusefs.mount.tree.validity import EntryParam


class Changes(NamedTuple):
    """What setattr is to change; None: left as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


_NOTHING = Changes()
_NOW_NS = 60 * 10**9
"""A time that is no further from now means now: a process that may write to a file may set that anyway."""


@dataclass(eq=False, repr=False)
class AttributeOperations:
    """Those of one mount. To be used with the tables' lock; all methods raise OSError only.

    root  the backing tree's directory, which stays its owner's
    """

    _root: Fd
    _lock: TablesLock
    _cache: DaemonCache
    _handles: OpenHandles
    _access: NodeAccess
    _lookups: LookupOperations
    _opening: Opening
    _setid_bits: setid_bits.SetidBits

    def access(self, nodeid: int, mask: int) -> bool:
        """Whether the daemon's own user may (single-user mounts: it is the caller)."""
        with self._access.hold(self._access.node(nodeid)) as fd:
            return self._lock.call(os.access, fd.path(), mask, effective_ids=True)

    def statfs(self) -> os.statvfs_result:
        """The backing filesystem's numbers."""
        return self._lock.call(os.fstatvfs, self._root)

    def setattr(self, nodeid: int, changes: Changes, fh: int | None, caller: Caller) -> EntryParam:
        """Change attributes, in an order in which none undoes another.

        changes  none: a write is about to come, and the kernel wants what setid_bits.take takes; or a chown without ids
        fh       a handle of it, for its size
        """
        node = self._access.node(nodeid)
        with self._cache.changes(node.source), self._access.hold(node) as fd, ExitStack() as stack:
            # Before anything is changed, as it may have to wait, and be done again.
            size = changes.size
            file = -1 if size is None else self._to_cut(node, fd, fh, caller, stack)
            if changes == _NOTHING:
                self._setid_bits.take(node, fd, caller)
            if changes.uid is not None or changes.gid is not None:
                self._change_owner(node, fd, changes, caller)
            if changes.mode is not None:
                self._change_mode(node, fd, changes, caller)
            if size is not None:
                with setid_bits.kept(self._lock, fd, caller):
                    self._lock.call(call_as, in_no_group(), os.truncate, file, size)
            elif changes.atime_ns is not None or changes.mtime_ns is not None:
                self._change_times(node, fd, changes, caller)
        return self._lookups.known(node)

    def _to_cut(self, node: Node, fd: Fd, fh: int | None, caller: Caller, stack: ExitStack) -> int | bytes:
        """What to truncate: a handle; or the path of what the caller might open for writing, without a lease on it.

        By that path, for it is truncate(2) then, whose times differ from those of ftruncate(2).
        """
        if fh is not None:
            its_node, file = self._handles.opened(fh)
            if its_node is not node:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            return file
        seen = self._lock.call(look_at, fd)
        opened = self._opening.open_as(caller, node, fd, seen, os.O_WRONLY | os.O_CLOEXEC)
        return stack.enter_context(opened).path()

    def _change_owner(self, node: Node, fd: Fd, changes: Changes, caller: Caller) -> None:
        uid, gid = (-1 if one is None else one for one in (changes.uid, changes.gid))
        seen = self._lock.call(look_at, fd)
        given = seen.uid if uid < 0 else uid, seen.gid if gid < 0 else gid
        needs = [NeededCapability(Capability.CHOWN, *owned) for owned in ((seen.uid, seen.gid), given)]
        needs.append(by_owner_alone(seen))  # set-user-ID bits that go
        self._access.as_caller(caller, needs, (node,)).call(os.chown, fd.path(), uid, gid)

    def _change_mode(self, node: Node, fd: Fd, changes: Changes, caller: Caller) -> None:
        """A mode that comes with something else is the kernel's own: bits that go with that."""
        mode = stat.S_IMODE(changes.mode or 0)
        if changes._replace(mode=None) != _NOTHING:
            setid_bits.chmod(self._lock, fd, mode)
            return
        seen = self._lock.call(look_at, fd)
        gid = setid_bits.group_for(seen, caller) if mode & stat.S_ISGID else None
        try:
            self._access.as_caller(caller, (by_owner_alone(seen),), (node,), gid=gid).call(os.chmod, fd.path(), mode)
        except PermissionError:
            if not self._setid_bits.are_taken_by(node, fd, mode):
                raise
            setid_bits.chmod(self._lock, fd, mode)

    def _change_times(self, node: Node, fd: Fd, changes: Changes, caller: Caller) -> None:
        """To its owner's choice; to now for any that may write to it. (Neither engine passes on that now is meant.)"""
        times, seen = (changes.atime_ns, changes.mtime_ns), self._lock.call(look_at, fd)
        try:
            self._access.as_caller(caller, (by_owner_alone(seen),), (node,)).call(set_times, fd, *times)
        except PermissionError:
            if None in times or times[0] != times[1] or abs(time.time_ns() - (times[0] or 0)) > _NOW_NS:
                raise
            self._access.as_caller(caller, (by_mode(seen),), (node,)).call(set_times_to_now, fd)
