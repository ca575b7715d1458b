"""A FUSE filesystem that squashes root, as an NFS server or a nodemap does: what root asks is judged as nobody's.

    python -m tests.support.fuse_squash SRC MNT ANONYMOUS

The kernel checks nothing (no default_permissions): each request is made on the source with the ids of who asks, and
root has those of ANONYMOUS there. Unlike with NFS, all directories above are judged with a name, not the last one.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from pyfuse3 import EntryAttributes, RequestContext

from fusefs.linux.syscalls import setfsgid, setfsuid, setgroups
from tests.support.fuse_bad_rename import LyingFs, Mode, serve
from tests.support.fuse_watchdog import FuseVolume, fuse_mount
from tests.support.real_filesystems import tmpfs_volume
from tests.support.trashd_command import support_program

ANONYMOUS = 65_534
_JUDGED = (
    "lookup", "setattr", "readlink", "mknod", "mkdir", "symlink", "link", "unlink", "rmdir", "rename", "open", "create",
    "opendir",
)  # fmt: skip


@contextlib.contextmanager
def squashing_volume(anonymous: int = ANONYMOUS, limit_s: float = 60) -> Iterator[FuseVolume]:
    """The filesystem on a tmpfs, open to all users: its root is world-writable and sticky, as /scratch often is.

    anonymous  who root is there; 0: nobody is squashed, as on a node that the server trusts
    Raises     TimeoutError: it hung, see fuse_mount
    """
    with tmpfs_volume() as base:
        backing = base / "backing"
        backing.mkdir()
        backing.chmod(0o1777)
        with squashed(backing, base / "mount", anonymous, limit_s) as mount_point:
            yield FuseVolume(mount_point, backing)


@contextlib.contextmanager
def squashed(backing: Path, mount_point: Path, anonymous: int = ANONYMOUS, limit_s: float = 60) -> Iterator[Path]:
    """One more node's view of a directory. Raises  TimeoutError"""
    mount_point.mkdir()
    with fuse_mount(support_program("fuse_squash", backing, mount_point, str(anonymous)), mount_point, limit_s):
        yield mount_point


class SquashingFs(LyingFs):
    """The handlers, each as who asked."""

    def __init__(self, source: Path, anonymous: int) -> None:
        super().__init__(source, Mode.HONEST, 0, {})
        self._anonymous = anonymous
        self._acts_as = 0
        setgroups(())

    @contextlib.contextmanager
    def _acting_as(self, uid: int) -> Iterator[None]:
        """With a user's ids on files, and without root's capabilities over them; of this thread alone."""
        before, self._acts_as = self._acts_as, uid
        try:
            self._change(uid)
            yield
        finally:
            self._acts_as = before
            self._change(before)

    def _change(self, uid: int) -> None:
        setfsgid(uid)
        setfsuid(uid)

    def _path(self, inode: int) -> bytes:
        with self._acting_as(0):  # the server finds its own files whoever asks
            return super()._path(inode)

    def _stat(self, inode: int) -> os.stat_result:
        with self._acting_as(0):  # the server finds its own files whoever asks
            return super()._stat(inode)

    def _made(self, parent: int, name: bytes, ctx: RequestContext, mode: int | None) -> EntryAttributes:
        """It belongs to who made it."""
        if mode is not None:
            os.chmod(self._child(parent, name), stat.S_IMODE(mode & ~ctx.umask))
        return self._note_entry(parent, name)


def _as_who_asks(name: str) -> Callable[..., Awaitable[Any]]:
    handler = getattr(LyingFs, name)

    async def judged(self: SquashingFs, *arguments: Any) -> Any:
        ctx: RequestContext = arguments[-1]
        with self._acting_as(ctx.uid or self._anonymous):
            return await handler(self, *arguments)

    return judged


for _name in _JUDGED:
    setattr(SquashingFs, _name, _as_who_asks(_name))


def main() -> None:
    source, mount_point, anonymous = sys.argv[1:]
    serve(SquashingFs(Path(source).resolve(), int(anonymous)), Path(mount_point), "squashfs")


if __name__ == "__main__":
    main()
