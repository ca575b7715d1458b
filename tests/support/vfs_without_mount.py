"""A vfs without a mount: what the daemon has below pyfuse3, asked directly, and who asks it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import Opcode
from fusefs.core.nodeids import ROOT
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller
from fusefs.linux.kernel import Kernel
from fusefs.mount.places.counters import Counters
from fusefs.mount.requests.native_core import native_core
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.vfs import Vfs


class Somebody(NamedTuple):
    """A process; linux.fuse_caller.Caller says what of it counts."""

    uid: int
    gid: int
    pid: int
    umask: int


@contextmanager
def vfs_at(
    path: Path, *, max_fds: int = 100, timeout_s: float = 0, is_shared: bool = False, is_slow: bool = False
) -> Iterator[Vfs]:
    """The tree below a directory, as a daemon has it."""
    with Fd(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        lock = TablesLock(is_slow=is_slow)
        vfs = Vfs(root, lock, Counters.in_memory(), max_fds=max_fds, timeout_s=timeout_s, is_shared=is_shared)
        native_core(vfs, None, -1)
        try:
            yield vfs
        finally:
            vfs.close()


class Listings:
    """Requests about directories that are read to a vfs, as a kernel makes them."""

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs

    def _ask(self, opcode: Opcode, nodeid: int, own: bytes, caller: Caller | None = None) -> bytes:
        ids = (0, 0, os.getpid()) if caller is None else (caller.uid, caller.gid, caller.pid)
        with self._vfs.lock:
            return self._vfs.listings.answer(wire.request(opcode, nodeid, ids, own))

    def opendir(self, nodeid: int, caller: Caller) -> int:
        return wire.handle_in(self._ask(Opcode.OPENDIR, nodeid, bytes(wire.OPEN_IN.size), caller))

    def entries(self, nodeid: int, offset: int = 0, *, fh: int = 0, room: int = 4096) -> list[wire.Listed]:
        """Those of one reply."""
        return list(wire.direntplus_in(self._ask(Opcode.READDIRPLUS, nodeid, wire.READ_IN.pack(fh, offset, room))))

    def releasedir(self, fh: int) -> None:
        self._ask(Opcode.RELEASEDIR, 0, wire.HANDLE_IN.pack(fh) + bytes(16))


def move_into_drop(volume: Path, path: Path, kernel: Kernel) -> None:
    """What a daemon does when the owner of something below a volume moves it to the owner's drop folder."""
    with vfs_at(volume) as vfs:
        uid = path.lstat().st_uid
        [drop] = [found for found in volume.glob(".trashd/[un]*/*/drop") if found.stat().st_uid == uid]
        mover = Somebody(uid, uid, os.getpid(), 0o022)
        vfs.names.adoption.kernel = kernel

        def nodeid(at: Path) -> int:
            above = ROOT if at == volume else nodeid(at.parent)
            return above if at == volume else vfs.lookups.lookup(above, os.fsencode(at.name), mover).nodeid

        old, new = os.fsencode(path.name), b"dropped"
        vfs.names.rename(nodeid(path.parent), old, nodeid(drop), new, 0, mover)
