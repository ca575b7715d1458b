"""A FUSE filesystem, passing everything through, whose rename treats flags as badly as some real ones do.

    python -m tests.support.fuse_bad_rename SRC MNT [--mode MODE] [--timeout S] [--fail OP:ERRNO:N]...

By path and one request at a time: correct and slow. There are no xattrs, O_TMPFILE and fallocate; the
kernel keeps locks by itself.
"""

import argparse
import contextlib
import ctypes
import enum
import errno
import functools
import os
import stat
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FlagT, InodeT, ModeT, ReaddirToken, RequestContext

from tests.support.fuse_watchdog import FuseVolume, served_volume

RENAME_EXCHANGE = 2

P = ParamSpec("P")
R = TypeVar("R")

_AT_FDCWD = -100
_ROOT = pyfuse3.ROOT_INODE
_libc = ctypes.CDLL(None, use_errno=True)


class Mode(enum.StrEnum):
    """What rename makes of flags."""

    HONEST = "honest"
    IGNORE = "ignore"  # a plain rename, and success: s3fs-fuse before PR 2933, cryfs PR 568
    LIE = "lie"  # EXCHANGE does nothing and succeeds; the other flags are honest
    EINVAL = "einval"  # sshfs and most of the others; the errno for every flag
    ENOSYS = "enosys"  # the kernel makes EINVAL of it, and asks no more
    EOPNOTSUPP = "eopnotsupp"


def renameat2(old: Path, new: Path, flags: int) -> None:
    """renameat2(2) with paths.

    Raises    OSError
    """
    if _libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(old), None, os.fspath(new))


def lying_volume(
    mode: str, fails: Sequence[str] = (), *, timeout_s: float = 0, limit_s: float = 60
) -> contextlib.AbstractContextManager[FuseVolume]:
    """The filesystem on a tmpfs, open to all users.

    mode       one of Mode
    fails      OP:ERRNO:N each: the N-th call of a handler fails once, such as rename:EIO:3
    timeout_s  how long the kernel believes names and attributes; libfuse's own default is 1. For that time it
               believes a lie too: it swaps its own dentries when an exchange reports success
    Raises     TimeoutError: it hung, see fuse_mount
    """
    options = [f"--mode={mode}", f"--timeout={timeout_s}", *(f"--fail={fault}" for fault in fails)]
    return served_volume("fuse_bad_rename", *options, limit_s=limit_s)


def _handler(
    function: Callable[Concatenate["LyingFs", P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate["LyingFs", P], Coroutine[Any, Any, R]]:
    """Count the call, fail where asked to, let nothing but FUSEError out: anything else ends the mount."""

    @functools.wraps(function)
    async def wrapper(self: "LyingFs", /, *args: P.args, **kwargs: P.kwargs) -> R:
        name = function.__name__
        self.n_calls[name] += 1
        if (number := self.faults.pop((name, self.n_calls[name]), None)) is not None:
            raise pyfuse3.FUSEError(number)
        try:
            return await function(self, *args, **kwargs)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error

    return wrapper


class LyingFs(pyfuse3.Operations):
    """The handlers. An inode is never forgotten: a test is short."""

    def __init__(self, source: Path, mode: Mode, timeout_s: float, faults: dict[tuple[str, int], int]) -> None:
        """Serve `source`; faults: (handler, number of the call) → errno."""
        super().__init__()
        self.source = os.fsencode(source)
        self.mode = mode
        self.timeout_s = timeout_s
        self.faults = faults
        self.n_calls: Counter[str] = Counter()
        self.names: dict[int, list[tuple[int, bytes]]] = {}  # of an inode: (parent, name), the newest last
        self.n_lives: Counter[int] = Counter()  # the generation: how often a number's last name went
        self.open_files: dict[int, int] = {}  # backing fd → inode number
        self.listings: dict[int, tuple[int, list[bytes]]] = {}  # fd → inode number, names

    def _path(self, inode: int) -> bytes:
        """A path that leads to the inode now; names that lead elsewhere are dropped.

        Raises    OSError: ESTALE, no name is left
        """
        if inode == _ROOT:
            return self.source
        names = self.names.get(inode, [])
        while names:
            parent, name = names[-1]
            with contextlib.suppress(OSError):
                path = self._path(parent) + b"/" + name
                if os.lstat(path).st_ino == inode:
                    return path
            names.pop()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def _child(self, parent: int, name: bytes) -> bytes:
        return self._path(parent) + b"/" + name

    def _note_entry(self, parent: int, name: bytes) -> EntryAttributes:
        """Note the name of an inode; return its attributes."""
        st = os.lstat(self._child(parent, name))
        names = self.names.setdefault(st.st_ino, [])
        if (parent, name) in names:
            names.remove((parent, name))
        names.append((parent, name))
        return self._attributes(st)

    def _attributes(self, st: os.stat_result) -> EntryAttributes:
        entry = EntryAttributes()
        same = ("mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks")
        for name in (*same, "atime_ns", "mtime_ns", "ctime_ns"):
            setattr(entry, f"st_{name}", getattr(st, f"st_{name}"))
        entry.st_ino = InodeT(st.st_ino)
        entry.generation = self.n_lives[st.st_ino]
        entry.entry_timeout = entry.attr_timeout = self.timeout_s
        return entry

    def _stat(self, inode: int) -> os.stat_result:
        """By name, or by an open fd if it has none any more."""
        with contextlib.suppress(OSError):
            return os.lstat(self._path(inode))
        for fd, ino in self.open_files.items():
            if ino == inode:
                return os.fstat(fd)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def _made(self, parent: int, name: bytes, ctx: RequestContext, mode: int | None) -> EntryAttributes:
        """Give what was just made to the caller, as the kernel would have."""
        above, path = os.lstat(self._path(parent)), self._child(parent, name)
        has_group = bool(above.st_mode & stat.S_ISGID)
        os.chown(path, ctx.uid, above.st_gid if has_group else ctx.gid, follow_symlinks=False)
        if mode is not None:
            mode &= ~ctx.umask
            if has_group and stat.S_ISDIR(os.lstat(path).st_mode):
                mode |= stat.S_ISGID
            os.chmod(path, stat.S_IMODE(mode))
        return self._note_entry(parent, name)

    def _removed(self, st: os.stat_result) -> None:
        if stat.S_ISDIR(st.st_mode) or st.st_nlink == 1:
            self.n_lives[st.st_ino] += 1

    @_handler
    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name in (b".", b".."):
            raise OSError(errno.ESTALE, "no export")
        return self._note_entry(parent_inode, name)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        pass

    @_handler
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(self._stat(inode))

    @_handler
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        path = self._path(inode) if fh is None else b"/proc/self/fd/%d" % fh
        follow = fh is not None
        if fields.update_uid or fields.update_gid:
            uid, gid = (attr.st_uid if fields.update_uid else -1), (attr.st_gid if fields.update_gid else -1)
            os.chown(path, uid, gid, follow_symlinks=follow)
        if fields.update_mode:
            os.chmod(path, stat.S_IMODE(attr.st_mode))
        if fields.update_size:
            os.truncate(path, attr.st_size)
        if fields.update_atime or fields.update_mtime:
            st = self._stat(inode)
            atime_ns = attr.st_atime_ns if fields.update_atime else st.st_atime_ns
            mtime_ns = attr.st_mtime_ns if fields.update_mtime else st.st_mtime_ns
            os.utime(path, ns=(atime_ns, mtime_ns), follow_symlinks=follow)
        return self._attributes(self._stat(inode))

    @_handler
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        return os.readlink(self._path(inode))

    @_handler
    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        os.mknod(self._child(parent_inode, name), mode, rdev)
        return self._made(parent_inode, name, ctx, mode)

    @_handler
    async def mkdir(self, parent_inode: InodeT, name: bytes, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        os.mkdir(self._child(parent_inode, name), 0o700)
        return self._made(parent_inode, name, ctx, mode)

    @_handler
    async def symlink(self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        os.symlink(target, self._child(parent_inode, name))
        return self._made(parent_inode, name, ctx, None)

    @_handler
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        os.link(self._path(inode), self._child(new_parent_inode, new_name), follow_symlinks=False)
        return self._note_entry(new_parent_inode, new_name)

    @_handler
    async def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        path = self._child(parent_inode, name)
        st = os.lstat(path)
        os.unlink(path)
        self._removed(st)

    @_handler
    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        path = self._child(parent_inode, name)
        st = os.lstat(path)
        os.rmdir(path)
        self._removed(st)

    @_handler
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: bytes,
        parent_inode_new: InodeT,
        name_new: bytes,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        old, new = self._child(parent_inode_old, name_old), self._child(parent_inode_new, name_new)
        match self.mode:
            case Mode.EINVAL | Mode.ENOSYS | Mode.EOPNOTSUPP if flags:
                number: int = getattr(errno, self.mode.name)
                raise OSError(number, os.strerror(number))
            case Mode.IGNORE:
                flags = FlagT(0)
            case Mode.LIE if flags & RENAME_EXCHANGE:
                return
        replaced = None
        if not flags:
            with contextlib.suppress(FileNotFoundError):
                replaced = os.lstat(new)
        renameat2(Path(os.fsdecode(old)), Path(os.fsdecode(new)), flags)
        if replaced is not None and replaced.st_ino != os.lstat(new).st_ino:
            self._removed(replaced)
        self._note_entry(parent_inode_new, name_new)
        if flags & RENAME_EXCHANGE:
            self._note_entry(parent_inode_old, name_old)

    @_handler
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        return self._opened(self._path(inode), inode, flags)

    @_handler
    async def create(
        self, parent_inode: InodeT, name: bytes, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        path = self._child(parent_inode, name)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        entry = self._made(parent_inode, name, ctx, mode)
        return self._opened(path, entry.st_ino, flags), entry

    def _opened(self, path: bytes, inode: int, flags: int) -> FileInfo:
        dropped = os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_DIRECT
        fd = os.open(path, (flags & ~dropped) | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.open_files[fd] = inode
        return FileInfo(fh=FileHandleT(fd))

    @_handler
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return os.pread(fh, size, off)

    @_handler
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        return os.pwrite(fh, buf, off)

    @_handler
    async def release(self, fh: FileHandleT) -> None:
        del self.open_files[fh]
        os.close(fh)

    @_handler
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        (os.fdatasync if datasync else os.fsync)(fh)

    @_handler
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        fd = os.open(self._path(inode), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.listings[fd] = (inode, [])
        return FileHandleT(fd)

    @_handler
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        inode, names = self.listings[fh]
        if start_id == 0:
            names[:] = [os.fsencode(name) for name in sorted(os.listdir(fh))]
        for position, name in enumerate(names[start_id:], start_id + 1):
            try:
                entry = self._note_entry(inode, name)
            except OSError:
                continue
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), entry, position):
                break

    @_handler
    async def releasedir(self, fh: FileHandleT) -> None:
        del self.listings[fh]
        os.close(fh)

    @_handler
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        os.fsync(fh)

    @_handler
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        st, data = os.statvfs(self.source), pyfuse3.StatvfsData()
        for name in ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "namemax"):
            setattr(data, f"f_{name}", getattr(st, f"f_{name}"))
        return data


def serve(handlers: LyingFs, mount_point: Path, name: str, *options: str) -> None:
    """Mount it for all users, and serve it until it is unmounted. name: the filesystem's, and its type's"""
    pyfuse3.init(handlers, str(mount_point), {f"fsname={name}", f"subtype={name}", "allow_other", *options})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="lyingfs")
    parser.add_argument("source", type=Path)
    parser.add_argument("mount_point", type=Path)
    parser.add_argument("--mode", type=Mode, default=Mode.HONEST)
    parser.add_argument("--timeout", type=float, default=0.0)
    parser.add_argument("--fail", action="append", default=[], metavar="OP:ERRNO:N")
    given = parser.parse_args()
    faults = {}
    for operation, name, n in (fault.split(":") for fault in given.fail):
        if not hasattr(getattr(LyingFs, operation, None), "__wrapped__"):
            parser.error(f"no handler is named {operation}")
        faults[operation, int(n)] = int(getattr(errno, name))
    handlers = LyingFs(given.source.resolve(), given.mode, given.timeout, faults)
    serve(handlers, given.mount_point, "lyingfs", "default_permissions")


if __name__ == "__main__":
    main()
