"""A FUSE filesystem, passing everything through, that loses files which were made without a name, as JuiceFS does.

    python -m tests.support.fuse_losing_tmpfiles SRC MNT ASKED

O_TMPFILE and linkat succeed, and the name is there for as long as the file is open; with its last fd the name goes.
ASKED is a file that gets a byte for each O_TMPFILE that the kernel hands on.
"""

import contextlib
import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, InodeT, RequestContext

from fusefs.core import fuse_protocol as wire
from fusefs.linux.fd import Fd
from fusefs.linux.mount_calls import mount, open_fuse
from fusefs.linux.statx import stat_at
from tests.support.fuse_bad_rename import LyingFs, Mode
from tests.support.fuse_watchdog import fuse_mount
from tests.support.real_filesystems import tmpfs_volume
from tests.support.trashd_command import support_program

_REPLY_BYTES_MAX = 1 << 20


class LosingVolume(NamedTuple):
    """The mount point, and a file with one byte for each request for a file without a name."""

    path: Path
    log_path: Path

    def n_unnamed(self) -> int:
        return self.log_path.stat().st_size


@contextlib.contextmanager
def losing_volume(limit_s: float = 60) -> Iterator[LosingVolume]:
    """The filesystem on a tmpfs, open to all users.

    Raises    TimeoutError: it hung, see fuse_mount
    """
    with tmpfs_volume() as base:
        backing, mount_point, log_path = base / "backing", base / "mount", base / "log"
        backing.mkdir()
        mount_point.mkdir()
        log_path.touch()
        with fuse_mount(support_program("fuse_losing_tmpfiles", backing, mount_point, log_path), mount_point, limit_s):
            yield LosingVolume(mount_point, log_path)


class LosingFs(LyingFs):
    """The handlers, and O_TMPFILE, which pyfuse3 does not know: it gets all other requests by a socket."""

    def __init__(self, source: Path, log_path: Path) -> None:
        super().__init__(source, Mode.HONEST, 0, {})
        self._log_path = log_path
        self._linked: dict[int, list[bytes]] = {}  # of each file without a name that is open: those it got

    def unnamed(self, request: bytes) -> bytes:
        """The reply to a request to make a file without a name."""
        _size, _opcode, unique, parent, uid, gid, _pid = wire.read_head(request)
        with self._log_path.open("ab") as log:
            log.write(b".")
        fd = os.open(self._path(parent), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.fchown(fd, uid, gid)
        attributes = stat_at(fd)
        self.open_files[fd] = attributes.ino
        self._linked[attributes.ino] = []
        body = wire.encode_entry(attributes.ino, attributes.ino, attributes, 0, 0) + wire.encode_open(fd, 0)
        return wire.encode_head(unique, len(body)) + body

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
        return self._note_entry(new_parent_inode, new_name)

    async def release(self, fh: FileHandleT) -> None:
        """Close; what never had a name of its own is gone then."""
        ino = self.open_files[fh]
        await super().release(fh)
        if ino not in self.open_files.values():
            for path in self._linked.pop(ino, []):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _pass_on_requests(fs: LosingFs, device: int, to: socket.socket) -> None:
    """Read requests, and leave all but O_TMPFILE to libfuse, until the mount is gone."""
    with contextlib.suppress(OSError):
        while True:
            request = os.read(device, wire.REQUEST_BYTES_MAX)
            if wire.read_head(request)[1] == wire.Opcode.TMPFILE:
                os.write(device, fs.unnamed(request))
            else:
                to.send(request)
    os._exit(0)


def _pass_on_replies(device: int, replies: socket.socket) -> None:
    while True:
        with contextlib.suppress(FileNotFoundError):  # of an interrupted request; libfuse passes over that, too
            os.write(device, replies.recv(_REPLY_BYTES_MAX))


def main() -> None:
    source, mount_point, log_path = sys.argv[1:]
    fs = LosingFs(Path(source).resolve(), Path(log_path).resolve())
    device = open_fuse()
    options = f"fd={int(device)},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    with Fd(os.open(mount_point, os.O_PATH)) as point:
        mount(b"losingfs", point, b"fuse.losingfs", 0, options.encode())
    ours, libfuses = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for act in (partial(_pass_on_requests, fs, device, ours), partial(_pass_on_replies, device, ours)):
        threading.Thread(target=act, daemon=True).start()
    pyfuse3.init(fs, f"/dev/fd/{libfuses.fileno()}", set())
    trio.run(pyfuse3.main)


if __name__ == "__main__":
    main()
