"""Requests about names: the native core does them; what Python has a part in comes before or after.

That is what a slow filesystem's cache learns, the link to the caller's drop folder, what is moved into a drop folder,
and what is found by a process that was sent ESTALE.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import REQUEST_HEAD_SIZE, Opcode, Request
from fusefs.core.nodeids import ROOT, TOP, source_key
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import NO_NOREPLACE
from fusefs.linux.mountinfo import TOP as TOP_NAME
from fusefs.linux.statx import TO_PEEK, look_at, peek_at
from fusefs.linux.syscalls import RENAME_NOREPLACE
from fusefs.mount.native._core import Core, Node, Tables
from fusefs.mount.tables.daemon_cache import CacheFill, DaemonCache, NameIn
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.prefetch import Prefetch
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.act_as import RequestCaller
from fusefs.mount.tree.drop_adoption import DropAdoption
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.trashd_dir import DropLinks, StoredNodes, is_drop, is_drop_folder, user_of
from fusefs.mount.tree.validity import AttrTimeouts, NameValidity


@dataclass(eq=False, repr=False)
class NameOperations:
    """Those of one mount. To be used with the tables' lock; all methods raise OSError only."""

    _lock: TablesLock
    _core: Core
    _nodes: Tables
    _cache: DaemonCache
    _directories: DirectoryFds
    _retries: EstaleRetries
    _prefetch: Prefetch
    _validity: NameValidity
    _timeouts: AttrTimeouts
    _stored: StoredNodes
    _drops: DropLinks
    _access: NodeAccess
    adoption: DropAdoption

    def answer(self, request: Request) -> bytes:
        """Do a whole request; the body of its reply."""
        _size, opcode, _unique, nodeid, uid, gid, pid = wire.read_head(request)
        caller = RequestCaller()
        caller.uid, caller.gid, caller.pid = uid, gid, pid
        match opcode:
            case Opcode.LOOKUP:
                return self._lookup(request, nodeid, caller)
            case Opcode.READLINK:
                return self._readlink(request, nodeid, caller)
            case Opcode.RENAME | Opcode.RENAME2:
                return self._rename(request, opcode, nodeid, caller)
            case Opcode.UNLINK | Opcode.RMDIR:
                return self._do(request)
        return self._do_learning(request, nodeid)

    def _do(self, request: Request, held: int = -1) -> bytes:
        return self._lock.call(self._core.do, request, held)

    def _do_learning(self, request: Request, parent: int, held: int = -1) -> bytes:
        """Do what is replied to with the entry of a name, from which a slow filesystem's cache learns."""
        with self._cache.looking() as look:
            reply = self._do(request, held)
            directory = self._nodes.get(parent)
            if look is not None and directory is not None:
                self._learn(request, directory, reply, look)
        return reply

    def _learn(self, request: Request, directory: Node, reply: bytes, look: CacheFill) -> None:
        entry = wire.read_entry(reply)
        if not entry.name_s:
            return  # it may not be believed
        name = wire.name_of_entry(request)
        node = self._nodes.get(entry.nodeid) if entry.nodeid else None
        if node is not None:
            look.learn(directory, name, node.source, entry.attributes_of(node.dev, node.ino, node.btime_ns))
        elif not entry.nodeid:
            look.learn_missing(directory, name)

    # What names mean.

    def _lookup(self, request: Request, parent: int, caller: RequestCaller) -> bytes:
        (name,) = wire.names(request)
        directory, fd = self._access.directory(parent)
        if is_drop(directory, name):
            seen = self._lock.call(self._drops.look, caller.uid, caller)
            return wire.entry(seen.ino, seen.ino, seen, 0, 0)
        if parent == ROOT and name == TOP_NAME and self._nodes.root.nodeid == TOP:  # asked by mount/life/root_inode.py
            self._nodes.root.nlookup += 1
            return wire.entry(TOP, TOP, self._lock.call(look_at, fd), 0, 0)
        if self._retries:
            found = self._look_again(request, directory, fd, name, caller) or self._find_moved(
                request, directory, name, caller
            )
            if found is not None:
                return found
        if self._lock.is_slow and not self._validity.is_fickle(directory, fd, name):
            self._prefetch.asked(directory, fd)
        return self._do_learning(request, parent)

    def _look_again(
        self, request: Request, directory: Node, dir_fd: Fd, name: bytes, caller: RequestCaller
    ) -> bytes | None:
        """What a name is to a client that was sent ESTALE, and has it held; None: it was not. Raises  OSError ENOENT"""
        fd = self._retries.open(caller.pid, dir_fd, name)
        if fd is None:
            return None
        with closed_on_error(fd):
            reply = self._do_learning(request, directory.nodeid, fd)
        node = self._nodes.get(wire.read_entry(reply).nodeid)
        if node is None:
            fd.close()
        else:
            self._retries.hold(caller.pid, node, fd)
        return reply

    def _find_moved(self, request: Request, directory: Node, name: bytes, caller: RequestCaller) -> bytes | None:
        """What a client has just moved to a name that does not mean it any more; None: nothing, or it has looked."""
        fd = self._retries.moved_to(caller.pid, (directory, name))
        if fd is None:
            return None
        with fd:
            reply = self._do(request, fd)
        node = self._nodes.get(wire.read_entry(reply).nodeid)
        if node is not None:
            self._nodes.take_away(node, directory, name)
        return reply

    def _readlink(self, request: Request, nodeid: int, caller: RequestCaller) -> bytes:
        uid = user_of(nodeid)
        if uid is not None:
            return self._lock.call(self._drops.readlink, uid, caller)
        with self._cache.looking() as look:
            target = self._do(request)
            node = self._nodes.get(nodeid)
            if look is not None and node is not None:
                look.learn_target(node.source, target)
        return target

    # Names that change.

    def _rename(self, request: Request, opcode: int, old_parent: int, caller: RequestCaller) -> bytes:
        """What is moved into a drop folder is an orphan at once.

        Where that can't be nothing is replaced there (EEXIST): the reaper is to make an orphan of each thing.
        """
        numbers = wire.RENAME_IN if opcode == Opcode.RENAME else wire.RENAME2_IN
        new_parent, *flags = numbers.unpack_from(request, REQUEST_HEAD_SIZE)
        directory = self._nodes.get(new_parent)
        if sum(flags) not in (0, RENAME_NOREPLACE) or directory is None or not is_drop_folder(self._nodes, directory):
            return self._do(request)
        old, new = wire.names(request, numbers, 2)
        if self._drop((old_parent, old), (new_parent, new), caller):
            return b""
        return self._rename_free(request, new_parent, (old, new))

    def _rename_free(self, request: Request, new_parent: int, names: tuple[bytes, bytes]) -> bytes:
        """A rename onto a free name, as Kernel.rename_free."""
        free = wire.RENAME2_IN.pack(new_parent, RENAME_NOREPLACE) + b"".join(name + b"\0" for name in names)
        try:
            return self._do(wire.like(request, Opcode.RENAME2, free))
        except OSError as error:
            if error.errno not in NO_NOREPLACE:
                raise
        try:
            self._lock.call(look_at, self._access.directory(new_parent)[1], names[1])
        except FileNotFoundError:
            return self._do(request)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), names[1])

    def _drop(self, old: tuple[int, bytes], new: tuple[int, bytes], caller: RequestCaller) -> bool:
        """Make an orphan of what is moved into a drop folder; False: it is not moved yet, to wherever that is."""
        old_directory, _fd = self._access.changeable(*old)
        new_directory, _fd = self._access.changeable(*new)
        # Two directories at a time: neither must push out the other.
        with self._directories.fd_of(old_directory) as old_fd, self._directories.fd_of(new_directory) as new_fd:
            return self._adopt(old_fd, (old_directory, old[1]), new_fd, (new_directory, new[1]), caller)

    def _adopt(self, old_fd: Fd, old: NameIn, new_fd: Fd, new: NameIn, caller: RequestCaller) -> bool:
        """The kernel gives it the new name, which expires soon after (forget_stored.py)."""
        with Fd(self._lock.call(os.open, old[1], TO_PEEK, dir_fd=old_fd)) as fd:
            seen, handle = self._lock.call(peek_at, fd)
        source = source_key(seen, self._directories.lasting(handle))
        with self._cache.changes(source, names=[old, new]):
            item = self.adoption.take_in(old_fd, old, seen, new_fd, new[0], caller)
        if item is None:
            return False
        self._timeouts.changed(old[0])
        self._timeouts.changed(new[0])
        node = self._nodes.find(source)
        if node is not None:
            self._nodes.move(node, old, new)
            self._timeouts.moved(node)
            self._stored.note(node, is_moved=True)
            self._nodes.take_away(node, *new)
            self._stored.expire(*new, node)
        self._retries.moved(caller.pid, new, source, item)
        return True
