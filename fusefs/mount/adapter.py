"""pyfuse3's handlers, each a line or two: no logic lives here (docs/mount.md says what has no handler)."""

from __future__ import annotations

from collections.abc import Sequence

import pyfuse3
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FlagT, FUSEError, InodeT, ModeT, RequestContext

from fusefs.linux.caller import Caller
from fusefs.mount import listing, recall, vfs_write
from fusefs.mount.hands import Hands
from fusefs.mount.loop import own_number
from fusefs.mount.replies import Replies, keep_listing, leave_out_nodes
from fusefs.mount.stats import Stats
from fusefs.mount.translate import answered, entry_of, fill, name_only, statvfs_of
from fusefs.mount.vfs import Known, Vfs
from fusefs.mount.vfs_write import Changes
from fusefs.mount.xattrs import Xattrs


class Adapter(pyfuse3.Operations):
    """One mount."""

    supports_dot_lookup = False
    enable_acl = True
    enable_writeback_cache = False

    def __init__(self, vfs: Vfs, xattrs: Xattrs, hands: Hands, replies: Replies, stats: Stats) -> None:
        super().__init__()
        self.stats = stats
        self._vfs = vfs
        self._xattrs = xattrs
        self._hands = hands
        self._do = hands.do
        self._replies = replies

    async def _new(self, known: Known) -> EntryAttributes:
        """What the kernel is told of what was just made. Checkpoint  rarely"""
        return entry_of(self._vfs.still(await own_number(self._vfs, known)))

    # Names.

    @answered
    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if known := self._hands.recall(recall.lookup, self._vfs, parent_inode, name):
            return entry_of(known)
        return entry_of(self._vfs.still(await self._do(self._vfs.lookup, parent_inode, name, _caller(ctx))))

    @answered
    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        await self._hands.forget(self._vfs.forget, inode_list)

    @answered
    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        return await self._new(await self._do(vfs_write.mknod, self._vfs, parent_inode, name, mode, rdev, _caller(ctx)))

    @answered
    async def mkdir(self, parent_inode: InodeT, name: bytes, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        return await self._new(await self._do(vfs_write.mkdir, self._vfs, parent_inode, name, mode, _caller(ctx)))

    @answered
    async def symlink(self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        return await self._new(await self._do(vfs_write.symlink, self._vfs, parent_inode, name, target, _caller(ctx)))

    @answered
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        made = await self._do(vfs_write.link, self._vfs, inode, new_parent_inode, new_name)
        return entry_of(self._vfs.still(made))

    @answered
    async def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        await self._do(vfs_write.unlink, self._vfs, parent_inode, name)

    @answered
    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        await self._do(vfs_write.rmdir, self._vfs, parent_inode, name)

    @answered
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: bytes,
        parent_inode_new: InodeT,
        name_new: bytes,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        await self._do(vfs_write.rename, self._vfs, parent_inode_old, name_old, parent_inode_new, name_new, flags)

    # Attributes.

    @answered
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        if known := self._hands.recall(recall.getattr_, self._vfs, inode):
            return entry_of(known)
        return entry_of(self._vfs.still(await self._do(self._vfs.getattr, inode, _caller(ctx))))

    @answered
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        changes = Changes(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        changed = await self._do(vfs_write.setattr_, self._vfs, inode, changes, fh, _caller(ctx))
        return entry_of(self._vfs.still(changed))

    @answered
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        if target := self._hands.recall(recall.readlink, self._vfs, inode):
            return target
        return await self._do(self._vfs.readlink, inode, _caller(ctx))

    @answered
    async def access(self, inode: InodeT, mode: ModeT, ctx: RequestContext) -> bool:
        return await self._do(self._vfs.access, inode, mode)

    @answered
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        return statvfs_of(await self._do(self._vfs.statfs))

    @answered
    async def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        if number := self._hands.recall(self._xattrs.refusal, inode, name):
            raise FUSEError(number)
        return await self._do(self._xattrs.get, inode, name)

    @answered
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[bytes]:
        names = self._hands.recall(self._xattrs.recall_names, inode, _caller(ctx))
        return names if names is not None else await self._do(self._xattrs.names, inode, _caller(ctx))

    @answered
    async def setxattr(self, inode: InodeT, name: bytes, value: bytes, ctx: RequestContext) -> None:
        await self._do(self._xattrs.set, inode, name, value)

    @answered
    async def removexattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        await self._do(self._xattrs.remove, inode, name)

    # Files.

    @answered
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        fh, keeps_pages = await self._do(self._vfs.open, inode, flags)
        return FileInfo(fh=FileHandleT(fh), keep_cache=keeps_pages)

    @answered
    async def create(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        fh, known = await self._do(vfs_write.create, self._vfs, parent_inode, name, mode, flags, _caller(ctx))
        return FileInfo(fh=FileHandleT(fh), keep_cache=True), await self._new(known)

    @answered
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return await self._do(self._vfs.read, fh, off, size)

    @answered
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        return await self._do(self._vfs.write, fh, off, buf)

    @answered
    async def flush(self, fh: FileHandleT) -> None:
        await self._do(self._vfs.flush, fh)

    @answered
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self._hands.wait_for(self._vfs.fsync, fh, data_only=datasync)

    @answered
    async def release(self, fh: FileHandleT) -> None:
        await self._do(self._vfs.release, fh)

    # Listings.

    @answered
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        fh = FileHandleT(await self._do(listing.opendir, self._vfs, inode))
        if self._vfs.is_listing_kept(inode):
            self._replies.patch_next(keep_listing)
        return fh

    @answered
    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        if not self._hands.recall(listing.advance, self._vfs, fh, start_id):
            await self._do(listing.prepare, self._vfs, fh, start_id)
        entry = EntryAttributes()
        has_names_only = False
        with self._vfs.gate.lock:
            for listed in listing.read(self._vfs, fh, start_id):
                if listed.known is None:
                    has_names_only = True
                    name_only(entry, listed)
                else:
                    fill(entry, listed.known)
                is_taken = pyfuse3.readdir_reply(token, listed.name, entry, listed.offset)
                listing.told(self._vfs, fh, listed, is_taken=is_taken)
                if not is_taken:
                    break
        if has_names_only:
            self._replies.patch_next(leave_out_nodes)

    @answered
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self._hands.wait_for(self._vfs.fsync, fh, data_only=datasync)

    @answered
    async def releasedir(self, fh: FileHandleT) -> None:
        await self._do(listing.releasedir, self._vfs, fh)


def _caller(ctx: RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid, ctx.umask)
