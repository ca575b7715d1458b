"""Handlers for pyfuse3. Each request becomes one call to an operation of the tree, made by a worker thread.

The handlers are slow, but complete, except for requests without a pyfuse3 handler (docs/explain/mount-semantics.md).
Nothing is passed through, and the kernel caches no listings.

A worker makes the reply while it holds the tables lock, and the trio thread sends it later. If attributes change in
between, this is safe: the kernel discards attributes from a request that is older than its last invalidation or change
of that inode (fs/fuse/inode.c, fuse_change_attributes). Names are safe, too, since the kernel locks the directory.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    RequestContext,
    SetattrFields,
    StatvfsData,
)

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import NANO, Opcode
from fusefs.core.metadata_cache import ROOT
from fusefs.mount.native._core import Tables
from fusefs.mount.places.counters import CELL_OF
from fusefs.mount.tree.mount_state import errno_of
from fusefs.mount.tree.trashd_dir import holds_trash
from fusefs.mount.tree.vfs import Vfs

P = ParamSpec("P")
R = TypeVar("R")

_N_TASKS = 4096
"""How many requests may be in progress at a time. The limit is high, so that requests that wait do not block others."""
_N_OF_USER = 120
"""How many requests of one user the workers serve at a time; the others are queued."""
_XATTR_ROOM = 1 << 16
_LISTED_BYTES = 4096
"""Size of the entries that are looked up at a time. The size of the kernel's buffer is not known here."""
_STATVFS = ("f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_bsize", "f_namemax", "f_frsize")
_NOW_NS = 60 * 10**9
_GENERATIONS = 0x7FFFFFFF
Listed = tuple[bytes, EntryAttributes, int, int]
"""A name, its attributes, the next offset, and the nodeid whose reference is counted, or 0."""


def _handler(
    function: Callable[Concatenate[PlainHandlers, P], R],
) -> Callable[Concatenate[PlainHandlers, P], Coroutine[Any, Any, R]]:
    """Turn a function into a handler, which makes a worker call the function with the tables lock held."""
    name = function.__name__

    @functools.wraps(function)
    async def handler(self: PlainHandlers, /, *args: P.args, **kwargs: P.kwargs) -> R:
        caller = args[-1] if isinstance(args[-1], RequestContext) else None
        return await self.serve(name, caller, partial(function, self, *args, **kwargs))

    return handler


class PlainHandlers(pyfuse3.Operations):
    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, vfs: Vfs, n_threads: int, *, has_acls: bool) -> None:
        """has_acls: the kernel checks permissions, including ACLs"""
        super().__init__()
        self.enable_acl = has_acls
        self.has_init_reply = trio.Event()
        """Set when the kernel has the reply to INIT."""
        self._vfs = vfs
        self._lock = vfs.lock
        self._workers = trio.CapacityLimiter(n_threads)
        self._users: defaultdict[int | None, trio.CapacityLimiter] = defaultdict(
            lambda: trio.CapacityLimiter(min(_N_OF_USER, n_threads))
        )
        self.release_limiter = trio.CapacityLimiter(n_threads)

    def init(self) -> None:
        self.has_init_reply.set()

    async def serve(self, name: str, caller: RequestContext | None, function: Callable[[], R]) -> R:
        """Have a worker serve a request. Raises  FUSEError"""
        self._vfs.stats.note_change()
        async with self._users[None if caller is None else caller.uid]:
            return await self._run_in_worker(name, caller, function, self._workers)

    async def _run_in_worker(
        self,
        name: str,
        caller: RequestContext | None,
        function: Callable[[], R],
        workers: trio.CapacityLimiter,
        before: Callable[[], object] | None = None,
    ) -> R:
        """Have a worker call `function`. before: called first, in this thread

        Raises  only FUSEError: any other exception would end the mount
        """
        operation = partial(self._lock.run_patient_operation, self._run_counted, name, caller, function)
        try:
            if before is not None:
                with self._lock:
                    before()
            return await trio.to_thread.run_sync(operation, abandon_on_cancel=True, limiter=workers)
        except Exception as error:
            raise FUSEError(errno_of(error, name)) from None

    async def _serve_release(
        self, name: str, function: Callable[[], object], before: Callable[[], object] | None = None
    ) -> None:
        """Serve a release or a forget, which must not queue behind other requests."""
        await self._run_in_worker(name, None, function, self.release_limiter, before)

    def _run_counted(self, name: str, caller: RequestContext | None, function: Callable[[], R]) -> R:
        """Serve a request, and count it. Callers must hold the tables lock."""
        has_failed, begun_ns = True, perf_counter_ns()
        try:
            result = function()
            has_failed = False
            return result
        except OSError as error:
            if error.errno == errno.ESTALE and caller is not None:
                self._vfs.retries.add_process(caller.pid)
            raise
        finally:
            self._vfs.count(CELL_OF[name], begun_ns, has_failed=has_failed)

    def call_vfs(self, opcode: Opcode, nodeid: int, caller: RequestContext | None, body: bytes = b"") -> bytes:
        """Handle a request; return the reply's body. caller: None if unknown; body: the request without its head"""
        ids = (0, 0, 0) if caller is None else (caller.uid, caller.gid, caller.pid)
        return self._vfs.answer(wire.encode_request(opcode, nodeid, ids, body))

    def call_for_entry(self, opcode: Opcode, nodeid: int, caller: RequestContext, body: bytes) -> EntryAttributes:
        return _entry_in(self.call_vfs(opcode, nodeid, caller, body), self._vfs.nodes)

    # Names.

    @_handler
    def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        return self.call_for_entry(Opcode.LOOKUP, parent_inode, ctx, _strings(name))

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        await self._serve_release("forget", partial(self._forget, inode_list))

    def _forget(self, forgotten: Sequence[tuple[int, int]]) -> None:
        self._lock.call(self._vfs.core.do, wire.encode_batch_forget(forgotten))

    @_handler
    def mknod(self, parent_inode: InodeT, name: bytes, mode: ModeT, rdev: int, ctx: RequestContext) -> EntryAttributes:
        own = wire.MKNOD_IN.pack(mode, rdev, ctx.umask)
        return self.call_for_entry(Opcode.MKNOD, parent_inode, ctx, own + _strings(name))

    @_handler
    def mkdir(self, parent_inode: InodeT, name: bytes, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        own = wire.MKDIR_IN.pack(mode, ctx.umask)
        return self.call_for_entry(Opcode.MKDIR, parent_inode, ctx, own + _strings(name))

    @_handler
    def symlink(self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        return self.call_for_entry(Opcode.SYMLINK, parent_inode, ctx, _strings(name, target))

    @_handler
    def link(self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext) -> EntryAttributes:
        return self.call_for_entry(Opcode.LINK, new_parent_inode, ctx, wire.LINK_IN.pack(inode) + _strings(new_name))

    @_handler
    def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        self.call_vfs(Opcode.UNLINK, parent_inode, ctx, _strings(name))

    @_handler
    def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        self.call_vfs(Opcode.RMDIR, parent_inode, ctx, _strings(name))

    @_handler
    def rename(
        self,
        parent_inode_old: InodeT,
        name_old: bytes,
        parent_inode_new: InodeT,
        name_new: bytes,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        own = wire.RENAME2_IN.pack(parent_inode_new, flags)
        self.call_vfs(Opcode.RENAME2, parent_inode_old, ctx, own + _strings(name_old, name_new))

    # Attributes.

    @_handler
    def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return _attributes_in(self.call_vfs(Opcode.GETATTR, inode, ctx, bytes(wire.GETATTR_IN.size)))

    @_handler
    def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Set attributes. If setting two times close to now is refused, retry with "now", which any writer may set:
        pyfuse3 does not report whether the client requested "now"."""
        try:
            reply = self.call_vfs(Opcode.SETATTR, inode, ctx, _changes_of(attr, fields, fh))
        except PermissionError:
            if not _are_now(attr, fields):
                raise
            reply = self.call_vfs(
                Opcode.SETATTR, inode, ctx, _changes_of(attr, fields, fh, wire.FATTR_ATIME_NOW | wire.FATTR_MTIME_NOW)
            )
        return _attributes_in(reply)

    @_handler
    def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        return self.call_vfs(Opcode.READLINK, inode, ctx)

    @_handler
    def access(self, inode: InodeT, mode: ModeT, ctx: RequestContext) -> bool:
        self.call_vfs(Opcode.ACCESS, inode, ctx, wire.ACCESS_IN.pack(mode))
        return True

    @_handler
    def statfs(self, ctx: RequestContext) -> StatvfsData:
        return _statvfs(self.call_vfs(Opcode.STATFS, ROOT, ctx))

    @_handler
    def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        return self.call_vfs(Opcode.GETXATTR, inode, ctx, wire.GETXATTR_IN.pack(_XATTR_ROOM) + _strings(name))

    @_handler
    def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[bytes]:
        return self.call_vfs(Opcode.LISTXATTR, inode, ctx, wire.GETXATTR_IN.pack(_XATTR_ROOM)).split(b"\0")[:-1]

    @_handler
    def setxattr(self, inode: InodeT, name: bytes, value: bytes, ctx: RequestContext) -> None:
        self.call_vfs(Opcode.SETXATTR, inode, ctx, wire.SETXATTR_IN.pack(len(value), 0) + _strings(name) + value)

    @_handler
    def removexattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        self.call_vfs(Opcode.REMOVEXATTR, inode, ctx, _strings(name))

    # Files.

    @_handler
    def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        return _file_info(self.call_vfs(Opcode.OPEN, inode, ctx, wire.OPEN_IN.pack(flags)))

    @_handler
    def create(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        own = wire.CREATE_IN.pack(flags, mode, ctx.umask)
        reply = self.call_vfs(Opcode.CREATE, parent_inode, ctx, own + _strings(name))
        return FileInfo(fh=FileHandleT(wire.read_handle(reply)), keep_cache=True), _entry_in(reply, self._vfs.nodes)

    @_handler
    def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return self.call_vfs(Opcode.READ, ROOT, None, wire.READ_IN.pack(fh, off, size))

    @_handler
    def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        """Write to a file. If it is open with O_APPEND, and other machines may write to it, append to it, since the
        kernel's offset may be outdated."""
        flags = os.O_APPEND if self._vfs.is_shared and self._vfs.nodes.appends(fh) else 0
        reply = self.call_vfs(Opcode.WRITE, ROOT, None, wire.WRITE_IN.pack(fh, off, len(buf), flags) + buf)
        return wire.read_written(reply)

    @_handler
    def flush(self, fh: FileHandleT) -> None:
        self.call_vfs(Opcode.FLUSH, ROOT, None, wire.HANDLE_IN.pack(fh))

    @_handler
    def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        self.call_vfs(Opcode.FSYNC, ROOT, None, wire.FSYNC_IN.pack(fh, wire.FSYNC_DATA_ONLY if datasync else 0))

    async def release(self, fh: FileHandleT) -> None:
        """Release a handle. If a program was executed through it, first record, in this thread, that it has ended: the
        next open of the program's file for writing may come before a worker releases the handle."""
        mark_not_executed = partial(self._vfs.nodes.mark_not_executed, fh)
        release = partial(self.call_vfs, Opcode.RELEASE, ROOT, None, wire.HANDLE_IN.pack(fh))
        await self._serve_release("release", release, before=mark_not_executed)

    # Listings.

    @_handler
    def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        return FileHandleT(wire.read_handle(self.call_vfs(Opcode.OPENDIR, inode, ctx, bytes(wire.OPEN_IN.size))))

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """List a directory. Use the token only on the trio thread: pyfuse3 frees it when the request is cancelled."""
        while True:
            listed = await self.serve("readdir", None, partial(self._list, fh, start_id))
            for n_taken, (name, entry, following, _nodeid) in enumerate(listed):
                if not pyfuse3.readdir_reply(token, name, entry, following):
                    unsent = [(one[-1], 1) for one in listed[n_taken:] if one[-1]]
                    await self._serve_release("forget", partial(self._forget, unsent))
                    return
                start_id = following
            if not listed:
                return

    def _list(self, fh: int, offset: int) -> list[Listed]:
        """Return some entries from an offset on, and count the kernel's reference to each entry's node."""
        vfs, listed = self._vfs, []
        reply = self.call_vfs(Opcode.READDIRPLUS, ROOT, None, wire.READ_IN.pack(fh, offset, _LISTED_BYTES))
        directory, _fd = vfs.nodes.handle(fh)
        is_stored = holds_trash(vfs.nodes, directory)
        for one in wire.read_direntplus(reply):
            node = vfs.nodes.get(one.entry.nodeid)
            if node is not None and is_stored:
                vfs.stored_notices.note_stored(node, is_moved=False)
            listed.append((one.name, _entry_listed(one, vfs.nodes), one.offset, one.entry.nodeid))
        return listed

    @_handler
    def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        self.call_vfs(Opcode.FSYNCDIR, ROOT, None, wire.FSYNC_IN.pack(fh, wire.FSYNC_DATA_ONLY if datasync else 0))

    async def releasedir(self, fh: FileHandleT) -> None:
        await self._serve_release(
            "releasedir", partial(self.call_vfs, Opcode.RELEASEDIR, ROOT, None, wire.HANDLE_IN.pack(fh))
        )


def _strings(*strings: bytes) -> bytes:
    return b"".join(string + b"\0" for string in strings)


# Conversions to pyfuse3's types.


def _entry_in(reply: bytes, nodes: Tables) -> EntryAttributes:
    return _entry(wire.read_entry(reply), nodes)


def _entry_listed(listed: wire.ListedDirent, nodes: Tables) -> EntryAttributes:
    """Return the entry of a listed name. For `.` and `..`, the kernel uses only the inode number and the type."""
    if listed.entry.nodeid:
        return _entry(listed.entry, nodes)
    entry = EntryAttributes()
    field: Any = entry
    field.st_ino, field.st_mode = listed.ino, listed.kind << 12
    return entry


def _entry(reply: wire.Entry, nodes: Tables) -> EntryAttributes:
    """Make an entry. Each incarnation of an inode has a different generation, because the kernel makes file handles
    from nodeid and generation."""
    node = nodes.get(reply.nodeid) if reply.nodeid else None
    entry = EntryAttributes()
    field: Any = entry
    field.entry_timeout, field.attr_timeout = reply.name_s, reply.attr_s
    field.generation = 0 if node is None else hash(node.source) & _GENERATIONS
    return _with_numbers(entry, reply.numbers)


def _with_numbers(entry: EntryAttributes, numbers: tuple[int, ...]) -> EntryAttributes:
    """Copy the fields of struct fuse_attr into an entry; return the entry."""
    field: Any = entry
    (
        field.st_ino, field.st_size, field.st_blocks, atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns,
        field.st_mode, field.st_nlink, field.st_uid, field.st_gid, field.st_rdev, field.st_blksize,
    ) = numbers  # fmt: skip
    field.st_atime_ns = atime_s * NANO + atime_ns
    field.st_mtime_ns = mtime_s * NANO + mtime_ns
    field.st_ctime_ns = ctime_s * NANO + ctime_ns
    return entry


def _attributes_in(reply: bytes) -> EntryAttributes:
    attr = wire.read_attr(reply)
    entry = EntryAttributes()
    entry.attr_timeout = attr.attr_s
    return _with_numbers(entry, attr.numbers)


def _file_info(reply: bytes) -> FileInfo:
    """Return the handle in a reply to OPEN. The file is not passed through; the daemon serves reads and writes."""
    fh, flags, _backing_id = wire.read_opened(reply)
    return FileInfo(fh=FileHandleT(fh), keep_cache=bool(flags & wire.FOPEN_KEEP_CACHE))


def _statvfs(reply: bytes) -> StatvfsData:
    data = StatvfsData()
    for field, number in zip(_STATVFS, wire.STATFS_OUT.unpack(reply), strict=True):
        setattr(data, field, number)
    data.f_favail = data.f_ffree
    return data


def _changes_of(attr: EntryAttributes, fields: SetattrFields, fh: int | None, more: int = 0) -> bytes:
    """Return the body of a SETATTR request. more: additional FATTR_* flags"""
    valid = {
        wire.FATTR_MODE: fields.update_mode, wire.FATTR_UID: fields.update_uid, wire.FATTR_GID: fields.update_gid,
        wire.FATTR_SIZE: fields.update_size, wire.FATTR_ATIME: fields.update_atime,
        wire.FATTR_MTIME: fields.update_mtime, wire.FATTR_FH: fh is not None,
    }  # fmt: skip
    atime_s, atime_ns = divmod(attr.st_atime_ns, NANO)
    mtime_s, mtime_ns = divmod(attr.st_mtime_ns, NANO)
    return wire.SETATTR_IN.pack(
        sum(one for one, is_changed in valid.items() if is_changed) | more, fh or 0, attr.st_size, atime_s, mtime_s,
        atime_ns, mtime_ns, attr.st_mode, attr.st_uid, attr.st_gid,
    )  # fmt: skip


def _are_now(attr: EntryAttributes, fields: SetattrFields) -> bool:
    """Return whether both times are set to the same value, within a minute of now: the client may have requested
    "now"."""
    is_one = fields.update_atime and fields.update_mtime and attr.st_atime_ns == attr.st_mtime_ns
    return is_one and abs(time.time_ns() - attr.st_mtime_ns) <= _NOW_NS


# The loop: libfuse reads each request, beginning with INIT, and a trio task serves it.


@contextmanager
def session(handlers: PlainHandlers, device: int) -> Iterator[None]:
    """Run a libfuse session on /dev/fuse, whose fd the caller still owns."""
    pyfuse3.init(handlers, f"/dev/fd/{os.dup(device)}", set())  # libfuse closes the copy
    try:
        yield
    finally:
        pyfuse3.close(unmount=False)


async def answer_requests() -> None:
    """Serve requests until the connection is gone or the task is cancelled. Checkpoint  everywhere"""
    await pyfuse3.main(min_tasks=1, max_tasks=_N_TASKS)
