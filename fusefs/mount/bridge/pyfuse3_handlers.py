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
    create_through,
    keep_listing,
    omit_nodes,
    open_through,
)
from fusefs.mount.tree import cached_replies, readdir, vfs_files, vfs_write
from fusefs.mount.tree.validity import EntryParam
from fusefs.mount.tree.vfs import Vfs
from fusefs.mount.tree.vfs_files import OpenedFile
from fusefs.mount.tree.xattr_operations import XattrOperations, value_of


class Pyfuse3Handlers(pyfuse3.Operations):
    """One mount."""

    supports_dot_lookup = False
    enable_acl = True
    enable_writeback_cache = False

    def __init__(self, vfs: Vfs, xattrs: XattrOperations, threads: Pyfuse3Threads, replies: ReplyPatching) -> None:
        super().__init__()
        self.lock = threads.lock
        self.threads = threads
        self.stats = threads.stats
        self._vfs = vfs
        self._xattrs = xattrs
        self._do = threads.do
        self._replies = replies

    def told_stale(self, caller: object) -> None:
        if isinstance(caller, RequestContext):
            with self.lock:
                self._vfs.retries.add(caller.pid)

    # What the kernel is told of what was done, and what is remembered of what it asks.

    def _entry(self, known: EntryParam) -> EntryAttributes:
        return entry_of(known if known.proof is None else self._vfs.still(known), self._vfs.timeouts)

    async def _new(self, known: EntryParam) -> EntryAttributes:
        """Of what was just made. Checkpoint  rarely"""
        return self._entry(await own_number(self._vfs, known))

    def _handle(self, opened: OpenedFile) -> FileInfo:
        return self._told(opened, open_through)

    def _listing(self, opened: tuple[int, bool]) -> FileHandleT:
        fh, is_kept = opened
        if is_kept:
            self._replies.patch_next(keep_listing)
        return FileHandleT(fh)

    def _recall_name(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryParam | None:
        return cached_replies.lookup(self._vfs, parent_inode, name, ctx.pid)

    def _recall_node(self, inode: InodeT, ctx: RequestContext) -> EntryParam | None:
        return cached_replies.getattr_(self._vfs, inode)

    def _recall_target(self, inode: InodeT, ctx: RequestContext) -> bytes | None:
        return cached_replies.readlink(self._vfs, inode)

    def _recall_xattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes | None:
        answer = self._xattrs.recall(inode, name, ctx)
        return None if answer is None else value_of(answer)

    def _recall_xattrs(self, inode: InodeT, ctx: RequestContext) -> Sequence[bytes] | None:
        return self._xattrs.recall_names(inode, ctx)

    def _recall_opendir(self, inode: InodeT, ctx: RequestContext) -> tuple[int, bool] | None:
        fh = readdir.recall_opendir(self._vfs, inode, ctx)
        return None if fh is None else (fh, self._vfs.is_listing_kept(inode))

    # Names.

    @told(_entry, recall=_recall_name)
    def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryParam:
        return self._vfs.lookup(parent_inode, name, ctx)

    @answered
    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        await self.threads.forget(self._vfs.forget, inode_list)

    @answered
    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        return await self._new(await self._do(vfs_write.mknod, self._vfs, parent_inode, name, mode, rdev, ctx))

    @answered
    async def mkdir(self, parent_inode: InodeT, name: bytes, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        return await self._new(await self._do(vfs_write.mkdir, self._vfs, parent_inode, name, mode, ctx))

    @answered
    async def symlink(self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        return await self._new(await self._do(vfs_write.symlink, self._vfs, parent_inode, name, target, ctx))

    @told(_entry)
    def link(self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext) -> EntryParam:
        return vfs_write.link(self._vfs, inode, new_parent_inode, new_name, ctx)

    @done
    def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        vfs_write.unlink(self._vfs, parent_inode, name, ctx)

    @done
    def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        vfs_write.rmdir(self._vfs, parent_inode, name, ctx)

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
        vfs_write.rename(self._vfs, parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx)

    # Attributes.

    @told(_entry, recall=_recall_node)
    def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryParam:
        return self._vfs.getattr(inode, ctx)

    @told(_entry)
    def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryParam:
        return vfs_write.setattr_(self._vfs, inode, changes_of(attr, fields), fh, ctx)

    @recalled(_recall_target)
    def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        return self._vfs.readlink(inode, ctx)

    @done
    def access(self, inode: InodeT, mode: ModeT, ctx: RequestContext) -> bool:
        return self._vfs.access(inode, mode)

    @done
    def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        return statvfs(self._vfs.statfs())

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
        return vfs_files.open_(self._vfs, inode, flags, ctx)

    @answered
    async def create(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        opened, known = await self._do(vfs_write.create, self._vfs, parent_inode, name, mode, flags, ctx)
        entry = await self._new(known)
        return self._told(opened, create_through), entry

    def _told(self, opened: OpenedFile, through: Callable[[int], Patch]) -> FileInfo:
        """What the kernel is told of a handle, in the reply that goes out now."""
        if opened.backing_id:
            self._replies.patch_next(through(opened.backing_id), partial(self._lost, opened.fh))
        is_direct = not opened.backing_id and self._vfs.handles.comes_whole(opened.fh)
        return FileInfo(fh=FileHandleT(opened.fh), keep_cache=opened.keeps, direct_io=is_direct)

    def _lost(self, fh: int) -> None:
        """Release a handle that no client has been told of: none will."""
        self.threads.finish_soon(self._vfs.release, fh)

    @done
    def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return vfs_files.read(self._vfs, fh, off, size)

    @done
    def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        return vfs_files.write(self._vfs, fh, off, buf)

    @done
    def flush(self, fh: FileHandleT) -> None:
        vfs_files.flush(self._vfs, fh)

    @answered
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self.threads.wait_for(vfs_files.fsync, self._vfs, fh, data_only=datasync)

    @answered
    async def release(self, fh: FileHandleT) -> None:
        with self.lock:
            self._vfs.handles.runs_no_more(fh)  # the next writer may be quicker than the thread that lets it go
        await self.threads.finish(self._vfs.release, fh)

    # Listings.

    @told(_listing, recall=_recall_opendir)
    def opendir(self, inode: InodeT, ctx: RequestContext) -> tuple[int, bool]:
        return readdir.opendir(self._vfs, inode, ctx), self._vfs.is_listing_kept(inode)

    @answered
    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        if not self.threads.recall(readdir.advance, self._vfs, fh, start_id):
            await self._do(readdir.prepare, self._vfs, fh, start_id)
        entry = EntryAttributes()
        has_names_only = False
        with self._vfs.lock:
            for listed in readdir.read(self._vfs, fh, start_id):
                if listed.known is None:
                    has_names_only = True
                    name_only(entry, listed)
                else:
                    fill(entry, listed.known, self._vfs.timeouts)
                is_taken = pyfuse3.readdir_reply(token, listed.name, entry, listed.offset)
                readdir.told(self._vfs, fh, listed, is_taken=is_taken)
                if not is_taken:
                    break
        if has_names_only:
            self._replies.patch_next(omit_nodes)

    @answered
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self.threads.wait_for(readdir.fsyncdir, self._vfs, fh, data_only=datasync)

    @answered
    async def releasedir(self, fh: FileHandleT) -> None:
        await self.threads.finish(partial(readdir.releasedir, self._vfs), fh)
