"""Requests about nodes and files: the native core does them; what Python has a part in comes before or after.

That is what a slow filesystem's cache learns and forgets, the links to drop folders, and a wait for another process.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import REQUEST_HEAD_SIZE, Opcode, Request
from fusefs.core.nodeids import SourceKey
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
        with self._forgetting(request, opcode, nodeid):
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

    def _forgetting(self, request: Request, opcode: int, nodeid: int) -> AbstractContextManager[object]:
        """Have forgotten what a slow filesystem's cache has of what a request changes."""
        if self._cache.metadata.is_idle:
            return nullcontext()
        body = REQUEST_HEAD_SIZE
        match opcode:
            case Opcode.READ:
                return self._cache.reads(self._of_handle(*wire.HANDLE_IN.unpack_from(request, body)))
            case Opcode.WRITE | Opcode.FALLOCATE:
                return self._cache.changes(self._of_handle(*wire.HANDLE_IN.unpack_from(request, body)))
            case Opcode.COPY_FILE_RANGE | Opcode.COPY_FILE_RANGE_64:
                fh, _offset, to_fh, _to_offset, _n = wire.COPY_IN.unpack_from(request, body)
                return self._cache.changes(self._of_handle(fh), self._of_handle(to_fh))
            case Opcode.OPEN if not wire.OPEN_IN.unpack_from(request, body)[0] & os.O_TRUNC:
                return nullcontext()
            case Opcode.OPEN | Opcode.SETATTR:
                node = self._nodes.get(nodeid)
                return nullcontext() if node is None else self._cache.changes(node.source)
        return nullcontext()

    def _of_handle(self, fh: int) -> SourceKey:
        return self._nodes.handle(fh)[0].source
