"""pyfuse3's handlers, each a line or two: no logic lives here (docs/mount.md says what has no handler)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pyfuse3
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FlagT, InodeT, ModeT, RequestContext

from fusefs.mount.bridge.pyfuse3_loop import own_number
from fusefs.mount.bridge.pyfuse3_threads import Pyfuse3Threads
from fusefs.mount.bridge.pyfuse3_values import (
    answered,
    changes_of,
    done,
    entry_of,
    fill,
    name_only,
    recalled,
    statvfs,
    told,
)
from fusefs.mount.bridge.reply_patching import (
    Patch,
    ReplyPatching,
    cache_listing,
    create_through,
    omit_nodes,
    open_through,
)
from fusefs.mount.tree.opening import OpenedFile
from fusefs.mount.tree.validity import EntryParam
from fusefs.mount.tree.vfs import Vfs
from fusefs.mount.tree.xattr_operations import value_of


class Pyfuse3Handlers(pyfuse3.Operations):
    """One mount."""

    supports_dot_lookup = False
    enable_acl = True
    enable_writeback_cache = False

    def __init__(self, vfs: Vfs, threads: Pyfuse3Threads, replies: ReplyPatching) -> None:
        super().__init__()
        self.lock = threads.lock
        self.threads = threads
        self.stats = threads.stats
        self._lookups = vfs.lookups
        self._recalls = vfs.recalls
        self._references = vfs.references
        self._names = vfs.names
        self._attributes = vfs.attributes
        self._xattrs = vfs.xattrs
        self._files = vfs.files
        self._opening = vfs.opening
        self._nodes = vfs.nodes
        self._listings = vfs.listings
        self._retries = vfs.retries
        self._timeouts = vfs.timeouts
        self._do = threads.do
        self._replies = replies

    def told_stale(self, caller: object) -> None:
        if isinstance(caller, RequestContext):
            with self.lock:
                self._retries.add(caller.pid)

    # What the kernel is told of what was done, and what is remembered of what it asks.

    def _entry(self, known: EntryParam) -> EntryAttributes:
        return entry_of(known if known.proof is None else self._lookups.still(known), self._timeouts)

    async def _new(self, known: EntryParam) -> EntryAttributes:
        """Of what was just made. Checkpoint  rarely"""
        return self._entry(await own_number(self.lock, self._references, known))

    def _handle(self, opened: OpenedFile) -> FileInfo:
        return self._told(opened, open_through)

    def _listing(self, opened: tuple[int, int]) -> FileHandleT:
        fh, flags = opened
        if flags:
            self._replies.patch_next(partial(cache_listing, flags))
        return FileHandleT(fh)

    def _recall_name(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryParam | None:
        return self._recalls.lookup(parent_inode, name, ctx.pid)

    def _recall_node(self, inode: InodeT, ctx: RequestContext) -> EntryParam | None:
        return self._recalls.getattr(inode)

    def _recall_target(self, inode: InodeT, ctx: RequestContext) -> bytes | None:
        return self._recalls.readlink(inode)

    def _recall_xattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes | None:
        answer = self._xattrs.recall(inode, name, ctx)
        return None if answer is None else value_of(answer)

    def _recall_xattrs(self, inode: InodeT, ctx: RequestContext) -> Sequence[bytes] | None:
        return self._xattrs.recall_names(inode, ctx)

    def _recall_opendir(self, inode: InodeT, ctx: RequestContext) -> tuple[int, int] | None:
        fh = self._listings.recall_opendir(inode, ctx)
        return None if fh is None else (fh, self._listings.cache_flags(fh))

    # Names.

    @told(_entry, recall=_recall_name)
    def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryParam:
        return self._lookups.lookup(parent_inode, name, ctx)

    @answered
    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        await self.threads.forget(self._references.forget, inode_list)

    @answered
    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        return await self._new(await self._do(self._names.mknod, parent_inode, name, mode, rdev, ctx))

    @answered
    async def mkdir(self, parent_inode: InodeT, name: bytes, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        return await self._new(await self._do(self._names.mkdir, parent_inode, name, mode, ctx))

    @answered
    async def symlink(self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        return await self._new(await self._do(self._names.symlink, parent_inode, name, target, ctx))

    @told(_entry)
    def link(self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext) -> EntryParam:
        return self._names.link(inode, new_parent_inode, new_name, ctx)

    @done
    def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        self._names.unlink(parent_inode, name, ctx)

    @done
    def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        self._names.rmdir(parent_inode, name, ctx)

    @done
    def rename(
        self,
        parent_inode_old: InodeT,
        name_old: bytes,
        parent_inode_new: InodeT,
        name_new: bytes,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        self._names.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx)

    # Attributes.

    @told(_entry, recall=_recall_node)
    def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryParam:
        return self._lookups.getattr(inode, ctx)

    @told(_entry)
    def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryParam:
        return self._attributes.setattr(inode, changes_of(attr, fields), fh, ctx)

    @recalled(_recall_target)
    def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        return self._attributes.readlink(inode, ctx)

    @done
    def access(self, inode: InodeT, mode: ModeT, ctx: RequestContext) -> bool:
        return self._attributes.access(inode, mode)

    @done
    def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        return statvfs(self._attributes.statfs())

    @recalled(_recall_xattr)
    def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        return self._xattrs.get(inode, name, ctx)

    @recalled(_recall_xattrs)
    def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[bytes]:
        return self._xattrs.names(inode, ctx)

    @done
    def setxattr(self, inode: InodeT, name: bytes, value: bytes, ctx: RequestContext) -> None:
        self._xattrs.set(inode, name, value, ctx)

    @done
    def removexattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        self._xattrs.remove(inode, name, ctx)

    # Files.

    @told(_handle)
    def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> OpenedFile:
        return self._files.open(inode, flags, ctx)

    @answered
    async def create(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        opened, known = await self._do(self._names.create, parent_inode, name, mode, flags, ctx)
        entry = await self._new(known)
        return self._told(opened, create_through), entry

    def _told(self, opened: OpenedFile, through: Callable[[int], Patch]) -> FileInfo:
        """What the kernel is told of a handle, in the reply that goes out now."""
        if opened.backing_id:
            self._replies.patch_next(through(opened.backing_id), partial(self._lost, opened.fh))
        return FileInfo(fh=FileHandleT(opened.fh), keep_cache=opened.keeps)

    def _lost(self, fh: int) -> None:
        """Release a handle that no client has been told of: none will."""
        self.threads.finish_soon(self._opening.release, fh)

    @done
    def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return self._files.read(fh, off, size)

    @done
    def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        return self._files.write(fh, off, buf)

    @done
    def flush(self, fh: FileHandleT) -> None:
        self._files.flush(fh)

    @answered
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self.threads.wait_for(self._files.fsync, fh, data_only=datasync)

    @answered
    async def release(self, fh: FileHandleT) -> None:
        with self.lock:
            self._nodes.runs_no_more(fh)  # the next writer may be quicker than the thread that lets it go
        await self.threads.finish(self._opening.release, fh)

    # Listings.

    @told(_listing, recall=_recall_opendir)
    def opendir(self, inode: InodeT, ctx: RequestContext) -> tuple[int, int]:
        fh = self._listings.opendir(inode, ctx)
        return fh, self._listings.cache_flags(fh)

    @answered
    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        if not self.threads.recall(self._listings.advance, fh, start_id):
            await self._do(self._listings.prepare, fh, start_id)
        entry = EntryAttributes()
        has_names_only = False
        with self.lock:
            for listed in self._listings.read(fh, start_id):
                if listed.known is None:
                    has_names_only = True
                    name_only(entry, listed)
                else:
                    fill(entry, listed.known, self._timeouts)
                is_taken = pyfuse3.readdir_reply(token, listed.name, entry, listed.offset)
                self._listings.told(fh, listed, is_taken=is_taken)
                if not is_taken:
                    break
        if has_names_only:
            self._replies.patch_next(omit_nodes)

    @answered
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self.threads.wait_for(self._listings.fsyncdir, fh, data_only=datasync)

    @answered
    async def releasedir(self, fh: FileHandleT) -> None:
        await self.threads.finish(self._listings.releasedir, fh)
