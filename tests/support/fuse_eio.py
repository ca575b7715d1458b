"""A FUSE filesystem, passing everything through, on which what has certain names fails for ever.

    python -m tests.support.fuse_eio SRC MNT

The beginning of a name says which call fails with EIO: `unlink-`, `rmdir-`, `opendir-`, `readdir-` (in the middle
of the listing). What is unlinked while it is open gets a hidden name instead, a new one each time, as libfuse does.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyfuse3
from pyfuse3 import FileHandleT, InodeT, ReaddirToken, RequestContext

from tests.support.fuse_bad_rename import LyingFs, Mode, serve
from tests.support.fuse_watchdog import ServedVolume, fuse_mount
from tests.support.real_filesystems import tmpfs_volume

HIDDEN = b".fuse_hidden"
N_LISTED = 20
"""Names of a `readdir-` directory that are told before the listing fails."""


@contextlib.contextmanager
def broken_volume(limit_s: float = 60) -> Iterator[ServedVolume]:
    """The filesystem on a tmpfs, open to all users.

    Raises    TimeoutError: it hung, see fuse_mount
    """
    repo = Path(__file__).resolve().parents[2]
    with tmpfs_volume() as base:
        backing, mount_point = base / "backing", base / "mount"
        backing.mkdir()
        mount_point.mkdir()
        module = ["env", f"PYTHONPATH={repo}", sys.executable, "-m", "tests.support.fuse_eio"]
        with fuse_mount([*module, str(backing), str(mount_point)], mount_point, limit_s):
            yield ServedVolume(mount_point, backing)


class BrokenFs(LyingFs):
    """The handlers that fail."""

    def __init__(self, source: Path) -> None:
        """Serve `source`."""
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
        """Fail, or hide, or unlink."""
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
        self._found(parent_inode, hidden)

    async def release(self, fh: FileHandleT) -> None:
        """Close; what was hidden goes with its last fd."""
        ino = self.open_files[fh]
        await super().release(fh)
        if ino in self.hidden and ino not in self.open_files.values():
            with contextlib.suppress(OSError):  # it was removed as what it is, by a process that saw it
                os.unlink(self._path(ino))
            self.hidden.discard(ino)

    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        """Fail, or remove."""
        self._fail_if("rmdir", name)
        await super().rmdir(parent_inode, name, ctx)

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Fail, or open."""
        self._fail_if("opendir", self._name(inode))
        return await super().opendir(inode, ctx)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """Fail after some names, or list."""
        inode, names = self.listings[fh]
        if not self._name(inode).startswith(b"readdir-"):
            await super().readdir(fh, start_id, token)
            return
        if start_id == 0:
            names[:] = [os.fsencode(name) for name in sorted(os.listdir(fh))]
        if start_id >= N_LISTED:
            raise pyfuse3.FUSEError(errno.EIO)
        for position, name in enumerate(names[start_id:N_LISTED], start_id + 1):
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), self._found(inode, name), position):
                break


def main() -> None:
    """Serve until unmounted."""
    parser = argparse.ArgumentParser(prog="brokenfs")
    parser.add_argument("source", type=Path)
    parser.add_argument("mount_point", type=Path)
    given = parser.parse_args()
    handlers = BrokenFs(given.source.resolve())
    serve(handlers, given.mount_point, "brokenfs")


if __name__ == "__main__":
    main()
