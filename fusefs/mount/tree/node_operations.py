"""Requests about names, nodes and files. The native core handles them; this module adds Python's part before or after.

Python code maintains the cache for a slow filesystem, and serves the link to the caller's drop directory. It makes
orphans of entries that are moved into a drop directory, serves retries of processes that got ESTALE, and waits for
other processes.
"""

from __future__ import annotations

import errno
import os
import time
from typing import NoReturn

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import NAME_OPCODES, REQUEST_HEAD_SIZE, CallerIds, Opcode, Request
from fusefs.core.metadata_cache import ROOT, TOP, Attributes, source_key
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import NO_NOREPLACE, Kernel
from fusefs.linux.mountinfo import TOP as TOP_NAME
from fusefs.linux.statx import OPEN_FLAGS, identify_fd, stat_at
from fusefs.linux.syscalls import RENAME_NOREPLACE
from fusefs.mount.native._core import Node
from fusefs.mount.tables.daemon_cache import CacheFill, NameIn
from fusefs.mount.tree.drop_adoption import DropAdoption
from fusefs.mount.tree.kernel_timeouts import EntryParam, shown_number
from fusefs.mount.tree.mount_state import MountState
from fusefs.mount.tree.trashd_dir import DropLinks, drop_link_user, is_drop_folder, is_drop_link, is_in_store


class NodeOperations:
    """The node operations of one mount. Callers must hold the tables lock."""

    def __init__(self, mount: MountState) -> None:
        self._mount = mount
        self._lock, self._nodes, self._cache, self._retries = mount.lock, mount.nodes, mount.cache, mount.retries
        self._drops = DropLinks(Kernel(), mount.root)
        self.adoption = DropAdoption(mount)

    def answer(self, request: Request) -> bytes:
        """Handle a request; return the reply's body. Raises  OSError, WouldWait: see TablesLock.retry_patiently"""
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
                with self._cache.reading(node.source):
                    return self._do_patiently(request, caller)
        if opcode in NAME_OPCODES:
            return self._do_and_cache(request, nodeid)
        reply = self._do_patiently(request, caller)
        if opcode == Opcode.OPEN and self._retries:
            self._retries.remove_process(caller.pid)
        return reply

    def _do_patiently(self, request: Request, caller: CallerIds) -> bytes:
        return self._lock.retry_patiently(caller.pid, self._mount.do, request)

    def _do_and_cache(self, request: Request, parent: int, held: int = -1) -> bytes:
        """Handle a request whose reply begins with an entry, and cache that entry if the filesystem is slow."""
        with self._cache.fill_if_slow() as fill:
            reply = self._mount.do(request, held)
            directory = self._nodes.get(parent)
            if fill is not None and directory is not None:
                self._cache_entry(request, directory, reply, fill)
        return reply

    def _cache_entry(self, request: Request, directory: Node, reply: bytes, fill: CacheFill) -> None:
        entry = wire.read_entry(reply)
        if not entry.name_s:
            return  # the entry must not be cached
        name = wire.read_entry_name(request)
        node = self._nodes.get(entry.nodeid) if entry.nodeid else None
        if node is not None:
            fill.cache_entry(directory, name, node.source, entry.attributes_of(node.dev, node.ino, node.btime_ns))
        elif not entry.nodeid:
            fill.learn_missing(directory, name)

    def _directory(self, nodeid: int) -> tuple[Node, Fd]:
        """Return a directory and its fd, to be used immediately. Raises  OSError ENOENT: the directory was removed;
        ESTALE: no such node"""
        node = self._nodes.get(nodeid)
        if node is None:
            _raise_os_error(errno.ESTALE)
        if node.final_stat is not None:
            _raise_os_error(errno.ENOENT)
        return node, self._mount.directory_fd(node)

    # Replies from the cache of a slow filesystem.

    def answer_from_cache(self, request: Request) -> bytes | None:
        """Return the body of a reply from the cache; None if the filesystem has to be asked."""
        _size, opcode, _unique, nodeid, _uid, _gid, pid = wire.read_head(request)
        match opcode:
            case Opcode.LOOKUP:
                (name,) = wire.read_names(request)
                entry = self._cached_entry(nodeid, name, pid)
            case Opcode.GETATTR | Opcode.STATX:
                entry = self._cached_attributes(nodeid)
            case Opcode.READLINK:
                node = self._nodes.get(nodeid)
                return None if node is None else self._cache.find_target(node)
            case _:
                return None
        if entry is None or not entry.nodeid:
            return None if entry is None else wire.encode_missing_entry(entry.timeout_s)
        number, (name_s, attr_s) = shown_number(entry), self._mount.timeouts.timeouts_of(entry)
        if opcode == Opcode.LOOKUP:
            return wire.encode_entry(entry.nodeid, number, entry.attributes, name_s, attr_s)
        return (wire.encode_attr if opcode == Opcode.GETATTR else wire.encode_statx)(number, entry.attributes, attr_s)

    def _cached_entry(self, parent: int, name: bytes, pid: int) -> EntryParam | None:
        """Return the cached entry of a name, and count the kernel's reference to its node. pid: of the client's
        thread"""
        directory = self._nodes.get(parent)
        if directory is None or directory.final_stat is not None or pid in self._retries:
            return None
        entry = self._mount.cached_entry(directory, name)
        if entry is not None and entry.nodeid:
            self._mount.prefetch.note_lookup(directory, self._nodes.directory_fd(directory))
            node = self._nodes.get(entry.nodeid)
            assert node is not None, "it was just found"
            node.nlookup += 1
            node.was_sent = True
            node.cached_until_s = time.monotonic() + entry.timeout_s
        return entry

    def _cached_attributes(self, nodeid: int) -> EntryParam | None:
        node = self._nodes.get(nodeid)
        if node is None or node.final_stat is not None or is_in_store(self._nodes, node):
            return None
        attributes = self._cache.find_attributes(node.source)
        if attributes is None:
            return None
        node.was_sent |= not node.is_directory
        return EntryParam(node.nodeid, *attributes)

    # LOOKUP, READLINK and stat.

    def _lookup(self, request: Request, parent: int, caller: CallerIds) -> bytes:
        (name,) = wire.read_names(request)
        directory, fd = self._directory(parent)
        if is_drop_link(directory, name):
            link_stat = self._lock.call(self._drops.stat_link, caller.uid, caller)
            return wire.encode_entry(link_stat.ino, link_stat.ino, link_stat, 0, 0)
        if parent == ROOT and name == TOP_NAME and self._nodes.root.nodeid == TOP:  # for mount/life/root_inode.py
            self._nodes.root.nlookup += 1
            return wire.encode_entry(TOP, TOP, self._lock.call(stat_at, fd), 0, 0)
        if self._retries:
            reply = self._lookup_for_retry(request, directory, fd, name, caller) or self._lookup_moved(
                request, directory, name, caller
            )
            if reply is not None:
                return reply
        if self._lock.is_slow and not self._mount.is_uncacheable(directory, fd, name):
            self._mount.prefetch.note_lookup(directory, fd)
        return self._do_and_cache(request, parent)

    def _lookup_for_retry(
        self, request: Request, directory: Node, dir_fd: Fd, name: bytes, caller: CallerIds
    ) -> bytes | None:
        """Look up a name for a client that got ESTALE, and hold the inode open for it.

        Returns  the reply; None if this client did not get ESTALE
        Raises   OSError ENOENT
        """
        fd = self._retries.open_name(caller.pid, dir_fd, name)
        if fd is None:
            return None
        with close_on_error(fd):
            reply = self._do_and_cache(request, directory.nodeid, fd)
        node = self._nodes.get(wire.read_entry(reply).nodeid)
        if node is None:
            fd.close()
        else:
            self._retries.hold(caller.pid, node, fd)
        return reply

    def _lookup_moved(self, request: Request, directory: Node, name: bytes, caller: CallerIds) -> bytes | None:
        """Look up, once, the entry that this client has just moved to a name in a drop directory; return None if the
        client has moved nothing there."""
        fd = self._retries.take_moved_fd(caller.pid, (directory, name))
        if fd is None:
            return None
        with fd:
            reply = self._mount.do(request, fd)
        node = self._nodes.get(wire.read_entry(reply).nodeid)
        if node is not None:
            self._nodes.forget_name(node, directory, name)
        return reply

    def _readlink(self, request: Request, nodeid: int, caller: CallerIds) -> bytes:
        uid = drop_link_user(nodeid)
        if uid is not None:
            return self._lock.call(self._drops.readlink, uid, caller)
        with self._cache.fill_if_slow() as fill:
            target = self._mount.do(request)
            node = self._nodes.get(nodeid)
            if fill is not None and node is not None:
                fill.learn_target(node.source, target)
        return target

    def _stat(self, request: Request, opcode: int, nodeid: int, caller: CallerIds) -> bytes:
        uid = drop_link_user(nodeid)
        if uid is not None:
            attributes = self._lock.call(self._drops.stat_link, uid, caller)
            return (
                wire.encode_attr(attributes.ino, attributes)
                if opcode == Opcode.GETATTR
                else wire.encode_statx(attributes.ino, attributes)
            )
        with self._cache.fill_if_slow() as fill:
            reply = self._do_patiently(request, caller)
            node = self._nodes.get(nodeid)
            is_whole = opcode == Opcode.GETATTR
            if fill is not None and is_whole and node is not None and not is_in_store(self._nodes, node):
                attributes = wire.read_attr(reply).attributes_of(node.dev, node.ino, node.btime_ns)
                fill.learn_attributes(node.source, attributes)
        return reply

    # Renames.

    def _rename(self, request: Request, opcode: int, old_parent: int, caller: CallerIds) -> bytes:
        """Rename an entry. If it is moved into a drop directory, make it an orphan immediately.

        If that is impossible, rename it, but without replacing anything (EEXIST), because the reaper must make an
        orphan of each entry.
        """
        numbers = wire.RENAME_IN if opcode == Opcode.RENAME else wire.RENAME2_IN
        new_parent, *flags = numbers.unpack_from(request, REQUEST_HEAD_SIZE)
        directory = self._nodes.get(new_parent)
        if sum(flags) not in (0, RENAME_NOREPLACE) or directory is None or not is_drop_folder(self._nodes, directory):
            return self._mount.do(request)
        old, new = wire.read_names(request, numbers, 2)
        if self._try_adopt((old_parent, old), (new_parent, new), caller):
            return b""
        return self._rename_free(request, new_parent, (old, new))

    def _rename_free(self, request: Request, new_parent: int, names: tuple[bytes, bytes]) -> bytes:
        """Rename without replacing anything, as Kernel.rename_free does."""
        free = wire.RENAME2_IN.pack(new_parent, RENAME_NOREPLACE) + b"".join(name + b"\0" for name in names)
        try:
            return self._mount.do(wire.encode_request_like(request, Opcode.RENAME2, free))
        except OSError as error:
            if error.errno not in NO_NOREPLACE:
                raise
        try:
            self._lock.call(stat_at, self._directory(new_parent)[1], names[1])
        except FileNotFoundError:
            return self._mount.do(request)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), names[1])

    def _try_adopt(self, old: tuple[int, bytes], new: tuple[int, bytes], caller: CallerIds) -> bool:
        """Try to make an orphan of an entry that is moved into a drop directory. Returns  False: this is impossible,
        and nothing was moved

        Raises  OSError EPERM: one of the names is `.trashd/drop`
        """
        (old_directory, _fd), (new_directory, _fd) = self._directory(old[0]), self._directory(new[0])
        if is_drop_link(old_directory, old[1]) or is_drop_link(new_directory, new[1]):
            _raise_os_error(errno.EPERM)
        # Both directories are held open: opening the second could otherwise close the first.
        with self._mount.directory_fd(old_directory) as old_fd, self._mount.directory_fd(new_directory) as new_fd:
            return self._adopt_and_record(old_fd, (old_directory, old[1]), new_fd, (new_directory, new[1]), caller)

    def _adopt_and_record(self, old_fd: Fd, old: NameIn, new_fd: Fd, new: NameIn, caller: CallerIds) -> bool:
        """Adopt the entry, and record the move in the tables. The kernel assigns the requested name to the entry; this
        name is expired soon (forget_stored.py)."""
        attributes, handle = self._lock.call(_stat_with_handle, old_fd, old[1])
        source = source_key(attributes, self._mount.stable_handle(handle))
        with self._cache.changing(source, names=[old, new]):
            item_fd = self.adoption.adopt(old_fd, old, attributes, new_fd, new[0], caller)
        if item_fd is None:
            return False
        self._mount.timeouts.note_change(old[0])
        self._mount.timeouts.note_change(new[0])
        node = self._nodes.find(source)
        if node is not None:
            self._nodes.move(node, old, new)
            self._mount.timeouts.note_move(node)
            self._mount.stored_notices.note_stored(node, is_moved=True)
            self._nodes.forget_name(node, *new)
            self._mount.stored_notices.expire(*new, node)
        self._retries.note_moved(caller.pid, new, source, item_fd)
        return True


def _raise_os_error(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))


def _stat_with_handle(dir_fd: Fd, name: bytes) -> tuple[Attributes, bytes]:
    """Return the attributes and the file handle of a name in a directory, both of the same inode."""
    with Fd(os.open(name, OPEN_FLAGS, dir_fd=dir_fd)) as fd:
        return identify_fd(fd)
