"""A FUSE filesystem that knows what directories hold, and says so as CephFS or JuiceFS's Enterprise Edition does.

python -m tests.support.fuse_dirstat SRC MNT ceph|juicefs
"""

import errno
import os
import stat
import sys
from functools import partial
from pathlib import Path

import pyfuse3
from pyfuse3 import EntryAttributes, InodeT, RequestContext

from tests.support.fuse_bad_rename import LyingFs, Mode, serve
from tests.support.fuse_watchdog import served_volume

knowing_volume = partial(served_volume, "fuse_dirstat")
"""The filesystem on a tmpfs; of a kind: `ceph`, `juicefs`."""


def sums_of(top: bytes | Path) -> tuple[int, int]:
    """The bytes of all files in a directory as long as they say they are, and all entries, itself among them."""
    n_bytes = n_entries = 0
    for upper, _directories, files in os.walk(os.fsencode(top)):
        n_bytes += sum(os.lstat(os.path.join(upper, name)).st_size for name in files)
        n_entries += 1 + len(files)
    return n_bytes, n_entries


class KnowingFs(LyingFs):
    """The handlers: all others' are honest."""

    def __init__(self, source: Path, kind: str) -> None:
        super().__init__(source, Mode.HONEST, 0.0, {})
        self.kind = kind

    async def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        st = self._stat(inode)
        sums = dict(zip((b"ceph.dir.rbytes", b"ceph.dir.rentries"), sums_of(self._path(inode)), strict=True))
        if self.kind != "ceph" or not stat.S_ISDIR(st.st_mode) or name not in sums:
            raise pyfuse3.FUSEError(errno.ENODATA)
        return b"%d" % sums[name]

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        entry = await super().getattr(inode, ctx)
        if self.kind == "juicefs" and stat.S_ISDIR(entry.st_mode):
            entry.st_size = sums_of(self._path(inode))[0]
        return entry


def main() -> None:
    source, point, kind = sys.argv[1:]
    serve(KnowingFs(Path(source).resolve(), kind), Path(point), kind, "default_permissions")


if __name__ == "__main__":
    main()
