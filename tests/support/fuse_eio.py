"""A FUSE filesystem, passing everything through, on which what has certain names fails for ever.

    python -m tests.support.fuse_eio SRC MNT

The beginning of a name says which call fails with EIO: `unlink-`, `rmdir-`, `opendir-`, `readdir-` (in the middle
of the listing). What is unlinked while it is open gets a hidden name instead, a new one each time, as libfuse does.
"""

import contextlib
import errno
import os
import sys
from functools import partial
from pathlib import Path

import pyfuse3
from pyfuse3 import FileHandleT, InodeT, ReaddirToken, RequestContext

from tests.support.fuse_bad_rename import LyingFs, Mode, serve
from tests.support.fuse_watchdog import served_volume

HIDDEN = b".fuse_hidden"
N_LISTED = 20
"""Names of a `readdir-` directory that are told before the listing fails."""


broken_volume = partial(served_volume, "fuse_eio")
"""The filesystem on a tmpfs, open to all users."""


class BrokenFs(LyingFs):
    """The handlers that fail."""

    def __init__(self, source: Path) -> None:
        super().__init__(source, Mode.HONEST, 0, {})
        self.n_hidden = 0
        self.hidden: set[int] = set()  # inode numbers, until they are closed

    def _fail_if(self, call: str, name: bytes) -> None:
        if name.startswith(call.encode() + b"-"):
            raise pyfuse3.FUSEError(errno.EIO)

    def _name(self, inode: int) -> bytes:
        """The last component of a path to it."""
        with contextlib.suppress(OSError):
            return os.path.basename(self._path(inode))
        return b""

    async def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        self._fail_if("unlink", name)
        directory = self._path(parent_inode)
        path = directory + b"/" + name
        ino = os.lstat(path).st_ino if os.path.lexists(path) else None
        if ino is None or ino not in self.open_files.values():
            await super().unlink(parent_inode, name, ctx)
            return
        self.n_hidden += 1
        hidden = b"%s%08d" % (HIDDEN, self.n_hidden)
        os.rename(path, directory + b"/" + hidden)
        self.hidden.add(ino)
        self._note_entry(parent_inode, hidden)

    async def release(self, fh: FileHandleT) -> None:
        """Close; what was hidden goes with its last fd."""
        ino = self.open_files[fh]
        await super().release(fh)
        if ino in self.hidden and ino not in self.open_files.values():
            with contextlib.suppress(OSError):  # it was removed as what it is, by a process that saw it
                os.unlink(self._path(ino))
            self.hidden.discard(ino)

    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        self._fail_if("rmdir", name)
        await super().rmdir(parent_inode, name, ctx)

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        self._fail_if("opendir", self._name(inode))
        return await super().opendir(inode, ctx)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        inode, names = self.listings[fh]
        if not self._name(inode).startswith(b"readdir-"):
            await super().readdir(fh, start_id, token)
            return
        if start_id == 0:
            names[:] = [os.fsencode(name) for name in sorted(os.listdir(fh))]
        if start_id >= N_LISTED:
            raise pyfuse3.FUSEError(errno.EIO)
        for position, name in enumerate(names[start_id:N_LISTED], start_id + 1):
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), self._note_entry(inode, name), position):
                break


def main() -> None:
    source, mount_point = map(Path, sys.argv[1:])
    serve(BrokenFs(source.resolve()), mount_point, "brokenfs", "default_permissions")


if __name__ == "__main__":
    main()
