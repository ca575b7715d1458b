"""One set of calls for every subject of the oracle: a native directory, a mount, the vfs without a kernel.

A subject takes paths from its own top, as bytes, and answers as the system calls do: a value or OSError. What may
differ between two directories of one filesystem (inode numbers, times) is not in the answers.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from fusefs.linux.syscalls import AT_FDCWD, renameat2

P = ParamSpec("P")
R = TypeVar("R")

KEEP = -1
"""For chown: leave it as it is."""


class FileAttributes(NamedTuple):
    """What two subjects must agree on of one file."""

    kind: str  # as in ls -l, with the permissions: -rw-r--r--
    n_links: int
    uid: int
    gid: int
    rdev: int
    size_bytes: int
    n_blocks: int


class Times(NamedTuple):
    """The times that a call can set."""

    atime_ns: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Handle:
    """An open file; any two are equal, so that an open can be compared."""

    number: int = field(compare=False, repr=False)
    nodeid: int = field(default=0, compare=False, repr=False)
    flags: int = field(default=0, compare=False, repr=False)


class Subject(Protocol):
    """A directory to work in. Links in the last component are followed only where a call says so."""

    name: str

    def open(self, path: bytes, flags: int = os.O_RDONLY, mode: int = 0o666) -> Handle: ...
    def close(self, handle: Handle) -> None: ...
    def pread(self, handle: Handle, size: int, offset: int) -> bytes: ...
    def pwrite(self, handle: Handle, data: bytes, offset: int) -> int: ...
    def fsync(self, handle: Handle) -> None: ...
    def ftruncate(self, handle: Handle, size: int) -> None: ...
    def fstat(self, handle: Handle) -> FileAttributes: ...
    def fchmod(self, handle: Handle, mode: int) -> None: ...
    def stat(self, path: bytes) -> FileAttributes: ...
    def times(self, path: bytes) -> Times: ...
    def ctime_ns(self, path: bytes) -> int: ...
    def ino(self, path: bytes) -> int: ...
    def mkdir(self, path: bytes, mode: int = 0o777) -> None: ...
    def rmdir(self, path: bytes) -> None: ...
    def unlink(self, path: bytes) -> None: ...
    def symlink(self, target: bytes, path: bytes) -> None: ...
    def readlink(self, path: bytes) -> bytes: ...
    def link(self, old: bytes, new: bytes) -> None: ...
    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None: ...
    def mknod(self, path: bytes, mode: int, rdev: int = 0) -> None: ...
    def chmod(self, path: bytes, mode: int) -> None: ...
    def chown(self, path: bytes, uid: int, gid: int) -> None: ...
    def utime(self, path: bytes, atime_ns: int, mtime_ns: int) -> None: ...
    def truncate(self, path: bytes, size: int) -> None: ...
    def listdir(self, path: bytes) -> list[bytes]: ...
    def getxattr(self, path: bytes, name: str) -> bytes: ...
    def setxattr(self, path: bytes, name: str, value: bytes, flags: int = 0) -> None: ...
    def listxattr(self, path: bytes) -> list[str]: ...
    def removexattr(self, path: bytes, name: str) -> None: ...
    def statvfs(self) -> tuple[int, ...]: ...
    def umask(self, mask: int) -> contextlib.AbstractContextManager[None]: ...

    # Made of the calls above.

    def put(self, path: bytes, content: bytes = b"", mode: int = 0o644, flags: int = os.O_TRUNC) -> None:
        """Make or overwrite a file; in pieces that a mount takes whole."""
        handle = self.open(path, os.O_WRONLY | os.O_CREAT | flags, mode)
        try:
            for offset in range(0, len(content), 65536):
                self.pwrite(handle, content[offset : offset + 65536], offset)
        finally:
            self.close(handle)

    def opens(self, path: bytes, flags: int = os.O_RDONLY, mode: int = 0o666) -> None:
        """Only see whether it opens."""
        self.close(self.open(path, flags, mode))

    def get(self, path: bytes) -> bytes:
        handle = self.open(path)
        try:
            content = bytearray()
            while piece := self.pread(handle, 65536, len(content)):
                content += piece
            return bytes(content)
        finally:
            self.close(handle)

    def tree(self, path: bytes = b".") -> dict[bytes, tuple[FileAttributes, bytes | tuple[bytes, ...] | None]]:
        """All below a directory: attributes, content of files, targets of links, names in directories."""
        found: dict[bytes, tuple[FileAttributes, bytes | tuple[bytes, ...] | None]] = {}
        todo = [path]
        while todo:
            at = todo.pop()
            seen, inside = self.stat(at), None
            match seen.kind[0]:
                case "d":
                    inside = tuple(self.listdir(at))
                    todo += [at + b"/" + name for name in inside]
                    found[at] = seen, inside
                case "-":
                    found[at] = seen, self.get(at)
                case "l":
                    found[at] = seen, self.readlink(at)
                case _:
                    found[at] = seen, None
        return found


def see(mode: int, n_links: int, uid: int, gid: int, rdev: int, size_bytes: int, n_blocks: int) -> FileAttributes:
    """The part of a stat that is compared; a directory's blocks are its filesystem's own business."""
    blocks = 0 if stat.S_ISDIR(mode) else n_blocks
    return FileAttributes(stat.filemode(mode), n_links, uid, gid, rdev, size_bytes, blocks)


class Native(Subject):
    """A directory reached by the kernel: native, or on a mount."""

    def __init__(self, name: str, top: Path) -> None:
        self.name = name
        self.top = os.fsencode(top)

    def _at(self, path: bytes) -> bytes:
        return self.top + b"/" + path

    def open(self, path: bytes, flags: int = os.O_RDONLY, mode: int = 0o666) -> Handle:
        return Handle(os.open(self._at(path), flags | os.O_CLOEXEC, mode))

    def close(self, handle: Handle) -> None:
        os.close(handle.number)

    def pread(self, handle: Handle, size: int, offset: int) -> bytes:
        return os.pread(handle.number, size, offset)

    def pwrite(self, handle: Handle, data: bytes, offset: int) -> int:
        return os.pwrite(handle.number, data, offset)

    def fsync(self, handle: Handle) -> None:
        os.fsync(handle.number)

    def ftruncate(self, handle: Handle, size: int) -> None:
        os.ftruncate(handle.number, size)

    def fstat(self, handle: Handle) -> FileAttributes:
        return self._see(os.fstat(handle.number))

    def fchmod(self, handle: Handle, mode: int) -> None:
        os.fchmod(handle.number, mode)

    def stat(self, path: bytes) -> FileAttributes:
        return self._see(os.lstat(self._at(path)))

    @staticmethod
    def _see(st: os.stat_result) -> FileAttributes:
        return see(st.st_mode, st.st_nlink, st.st_uid, st.st_gid, st.st_rdev, st.st_size, st.st_blocks)

    def times(self, path: bytes) -> Times:
        st = os.lstat(self._at(path))
        return Times(st.st_atime_ns, st.st_mtime_ns)

    def ctime_ns(self, path: bytes) -> int:
        return os.lstat(self._at(path)).st_ctime_ns

    def ino(self, path: bytes) -> int:
        return os.lstat(self._at(path)).st_ino

    def mkdir(self, path: bytes, mode: int = 0o777) -> None:
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: bytes) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: bytes) -> None:
        os.unlink(self._at(path))

    def symlink(self, target: bytes, path: bytes) -> None:
        os.symlink(target, self._at(path))

    def readlink(self, path: bytes) -> bytes:
        return os.readlink(self._at(path))

    def link(self, old: bytes, new: bytes) -> None:
        os.link(self._at(old), self._at(new), follow_symlinks=False)

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        renameat2(AT_FDCWD, self._at(old), AT_FDCWD, self._at(new), flags)

    def mknod(self, path: bytes, mode: int, rdev: int = 0) -> None:
        os.mknod(self._at(path), mode, rdev)

    def chmod(self, path: bytes, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def chown(self, path: bytes, uid: int, gid: int) -> None:
        os.lchown(self._at(path), uid, gid)

    def utime(self, path: bytes, atime_ns: int, mtime_ns: int) -> None:
        os.utime(self._at(path), ns=(atime_ns, mtime_ns), follow_symlinks=False)

    def truncate(self, path: bytes, size: int) -> None:
        os.truncate(self._at(path), size)

    def listdir(self, path: bytes) -> list[bytes]:
        return sorted(os.listdir(self._at(path)))

    def getxattr(self, path: bytes, name: str) -> bytes:
        return os.getxattr(self._at(path), name, follow_symlinks=False)

    def setxattr(self, path: bytes, name: str, value: bytes, flags: int = 0) -> None:
        os.setxattr(self._at(path), name, value, flags, follow_symlinks=False)

    def listxattr(self, path: bytes) -> list[str]:
        return sorted(os.listxattr(self._at(path), follow_symlinks=False))

    def removexattr(self, path: bytes, name: str) -> None:
        os.removexattr(self._at(path), name, follow_symlinks=False)

    def statvfs(self) -> tuple[int, ...]:
        st = os.statvfs(self.top)
        return st.f_bsize, st.f_frsize, st.f_blocks, st.f_files, st.f_namemax

    @contextlib.contextmanager
    def umask(self, mask: int) -> Iterator[None]:
        older = os.umask(mask)
        try:
            yield
        finally:
            os.umask(older)


class Story:
    """The calls that were made to a subject, a line each with its result."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
        """Make the call and keep a line with its result, or the name of its error."""
        words = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
        self.lines.append(f"{getattr(call, '__name__', 'call')}({words}) = {outcome(call, *args, **kwargs)}")


def outcome(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> str:
    """A call's answer, or the name of its error."""
    try:
        return repr(call(*args, **kwargs))
    except OSError as error:
        return errno.errorcode[error.errno or 0]
