"""A FUSE filesystem, passing everything through, that loses files which were made without a name, as JuiceFS does.

    python -m tests.support.fuse_losing_tmpfiles SRC MNT ASKED

O_TMPFILE and linkat succeed, and the name is there for as long as the file is open; with its last fd the name goes.
ASKED is a file that gets a byte for each O_TMPFILE that the kernel hands on.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, InodeT, RequestContext

from fusefs.core import fuse_protocol as wire
from fusefs.linux.statx import look_at
from fusefs.mount.bridge import pyfuse3_loop
from fusefs.mount.bridge.reply_patching import ReplyPatching
from tests.support.fuse_bad_rename import LyingFs, Mode
from tests.support.fuse_waiting import read_request, session_fd
from tests.support.fuse_watchdog import fuse_mount
from tests.support.real_filesystems import tmpfs_volume
from tests.support.trashd_command import support_program


class LosingVolume(NamedTuple):
    """Its mount point, and where it notes what it was asked."""

    path: Path
    asked: Path

    def n_unnamed(self) -> int:
        return self.asked.stat().st_size


@contextlib.contextmanager
def losing_volume(limit_s: float = 60) -> Iterator[LosingVolume]:
    """The filesystem on a tmpfs, open to all users.

    Raises    TimeoutError: it hung, see fuse_mount
    """
    with tmpfs_volume() as base:
        backing, mount_point, asked = base / "backing", base / "mount", base / "asked"
        backing.mkdir()
        mount_point.mkdir()
        asked.touch()
        with fuse_mount(support_program("fuse_losing_tmpfiles", backing, mount_point, asked), mount_point, limit_s):
            yield LosingVolume(mount_point, asked)


class LosingFs(LyingFs):
    """The handlers, and O_TMPFILE, which pyfuse3 does not know."""

    def __init__(self, source: Path, asked: Path) -> None:
        super().__init__(source, Mode.HONEST, 0, {})
        self.replies: ReplyPatching | None = None
        self._asked = asked
        self._linked: dict[int, list[bytes]] = {}  # of each file without a name that is open: those it got

    def replied(self) -> None:
        if self.replies is not None:
            self.replies.replied()

    def serve(self) -> bool | None:
        """Read one request: O_TMPFILE is answered here, all else is pyfuse3's. For pyfuse3_loop.serve_by."""
        assert self.replies is not None
        request = read_request(self.replies.device)
        if not request:
            return None if request is None else False
        _size, opcode, unique, nodeid, uid, gid, _pid = wire.read_head(request)
        if opcode == wire.Opcode.TMPFILE:
            self._make_unnamed(unique, nodeid, uid, gid)
            return True
        self.replies.hand_over(request)
        return False

    def _make_unnamed(self, unique: int, parent: int, uid: int, gid: int) -> None:
        assert self.replies is not None
        with self._asked.open("ab") as asked:
            asked.write(b".")
        fd = os.open(self._path(parent), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.fchown(fd, uid, gid)
        seen = look_at(fd)
        self.open_files[fd] = seen.ino
        self._linked[seen.ino] = []
        answer = wire.create_answer()
        wire.put_number(answer, wire.NUMBER_AT, unique)
        wire.put_entry(answer, seen.ino, seen.ino, seen, 0, 0)
        wire.put_opened(answer, fd, 0)
        os.write(self.replies.device, answer)

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        if inode not in self._linked:
            return await super().link(inode, new_parent_inode, new_name, ctx)
        (fd,) = (fd for fd, ino in self.open_files.items() if ino == inode)
        path = self._child(new_parent_inode, new_name)
        try:
            # Without a directory's fd Python would not follow the magic link.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        self._linked[inode].append(path)
        return self._found(new_parent_inode, new_name)

    async def release(self, fh: FileHandleT) -> None:
        """Close; what never had a name of its own is gone then."""
        ino = self.open_files[fh]
        await super().release(fh)
        if ino not in self.open_files.values():
            for path in self._linked.pop(ino, []):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


async def _serve(fs: LosingFs) -> None:
    pyfuse3_loop.serve_by(fs.serve)
    await pyfuse3.main()


def main() -> None:
    source, mount_point, asked = sys.argv[1:]
    fs = LosingFs(Path(source).resolve(), Path(asked).resolve())
    assert pyfuse3_loop.hook(fs.replied, lambda: None)
    pyfuse3.init(fs, mount_point, {"fsname=losingfs", "subtype=losingfs", "allow_other", "default_permissions"})
    fs.replies = ReplyPatching(session_fd())
    try:
        trio.run(partial(_serve, fs))
    finally:
        fs.replies.close()
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
