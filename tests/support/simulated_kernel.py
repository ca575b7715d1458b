"""The vfs in this process, with a player of the kernel's part: walks paths, follows links, counts references.

What the kernel decides by itself before it asks a FUSE filesystem (ELOOP, EISDIR at an open) is decided here too;
what it leaves to the filesystem (EEXIST, ENOTEMPTY, ENAMETOOLONG) goes to the vfs. The caller is root.
"""

import contextlib
import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

from fusefs.core.fuse_protocol import Entry
from fusefs.core.metadata_cache import Attributes
from fusefs.mount.tree.kernel_timeouts import EntryParam
from fusefs.mount.tree.vfs import Vfs
from tests.support.fake_dev_fuse import Changes, DirectoryRequests, Files, NameReply, Names, Somebody
from tests.support.oracle_subjects import KEEP, FileAttributes, Handle, Subject, Times, see

ROOT = 1
_MAX_LINKS = 40
_ROOM = 512
"""Of a reply to READDIRPLUS: for one entry with the longest name."""
_XATTR_NAME_MAX = 255


class Player(Subject):
    """A kernel without a cache: each call walks from the root, and forgets what it looked up.

    references  how often the vfs told of each node, less what was forgotten; its table must agree (I7)
    """

    def __init__(self, name: str, vfs: Vfs, top: bytes) -> None:
        """top: the directory below the vfs's root to work in."""
        self.name = name
        self.vfs = vfs
        self.top = top
        self.references: Counter[int] = Counter()
        self._files = Files(vfs)
        self._umask = 0o022
        self._late: list[int] | None = None

    @property
    def _caller(self) -> Somebody:
        return Somebody(uid=0, gid=0, pid=os.getpid(), umask=self._umask)

    # References.

    def _count(self, reply: NameReply | EntryParam | Entry) -> int:
        self.references[reply.nodeid] += 1
        return reply.nodeid

    def _forget(self, nodeid: int) -> None:
        if nodeid == ROOT:
            return
        if self._late is not None:
            self._late.append(nodeid)
            return
        self.references[nodeid] -= 1
        if not self.references[nodeid]:
            del self.references[nodeid]
        Names(self.vfs).forget(nodeid, 1)

    @contextlib.contextmanager
    def forgetting_late(self) -> Iterator[None]:
        """Keep every reference to the end of the `with`, as a kernel with memory to spare does."""
        self._late = []
        try:
            yield
        finally:
            late, self._late = self._late, None
            for nodeid in late:
                self._forget(nodeid)

    def _attributes(self, nodeid: int) -> Attributes:
        return self._files.getattr(nodeid, self._caller).attributes

    # Walking.

    def _lookup(self, parent: int, name: bytes) -> int:
        entry = Names(self.vfs).lookup(parent, name, self._caller)
        if not entry.nodeid:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._count(entry)

    def _resolve(self, path: bytes, *, follow: bool) -> tuple[int, bytes, int | None]:
        """The last directory on a path, the last name, and its node if it has one: a reference to each node.

        All that it looks up is forgotten if it fails.
        """
        names, n_links = self._names(path), 0
        parent, name, at = ROOT, b"", ROOT
        try:
            while names:
                if not stat.S_ISDIR(self._attributes(at).mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                self._forget(parent)
                parent, name, at = at, names.pop(), ROOT
                try:
                    at = self._lookup(parent, name)
                except FileNotFoundError:
                    if names:
                        raise
                    return parent, name, None
                if stat.S_ISLNK(self._attributes(at).mode) and (names or follow):
                    n_links += 1
                    if n_links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    # Relative to the link's directory; the oracle has no other links.
                    names += reversed(Names(self.vfs).readlink(at, self._caller).split(b"/"))
                    self._forget(at)
                    parent, at = ROOT, parent
        except OSError:
            self._forget(parent)
            self._forget(at)
            raise
        return parent, name, at

    def _names(self, path: bytes) -> list[bytes]:
        return [name for name in reversed([*self.top.split(b"/"), *path.split(b"/")]) if name not in (b"", b".")]

    @contextlib.contextmanager
    def _node(self, path: bytes, *, follow: bool = False) -> Iterator[int]:
        parent, name, nodeid = self._resolve(path, follow=follow)
        self._forget(parent)
        if nodeid is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        try:
            yield nodeid
        finally:
            self._forget(nodeid)

    @contextlib.contextmanager
    def _parent(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        above, _, name = path.rpartition(b"/")
        with self._node(above, follow=True) as nodeid:
            if not stat.S_ISDIR(self._attributes(nodeid).mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            yield nodeid, name

    # Handles: each holds a reference to its node.

    def open(self, path: bytes, flags: int = os.O_RDONLY, mode: int = 0o666) -> Handle:
        follow = not flags & os.O_NOFOLLOW and flags & (os.O_CREAT | os.O_EXCL) != os.O_CREAT | os.O_EXCL
        parent, name, nodeid = self._resolve(path, follow=follow)
        try:
            if nodeid is None:
                if not flags & os.O_CREAT:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                made = mode | stat.S_IFREG
                opened, reply = Names(self.vfs).create(parent, name, made, flags, self._caller)
                return Handle(opened.fh, self._count(reply), flags)
        finally:
            self._forget(parent)
        try:
            return Handle(self._open_there(nodeid, flags), nodeid, flags)
        except OSError:
            self._forget(nodeid)
            raise

    def _open_there(self, nodeid: int, flags: int) -> int:
        kind = self._attributes(nodeid).mode
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if stat.S_ISLNK(kind):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if stat.S_ISDIR(kind) and (flags & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC)):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return self._files.open(nodeid, flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOCTTY), self._caller).fh

    def close(self, handle: Handle) -> None:
        self._files.release(handle.number)
        self._forget(handle.nodeid)

    def pread(self, handle: Handle, size: int, offset: int) -> bytes:
        return self._files.read(handle.number, offset, size)

    def pwrite(self, handle: Handle, data: bytes, offset: int) -> int:
        if handle.flags & os.O_APPEND:
            offset = self._attributes(handle.nodeid).size
        return self._files.write(handle.number, offset, data)

    def fsync(self, handle: Handle) -> None:
        self._files.fsync(handle.number)

    def ftruncate(self, handle: Handle, size: int) -> None:
        self._files.setattr(handle.nodeid, Changes(size=size), handle.number, self._caller)

    def fstat(self, handle: Handle) -> FileAttributes:
        return self._see(handle.nodeid)

    def fchmod(self, handle: Handle, mode: int) -> None:
        self._files.setattr(handle.nodeid, Changes(mode=mode), handle.number, self._caller)

    # Looking.

    def stat(self, path: bytes) -> FileAttributes:
        with self._node(path) as nodeid:
            return self._see(nodeid)

    def _see(self, nodeid: int) -> FileAttributes:
        a = self._attributes(nodeid)
        return see(a.mode, a.nlink, a.uid, a.gid, a.rdev, a.size, a.blocks)

    def times(self, path: bytes) -> Times:
        with self._node(path) as nodeid:
            a = self._attributes(nodeid)
            return Times(a.atime_ns, a.mtime_ns)

    def ctime_ns(self, path: bytes) -> int:
        with self._node(path) as nodeid:
            return self._attributes(nodeid).ctime_ns

    def ino(self, path: bytes) -> int:
        with self._node(path) as nodeid:
            return nodeid

    def readlink(self, path: bytes) -> bytes:
        with self._node(path) as nodeid:
            if not stat.S_ISLNK(self._attributes(nodeid).mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return Names(self.vfs).readlink(nodeid, self._caller)

    def listdir(self, path: bytes) -> list[bytes]:
        with self._node(path, follow=True) as nodeid:
            if not stat.S_ISDIR(self._attributes(nodeid).mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            fh = DirectoryRequests(self.vfs).opendir(nodeid, self._caller)
            try:
                return sorted(self._list(nodeid, fh))
            finally:
                DirectoryRequests(self.vfs).releasedir(fh)

    def _list(self, nodeid: int, fh: int) -> Iterator[bytes]:
        """Names, a few an answer, so that every offset is a place to go on from."""
        offset = 0
        while listed := DirectoryRequests(self.vfs).entries(nodeid, offset, fh=fh, room=_ROOM):
            for one in listed:
                offset = one.offset
                if one.entry.nodeid:
                    self._forget(self._count(one.entry))
                if one.name not in (b".", b".."):
                    yield one.name

    def statvfs(self) -> tuple[int, ...]:
        blocks, _free, _available, inodes, _free_inodes, block_size, name_max, unit = self._files.statfs()
        return block_size, unit, blocks, inodes, name_max

    def getxattr(self, path: bytes, name: str) -> bytes:
        with self._named(path, name, os.getxattr) as nodeid:
            return self._files.getxattr(nodeid, name.encode(), self._caller)

    def listxattr(self, path: bytes) -> list[str]:
        with self._node(path) as nodeid:
            return sorted(os.fsdecode(name) for name in self._files.listxattr(nodeid, self._caller))

    # Changing.

    def mkdir(self, path: bytes, mode: int = 0o777) -> None:
        with self._parent(path) as (parent, name):
            self._forget(self._count(Names(self.vfs).mkdir(parent, name, mode, self._caller)))

    def mknod(self, path: bytes, mode: int, rdev: int = 0) -> None:
        with self._parent(path) as (parent, name):
            self._forget(self._count(Names(self.vfs).mknod(parent, name, mode, rdev, self._caller)))

    def symlink(self, target: bytes, path: bytes) -> None:
        with self._parent(path) as (parent, name):
            self._forget(self._count(Names(self.vfs).symlink(parent, name, target, self._caller)))

    def link(self, old: bytes, new: bytes) -> None:
        with self._node(old) as nodeid, self._parent(new) as (parent, name):
            self._forget(self._count(Names(self.vfs).link(nodeid, parent, name, self._caller)))

    def unlink(self, path: bytes) -> None:
        with self._parent(path) as (parent, name):
            Names(self.vfs).unlink(parent, name, self._caller)

    def rmdir(self, path: bytes) -> None:
        with self._parent(path) as (parent, name):
            Names(self.vfs).rmdir(parent, name, self._caller)

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        with self._parent(old) as (old_parent, old_name), self._parent(new) as (new_parent, new_name):
            Names(self.vfs).rename(old_parent, old_name, new_parent, new_name, flags, self._caller)

    def _change(self, path: bytes, changes: Changes, *, follow: bool = False) -> None:
        with self._node(path, follow=follow) as nodeid:
            self._files.setattr(nodeid, changes, None, self._caller)

    def chmod(self, path: bytes, mode: int) -> None:
        self._change(path, Changes(mode=mode), follow=True)

    def chown(self, path: bytes, uid: int, gid: int) -> None:
        changes = Changes(uid=None if uid == KEEP else uid, gid=None if gid == KEEP else gid)
        with self._node(path) as nodeid:
            if changes == Changes():  # the kernel makes a chmod of it
                mode = self._attributes(nodeid).mode
                killed = stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0)
                if stat.S_ISREG(mode) and mode & killed:
                    changes = Changes(mode=mode & ~killed)
            self._files.setattr(nodeid, changes, None, self._caller)

    def utime(self, path: bytes, atime_ns: int, mtime_ns: int) -> None:
        self._change(path, Changes(atime_ns=atime_ns, mtime_ns=mtime_ns))

    def truncate(self, path: bytes, size: int) -> None:
        with self._node(path, follow=True) as nodeid:
            mode = self._attributes(nodeid).mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "")
            self._files.setattr(nodeid, Changes(size=size), None, self._caller)

    def setxattr(self, path: bytes, name: str, value: bytes, flags: int = 0) -> None:
        with self._named(path, name, _set_nothing) as nodeid:
            self._check_kind(nodeid, name)
            if flags:  # pyfuse3 looks by itself, and hands no flags on
                try:
                    self._files.getxattr(nodeid, name.encode(), self._caller)
                except OSError as error:
                    if error.errno != errno.ENODATA or flags & os.XATTR_REPLACE:
                        raise
                else:
                    if flags & os.XATTR_CREATE:
                        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
            self._files.setxattr(nodeid, name.encode(), value, self._caller)

    @contextlib.contextmanager
    def _named(self, path: bytes, xattr: str, call: Callable[[str, str], object]) -> Iterator[int]:
        """What a path leads to, of a call that names an attribute."""
        if _is_name_first(call):
            _check_length(xattr)
        with self._node(path) as nodeid:
            _check_length(xattr)
            yield nodeid

    def _check_kind(self, nodeid: int, name: str) -> None:
        """Only files and directories have users' attributes."""
        mode = self._attributes(nodeid).mode
        if name.startswith("user.") and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    def removexattr(self, path: bytes, name: str) -> None:
        with self._named(path, name, os.removexattr) as nodeid:
            self._check_kind(nodeid, name)
            self._files.removexattr(nodeid, name.encode(), self._caller)

    @contextlib.contextmanager
    def umask(self, mask: int) -> Iterator[None]:
        older, self._umask = self._umask, mask
        try:
            yield
        finally:
            self._umask = older


def _check_length(xattr: str) -> None:
    if len(xattr) > _XATTR_NAME_MAX:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))


def _set_nothing(path: str, xattr: str) -> None:
    os.setxattr(path, xattr, b"")


@cache
def _is_name_first(call: Callable[[str, str], object]) -> bool:
    """Whether this kernel looks at an attribute's name before it walks: each call does since another version."""
    try:
        call("/proc/self/absent", "user." + "n" * _XATTR_NAME_MAX)
    except OSError as error:
        return error.errno == errno.ERANGE
    raise AssertionError("such a name is refused")
