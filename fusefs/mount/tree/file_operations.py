"""Requests about nodes and files: the native core does them; what Python has a part in comes before or after.

That is what a slow filesystem's cache learns and forgets, the links to drop folders, and a wait for another process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import REQUEST_HEAD_SIZE, Opcode, Request
from fusefs.mount.native._core import Core, Tables
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.trashd_dir import DropLinks, is_below, user_of


@dataclass(eq=False, repr=False)
class FileOperations:
    """Those of one mount. To be used with the tables' lock; all methods raise OSError only."""

    _lock: TablesLock
    _core: Core
    _nodes: Tables
    _cache: DaemonCache
    _retries: EstaleRetries
    _drops: DropLinks

    def answer(self, request: Request) -> bytes:
        """Do a whole request; the body of its reply. Raises  OSError EINTR, WouldWait: see TablesLock.patiently"""
        _size, opcode, _unique, nodeid, _uid, _gid, pid = wire.read_head(request)
        if opcode in (Opcode.GETATTR, Opcode.STATX):
            return self._stat(request, opcode, nodeid)
        with self._reading(request, opcode):
            reply = self._do(request)
        if opcode == Opcode.OPEN and self._retries:
            self._retries.remove(pid)
        return reply

    def _do(self, request: Request) -> bytes:
        pid = wire.read_head(request)[-1]
        return self._lock.patiently(pid, self._lock.call, self._core.do, request)

    def _stat(self, request: Request, opcode: int, nodeid: int) -> bytes:
        uid = user_of(nodeid)
        if uid is not None:
            seen = self._lock.call(self._drops.look, uid, wire.caller_of(request))
            return wire.attr(seen.ino, seen) if opcode == Opcode.GETATTR else wire.statx(seen.ino, seen)
        with self._cache.looking() as look:
            reply = self._do(request)
            node = self._nodes.get(nodeid)
            is_whole = opcode == Opcode.GETATTR
            if look is not None and is_whole and node is not None and not is_below(self._nodes, node):
                seen = wire.read_attr(reply).attributes_of(node.dev, node.ino, node.btime_ns)
                look.learn_attributes(node.source, seen)
        return reply

    def _reading(self, request: Request, opcode: int) -> AbstractContextManager[object]:
        """What is read has another time of access then. (What is changed, the core has the cache forget.)"""
        if opcode != Opcode.READ or self._cache.metadata.is_idle:
            return nullcontext()
        node, _fd = self._nodes.handle(*wire.HANDLE_IN.unpack_from(request, REQUEST_HEAD_SIZE))
        return self._cache.reads(node.source)
