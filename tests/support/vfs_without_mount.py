"""A vfs without a mount: what the daemon has below pyfuse3, asked directly, and who asks it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import Opcode
from fusefs.core.inode_attributes import Attributes
from fusefs.core.nodeids import ROOT, NodeId
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller
from fusefs.linux.kernel import Kernel
from fusefs.mount.places.counters import Counters
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.opening import OpenedFile
from fusefs.mount.tree.vfs import Vfs


class Somebody(NamedTuple):
    """A process; linux.fuse_caller.Caller says what of it counts."""

    uid: int
    gid: int
    pid: int
    umask: int


class NameReply(NamedTuple):
    """What a reply says of a name."""

    nodeid: NodeId
    attributes: Attributes
    timeout_s: float
    attr_s: float


class Names:
    """Requests about names to a vfs, as a kernel makes them."""

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs

    def _ask(self, opcode: Opcode, nodeid: int, caller: Caller, own: bytes = b"", *strings: bytes) -> bytes:
        body = own + b"".join(string + b"\0" for string in strings)
        return self._vfs.names.answer(wire.request(opcode, nodeid, (caller.uid, caller.gid, caller.pid), body))

    def _entry(self, reply: bytes) -> NameReply:
        said = wire.read_entry(reply)
        node = self._vfs.nodes.get(said.nodeid) if said.nodeid else None
        of_node = (0, said.nodeid, 0) if node is None else (node.dev, node.ino, node.btime_ns)
        return NameReply(NodeId(said.nodeid), said.attributes_of(*of_node), said.name_s, said.attr_s)

    def lookup(self, parent: int, name: bytes, caller: Caller) -> NameReply:
        return self._entry(self._ask(Opcode.LOOKUP, parent, caller, b"", name))

    def readlink(self, nodeid: int, caller: Caller) -> bytes:
        return self._ask(Opcode.READLINK, nodeid, caller)

    def _opened(self, reply: bytes) -> tuple[OpenedFile, NameReply]:
        return OpenedFile(wire.handle_in(reply), 0, keeps=True), self._entry(reply)

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[OpenedFile, NameReply]:
        own = wire.CREATE_IN.pack(flags, mode, caller.umask)
        return self._opened(self._ask(Opcode.CREATE, parent, caller, own, name))

    def create_unnamed(self, parent: int, mode: int, flags: int, caller: Caller) -> tuple[OpenedFile, NameReply]:
        own = wire.CREATE_IN.pack(flags, mode, caller.umask)
        return self._opened(self._ask(Opcode.TMPFILE, parent, caller, own, b"/"))

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> NameReply:
        own = wire.MKNOD_IN.pack(mode, rdev, caller.umask)
        return self._entry(self._ask(Opcode.MKNOD, parent, caller, own, name))

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> NameReply:
        return self._entry(self._ask(Opcode.MKDIR, parent, caller, wire.MKDIR_IN.pack(mode, caller.umask), name))

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> NameReply:
        return self._entry(self._ask(Opcode.SYMLINK, parent, caller, b"", name, target))

    def link(self, nodeid: int, parent: int, name: bytes, caller: Caller) -> NameReply:
        return self._entry(self._ask(Opcode.LINK, parent, caller, wire.LINK_IN.pack(nodeid), name))

    def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        self._ask(Opcode.UNLINK, parent, caller, b"", name)

    def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        self._ask(Opcode.RMDIR, parent, caller, b"", name)

    def rename(self, old_parent: int, old: bytes, parent: int, new: bytes, flags: int, caller: Caller) -> None:
        self._ask(Opcode.RENAME2, old_parent, caller, wire.RENAME2_IN.pack(parent, flags), old, new)


@contextmanager
def vfs_at(
    path: Path, *, max_fds: int = 100, timeout_s: float = 0, is_shared: bool = False, is_slow: bool = False
) -> Iterator[Vfs]:
    """The tree below a directory, as a daemon has it."""
    with Fd(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        lock = TablesLock(is_slow=is_slow)
        vfs = Vfs(root, lock, Counters.in_memory(), max_fds=max_fds, timeout_s=timeout_s, is_shared=is_shared)
        try:
            yield vfs
        finally:
            vfs.close()


def move_into_drop(volume: Path, path: Path, kernel: Kernel) -> None:
    """What a daemon does when the owner of something below a volume moves it to the owner's drop folder."""
    with vfs_at(volume) as vfs:
        uid = path.lstat().st_uid
        [drop] = [found for found in volume.glob(".trashd/[un]*/*/drop") if found.stat().st_uid == uid]
        mover = Somebody(uid, uid, os.getpid(), 0o022)
        vfs.names.adoption.kernel = kernel

        def nodeid(at: Path) -> int:
            above = ROOT if at == volume else nodeid(at.parent)
            return above if at == volume else Names(vfs).lookup(above, os.fsencode(at.name), mover).nodeid

        old, new = os.fsencode(path.name), b"dropped"
        Names(vfs).rename(nodeid(path.parent), old, nodeid(drop), new, 0, mover)
