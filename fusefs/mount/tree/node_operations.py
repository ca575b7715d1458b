"""Requests about names, nodes and files. The native core does them; this is what Python adds before or after.

Python maintains the cache of a slow filesystem, and answers for the link to the caller's drop folder. It makes orphans
of entries that are moved into a drop folder, serves retries of processes that got ESTALE, and waits for other
processes.
"""

from __future__ import annotations

import errno
import os
import time
from typing import NoReturn

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import NAMES, REQUEST_HEAD_SIZE, CallerIds, Opcode, Request
from fusefs.core.metadata_cache import ROOT, TOP, Attributes, source_key
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import NO_NOREPLACE, Kernel
from fusefs.linux.mountinfo import TOP as TOP_NAME
from fusefs.linux.statx import TO_PEEK, look_at, peek_at
from fusefs.linux.syscalls import RENAME_NOREPLACE
from fusefs.mount.native._core import Node
from fusefs.mount.tables.daemon_cache import CacheFill, NameIn
from fusefs.mount.tree.drop_adoption import DropAdoption
from fusefs.mount.tree.kernel_timeouts import EntryParam, shown_number
from fusefs.mount.tree.mount_state import MountState
from fusefs.mount.tree.trashd_dir import DropLinks, is_below, is_drop, is_drop_folder, user_of


class NodeOperations:
    """Node operations of one mount. Callers hold the tables lock; all methods raise OSError only."""

    def __init__(self, mount: MountState) -> None:
        self._mount = mount
        self._lock, self._nodes, self._cache, self._retries = mount.lock, mount.nodes, mount.cache, mount.retries
        self._drops = DropLinks(Kernel(), mount.root)
        self.adoption = DropAdoption(mount)

    def answer(self, request: Request) -> bytes:
        """Do a request; return the body of its reply. Raises  OSError EINTR, WouldWait: see TablesLock.patiently"""
        _size, opcode, _unique, nodeid, *ids = wire.read_head(request)
        caller = CallerIds(*ids)
        match opcode:
            case Opcode.LOOKUP:
                return self._lookup(request, nodeid, caller)
            case Opcode.READLINK:
                return self._readlink(request, nodeid, caller)
            case Opcode.RENAME | Opcode.RENAME2:
                return self._rename(request, opcode, nodeid, caller)
            case Opcode.UNLINK | Opcode.RMDIR:
                return self._mount.do(request)
            case Opcode.GETATTR | Opcode.STATX:
                return self._stat(request, opcode, nodeid, caller)
            case Opcode.READ:
                node, _fd = self._nodes.handle(*wire.HANDLE_IN.unpack_from(request, REQUEST_HEAD_SIZE))
                with self._cache.reads(node.source):
                    return self._do_patiently(request, caller)
        if opcode in NAMES:
            return self._do_learning(request, nodeid)
        reply = self._do_patiently(request, caller)
        if opcode == Opcode.OPEN and self._retries:
            self._retries.remove(caller.pid)
        return reply

    def _do_patiently(self, request: Request, caller: CallerIds) -> bytes:
        return self._lock.patiently(caller.pid, self._mount.do, request)

    def _do_learning(self, request: Request, parent: int, held: int = -1) -> bytes:
        """Do a request whose reply begins with an entry, and cache that entry if the filesystem is slow."""
        with self._cache.looking() as look:
            reply = self._mount.do(request, held)
            directory = self._nodes.get(parent)
            if look is not None and directory is not None:
                self._learn(request, directory, reply, look)
        return reply

    def _learn(self, request: Request, directory: Node, reply: bytes, look: CacheFill) -> None:
        entry = wire.read_entry(reply)
        if not entry.name_s:
            return  # it may not be cached
        name = wire.name_of_entry(request)
        node = self._nodes.get(entry.nodeid) if entry.nodeid else None
        if node is not None:
            look.learn(directory, name, node.source, entry.attributes_of(node.dev, node.ino, node.btime_ns))
        elif not entry.nodeid:
            look.learn_missing(directory, name)

    def _directory(self, nodeid: int) -> tuple[Node, Fd]:
        """Return a directory and its fd, to be used at once. Raises  OSError ENOENT: it was removed; ESTALE: no such
        node"""
        node = self._nodes.get(nodeid)
        if node is None:
            _fail(errno.ESTALE)
        if node.last is not None:
            _fail(errno.ENOENT)
        return node, self._mount.fd_of(node)

    # Replies from the cache of a slow filesystem.

    def recall(self, request: Request) -> bytes | None:
        """Return the body of a reply from the cache; None if the filesystem has to be asked."""
        _size, opcode, _unique, nodeid, _uid, _gid, pid = wire.read_head(request)
        match opcode:
            case Opcode.LOOKUP:
                (name,) = wire.names(request)
                known = self._recall_name(nodeid, name, pid)
            case Opcode.GETATTR | Opcode.STATX:
                known = self._recall_attributes(nodeid)
            case Opcode.READLINK:
                node = self._nodes.get(nodeid)
                return None if node is None else self._cache.target(node)
            case _:
                return None
        if known is None or not known.nodeid:
            return None if known is None else wire.missing(known.timeout_s)
        number, (name_s, attr_s) = shown_number(known), self._mount.timeouts.lifetimes(known)
        if opcode == Opcode.LOOKUP:
            return wire.entry(known.nodeid, number, known.attributes, name_s, attr_s)
        return (wire.attr if opcode == Opcode.GETATTR else wire.statx)(number, known.attributes, attr_s)

    def _recall_name(self, parent: int, name: bytes, pid: int) -> EntryParam | None:
        """Return the cached entry of a name, and count the kernel's reference to its node. pid: of the client's
        thread"""
        directory = self._nodes.get(parent)
        if directory is None or directory.last is not None or pid in self._retries:
            return None
        known = self._mount.cached_name(directory, name)
        if known is not None and known.nodeid:
            self._mount.prefetch.asked(directory, self._nodes.directory_fd(directory))
            node = self._nodes.get(known.nodeid)
            assert node is not None, "it was just found"
            node.nlookup += 1
            node.is_told = True
            node.told_until_s = time.monotonic() + known.timeout_s
        return known

    def _recall_attributes(self, nodeid: int) -> EntryParam | None:
        node = self._nodes.get(nodeid)
        if node is None or node.last is not None or is_below(self._nodes, node):
            return None
        attributes = self._cache.attributes(node.source)
        if attributes is None:
            return None
        node.is_told |= not node.is_directory
        return EntryParam(node.nodeid, *attributes)

    # LOOKUP, READLINK and stat.

    def _lookup(self, request: Request, parent: int, caller: CallerIds) -> bytes:
        (name,) = wire.names(request)
        directory, fd = self._directory(parent)
        if is_drop(directory, name):
            seen = self._lock.call(self._drops.look, caller.uid, caller)
            return wire.entry(seen.ino, seen.ino, seen, 0, 0)
        if parent == ROOT and name == TOP_NAME and self._nodes.root.nodeid == TOP:  # for mount/life/root_inode.py
            self._nodes.root.nlookup += 1
            return wire.entry(TOP, TOP, self._lock.call(look_at, fd), 0, 0)
        if self._retries:
            found = self._look_again(request, directory, fd, name, caller) or self._find_moved(
                request, directory, name, caller
            )
            if found is not None:
                return found
        if self._lock.is_slow and not self._mount.is_fickle(directory, fd, name):
            self._mount.prefetch.asked(directory, fd)
        return self._do_learning(request, parent)

    def _look_again(
        self, request: Request, directory: Node, dir_fd: Fd, name: bytes, caller: CallerIds
    ) -> bytes | None:
        """Look up a name for a client that got ESTALE, and hold the inode open for it.

        Returns  the reply; None if this client did not get ESTALE
        Raises   OSError ENOENT
        """
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

    def _find_moved(self, request: Request, directory: Node, name: bytes, caller: CallerIds) -> bytes | None:
        """Look up what this client has just moved to a name in a drop folder, once; None if it moved nothing to that
        name."""
        fd = self._retries.moved_to(caller.pid, (directory, name))
        if fd is None:
            return None
        with fd:
            reply = self._mount.do(request, fd)
        node = self._nodes.get(wire.read_entry(reply).nodeid)
        if node is not None:
            self._nodes.take_away(node, directory, name)
        return reply

    def _readlink(self, request: Request, nodeid: int, caller: CallerIds) -> bytes:
        uid = user_of(nodeid)
        if uid is not None:
            return self._lock.call(self._drops.readlink, uid, caller)
        with self._cache.looking() as look:
            target = self._mount.do(request)
            node = self._nodes.get(nodeid)
            if look is not None and node is not None:
                look.learn_target(node.source, target)
        return target

    def _stat(self, request: Request, opcode: int, nodeid: int, caller: CallerIds) -> bytes:
        uid = user_of(nodeid)
        if uid is not None:
            seen = self._lock.call(self._drops.look, uid, caller)
            return wire.attr(seen.ino, seen) if opcode == Opcode.GETATTR else wire.statx(seen.ino, seen)
        with self._cache.looking() as look:
            reply = self._do_patiently(request, caller)
            node = self._nodes.get(nodeid)
            is_whole = opcode == Opcode.GETATTR
            if look is not None and is_whole and node is not None and not is_below(self._nodes, node):
                seen = wire.read_attr(reply).attributes_of(node.dev, node.ino, node.btime_ns)
                look.learn_attributes(node.source, seen)
        return reply

    # Renames.

    def _rename(self, request: Request, opcode: int, old_parent: int, caller: CallerIds) -> bytes:
        """Rename. An entry that is moved into a drop folder becomes an orphan at once.

        If it can't, the rename is made, but replaces nothing there (EEXIST): the reaper has to make an orphan of each
        entry.
        """
        numbers = wire.RENAME_IN if opcode == Opcode.RENAME else wire.RENAME2_IN
        new_parent, *flags = numbers.unpack_from(request, REQUEST_HEAD_SIZE)
        directory = self._nodes.get(new_parent)
        if sum(flags) not in (0, RENAME_NOREPLACE) or directory is None or not is_drop_folder(self._nodes, directory):
            return self._mount.do(request)
        old, new = wire.names(request, numbers, 2)
        if self._drop((old_parent, old), (new_parent, new), caller):
            return b""
        return self._rename_free(request, new_parent, (old, new))

    def _rename_free(self, request: Request, new_parent: int, names: tuple[bytes, bytes]) -> bytes:
        """Rename without replacing anything, as Kernel.rename_free does."""
        free = wire.RENAME2_IN.pack(new_parent, RENAME_NOREPLACE) + b"".join(name + b"\0" for name in names)
        try:
            return self._mount.do(wire.like(request, Opcode.RENAME2, free))
        except OSError as error:
            if error.errno not in NO_NOREPLACE:
                raise
        try:
            self._lock.call(look_at, self._directory(new_parent)[1], names[1])
        except FileNotFoundError:
            return self._mount.do(request)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), names[1])

    def _drop(self, old: tuple[int, bytes], new: tuple[int, bytes], caller: CallerIds) -> bool:
        """Make an orphan of an entry that is moved into a drop folder. Returns  False: it could not, and nothing was
        moved

        Raises  OSError EPERM: one of the names is `.trashd/drop`
        """
        (old_directory, _fd), (new_directory, _fd) = self._directory(old[0]), self._directory(new[0])
        if is_drop(old_directory, old[1]) or is_drop(new_directory, new[1]):
            _fail(errno.EPERM)
        # Both directories are held open: opening the second could otherwise close the first.
        with self._mount.fd_of(old_directory) as old_fd, self._mount.fd_of(new_directory) as new_fd:
            return self._adopt(old_fd, (old_directory, old[1]), new_fd, (new_directory, new[1]), caller)

    def _adopt(self, old_fd: Fd, old: NameIn, new_fd: Fd, new: NameIn, caller: CallerIds) -> bool:
        """Adopt the entry and record its new name. The kernel assigns that name, too, and it expires soon
        (forget_stored.py)."""
        seen, handle = self._lock.call(_peek, old_fd, old[1])
        source = source_key(seen, self._mount.lasting(handle))
        with self._cache.changes(source, names=[old, new]):
            item = self.adoption.take_in(old_fd, old, seen, new_fd, new[0], caller)
        if item is None:
            return False
        self._mount.timeouts.changed(old[0])
        self._mount.timeouts.changed(new[0])
        node = self._nodes.find(source)
        if node is not None:
            self._nodes.move(node, old, new)
            self._mount.timeouts.moved(node)
            self._mount.stored.note(node, is_moved=True)
            self._nodes.take_away(node, *new)
            self._mount.stored.expire(*new, node)
        self._retries.moved(caller.pid, new, source, item)
        return True


def _fail(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))


def _peek(dir_fd: Fd, name: bytes) -> tuple[Attributes, bytes]:
    """Return the attributes and the file handle of a name in a directory, both of the same inode."""
    with Fd(os.open(name, TO_PEEK, dir_fd=dir_fd)) as fd:
        return peek_at(fd)
