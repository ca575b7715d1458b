"""pyfuse3's handlers, each a line or two: no logic lives here (docs/mount.md says what has no handler)."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pyfuse3
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FlagT, FUSEError, InodeT, ModeT, RequestContext

from fusefs.linux.caller import Caller
from fusefs.mount import vfs_write
from fusefs.mount.loop import own_number
from fusefs.mount.translate import Timeouts, answered, entry_of, statvfs_of
from fusefs.mount.vfs import Known, Vfs
from fusefs.mount.vfs_write import Changes


class Adapter(pyfuse3.Operations):
    """One mount."""

    supports_dot_lookup = False
    enable_acl = True
    enable_writeback_cache = False

    def __init__(self, vfs: Vfs, timeouts: Timeouts, *, keeps_pages: bool) -> None:
        """keeps_pages: what the kernel has of a file's content is still right at the next open."""
        super().__init__()
        self._vfs = vfs
        self._timeouts = timeouts
        self._keeps_pages = keeps_pages

    async def _new(self, known: Known) -> EntryAttributes:
        """What the kernel is told of what was just made. Checkpoint  rarely"""
        return entry_of(await own_number(self._vfs, known), self._timeouts)

    # Names.

    @answered
    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        return entry_of(self._vfs.lookup(parent_inode, name, _caller(ctx)), self._timeouts)

    @answered
    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        for inode, n in inode_list:
            self._vfs.forget(inode, n)

    @answered
    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        return await self._new(vfs_write.mknod(self._vfs, parent_inode, name, mode, rdev, _caller(ctx)))

    @answered
    async def mkdir(self, parent_inode: InodeT, name: bytes, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        return await self._new(vfs_write.mkdir(self._vfs, parent_inode, name, mode, _caller(ctx)))

    @answered
    async def symlink(self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        return await self._new(vfs_write.symlink(self._vfs, parent_inode, name, target, _caller(ctx)))

    @answered
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        return entry_of(vfs_write.link(self._vfs, inode, new_parent_inode, new_name), self._timeouts)

    @answered
    async def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        vfs_write.unlink(self._vfs, parent_inode, name)

    @answered
    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        vfs_write.rmdir(self._vfs, parent_inode, name)

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
        vfs_write.rename(self._vfs, parent_inode_old, name_old, parent_inode_new, name_new, flags)

    # Attributes.

    @answered
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return entry_of(self._vfs.getattr(inode, _caller(ctx)), self._timeouts)

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
        return entry_of(vfs_write.setattr_(self._vfs, inode, changes, fh, _caller(ctx)), self._timeouts)

    @answered
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        return self._vfs.readlink(inode, _caller(ctx))

    @answered
    async def access(self, inode: InodeT, mode: ModeT, ctx: RequestContext) -> bool:
        return self._vfs.access(inode, mode)

    @answered
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        return statvfs_of(self._vfs.statfs())

    @answered
    async def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        return self._vfs.getxattr(inode, name)

    @answered
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[bytes]:
        return self._vfs.listxattr(inode, _caller(ctx))

    @answered
    async def setxattr(self, inode: InodeT, name: bytes, value: bytes, ctx: RequestContext) -> None:
        vfs_write.setxattr(self._vfs, inode, name, value)

    @answered
    async def removexattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        vfs_write.removexattr(self._vfs, inode, name)

    # Files.

    @answered
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        return FileInfo(fh=FileHandleT(self._vfs.open(inode, flags)), keep_cache=self._keeps_pages)

    @answered
    async def create(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        fh, known = vfs_write.create(self._vfs, parent_inode, name, mode, flags, _caller(ctx))
        return FileInfo(fh=FileHandleT(fh), keep_cache=self._keeps_pages), await self._new(known)

    @answered
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return self._vfs.read(fh, off, size)

    @answered
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        return self._vfs.write(fh, off, buf)

    @answered
    async def flush(self, fh: FileHandleT) -> None:
        raise FUSEError(errno.ENOSYS)  # once: nothing is held back that a close would have to write

    @answered
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        self._vfs.fsync(fh, data_only=datasync)

    @answered
    async def release(self, fh: FileHandleT) -> None:
        self._vfs.release(fh)

    # Listings.

    @answered
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        return FileHandleT(self._vfs.opendir(inode))

    @answered
    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        for listed in self._vfs.readdir(fh, start_id):
            is_taken = pyfuse3.readdir_reply(token, listed.name, entry_of(listed.known, self._timeouts), listed.offset)
            self._vfs.told(listed, is_taken=is_taken)
            if not is_taken:
                break

    @answered
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        self._vfs.fsync(fh, data_only=datasync)

    @answered
    async def releasedir(self, fh: FileHandleT) -> None:
        self._vfs.release(fh)


def _caller(ctx: RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid, ctx.umask)
