"""A FUSE filesystem of one directory with empty files, whose names are found in upper and lower case alike.

python -m tests.support.fuse_casefold MNT NAME...
"""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, InodeT, ModeT, ReaddirToken, RequestContext

from tests.support.fuse_watchdog import fuse_mount
from tests.support.real_filesystems import tmpfs_volume
from tests.support.trashd_command import support_program


@contextlib.contextmanager
def folding_volume(names: Sequence[str], limit_s: float = 60) -> Iterator[Path]:
    """Its mount point. Raises  TimeoutError: it hung, see fuse_mount"""
    with tmpfs_volume() as base:
        point = base / "mount"
        point.mkdir()
        with fuse_mount(support_program("fuse_casefold", point, *names), point, limit_s):
            yield point


class FoldingFs(pyfuse3.Operations):
    """The handlers: the nodeid of a name is its place in the list."""

    def __init__(self, names: Sequence[bytes]) -> None:
        super().__init__()
        self.names = list(names)
        self.folded = [name.lower() for name in names]

    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name.lower() not in self.folded:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._entry(2 + self.folded.index(name.lower()))

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return self._entry(inode)

    def _entry(self, inode: int) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = InodeT(inode)
        kind = stat.S_IFDIR | 0o755 if inode == pyfuse3.ROOT_INODE else stat.S_IFREG | 0o644
        entry.st_mode = ModeT(kind)
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        return FileHandleT(inode)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        for number, name in enumerate(self.names[start_id:], start_id):
            if not pyfuse3.readdir_reply(token, name, self._entry(2 + number), number + 1):
                break

    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        return pyfuse3.StatvfsData()


def main() -> None:
    point, *names = sys.argv[1:]
    pyfuse3.init(FoldingFs([os.fsencode(name) for name in names]), point, {"fsname=foldingfs"})
    trio.run(pyfuse3.main)
    pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
