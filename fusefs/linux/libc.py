"""System calls that Python's os has no function for, by ctypes: thin, typed, OSError only."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)
"""Other threads wait meanwhile: giving up Python's lock and getting it back takes as long as a tenth of a rename."""

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_SYMLINK_NOFOLLOW = 0x100
AT_STATX_DONT_SYNC = 0x4000
FUSE_MAGIC = 0x65735546
NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
"""What a filesystem says that has no files without a name."""
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
FALLOC_FL_KEEP_SIZE = 1
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
F_SETSIG = 10
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38

_NR_OPENAT2 = 437  # one number on every architecture, as all calls since Linux 5.0
_STATX_BTIME = 0x800
_STATX_MNT_ID = 0x1000
_MAX_HANDLE_SZ = 128
_HANDLE_HEAD = struct.Struct("=Ii")
"""struct file_handle: size, type; then the handle itself."""
_ATTEMPTS = 128


def checked(result: int, name: bytes | None = None) -> int:
    """What a call of the C library returned. Raises  OSError with errno, and the name that it was about"""
    if result < 0:
        raise failure(name)
    return result


def failure(name: bytes | None = None) -> OSError:
    """Why the last call of the C library failed."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), name)


def openat2(dir_fd: int, path: bytes, flags: int, resolve: int, mode: int = 0) -> int:
    """An fd for a path; `resolve` restricts how it is walked.

    EAGAIN (a rename elsewhere raced the walk) is tried again, as openat2(2) asks for.
    """
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    for _ in range(_ATTEMPTS):
        fd: int = _libc.syscall(_NR_OPENAT2, dir_fd, path, how, ctypes.c_size_t(len(how)))
        if fd >= 0 or ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    return checked(fd, path)


def renameat2(old_dir_fd: int, old: bytes, new_dir_fd: int, new: bytes, flags: int) -> None:
    """renameat2(2)."""
    checked(_libc.renameat2(old_dir_fd, old, new_dir_fd, new, flags), new)


def renaming() -> Callable[[int, bytes, int, bytes, int], int]:
    """renameat2(2) itself, for very many in a row: negative after a failure, the errno is ctypes' then."""
    from threading import active_count  # a swap is spared it

    call: Callable[[int, bytes, int, bytes, int], int] = (_held if active_count() == 1 else _libc).renameat2
    return call


class Statx(NamedTuple):
    """What statx tells that stat does not: birth time (0 if there is none, or none is known) and the mount's id."""

    ino: int
    btime_ns: int
    mnt_id: int
    dev: int


_STATX = struct.Struct("=IIQIIIHxxQQQQ" + 4 * "qIi" + "IIIIQ")


def statx(fd: int, path: bytes = b"", *, asks: bool = False) -> Statx:
    """statx(2) on an fd (any kind), or of a name below it (never following a link).

    asks  a daemon or a server, too, which may hang: else only what the kernel knows of its birth is told
    """
    buffer = ctypes.create_string_buffer(256)
    flags = AT_SYMLINK_NOFOLLOW | (0 if asks else AT_STATX_DONT_SYNC) | (0 if path else AT_EMPTY_PATH)
    checked(_libc.statx(fd, path, flags, 0x7FF | _STATX_BTIME | _STATX_MNT_ID, buffer), path)
    f = _STATX.unpack_from(buffer)
    mask, ino, btime_s, btime_ns = f[0], f[7], f[14], f[15]
    btime = btime_s * 1_000_000_000 + btime_ns if mask & _STATX_BTIME else 0
    return Statx(ino, btime, f[27], os.makedev(f[25], f[26]))


def handle_of(dir_fd: int, name: bytes = b"") -> bytes:
    """The file handle (inode and generation) of a name or of an fd: struct file_handle, as open_by_handle_at takes it.

    Returns  empty where there is none to be had: EOPNOTSUPP on overlayfs and some network filesystems, EPERM and
             ENOSYS under a container's seccomp filter
    """
    buffer = ctypes.create_string_buffer(_HANDLE_HEAD.pack(_MAX_HANDLE_SZ, 0), _HANDLE_HEAD.size + _MAX_HANDLE_SZ)
    mount_id = ctypes.c_int()
    flags = 0 if name else AT_EMPTY_PATH
    if _libc.name_to_handle_at(dir_fd, name, buffer, ctypes.byref(mount_id), flags) < 0:
        return no_handle(name)
    size: int = _HANDLE_HEAD.unpack_from(buffer)[0]
    return buffer.raw[: _HANDLE_HEAD.size + size]


def no_handle(name: bytes) -> bytes:
    """An empty handle, if the last call has failed because there is none to be had. Raises  OSError otherwise"""
    if ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS, errno.EOVERFLOW):
        raise failure(name)
    return b""


def format_handle(handle: bytes) -> str:
    """A file handle as `type:hex`; empty for none."""
    return f"{_HANDLE_HEAD.unpack_from(handle)[1]}:{handle[_HANDLE_HEAD.size :].hex()}" if handle else ""


def getdents_types(fd: int) -> set[int]:
    """The d_type values in the first buffer of a directory's listing; the fd's position moves."""
    buffer = ctypes.create_string_buffer(4096)
    size = checked(_libc.getdents64(fd, buffer, ctypes.c_size_t(len(buffer))))
    found, at = set(), 0
    while at < size:
        length, kind = struct.unpack_from("=HB", buffer, at + 16)
        found.add(kind)
        at += length
    return found


def statfs_type(fd: int) -> int:
    """The magic number of the filesystem that an fd is on."""
    buffer = ctypes.create_string_buffer(256)
    checked(_libc.fstatfs(fd, buffer))
    kind: int = struct.unpack_from("=l", buffer)[0]
    return kind & 0xFFFFFFFF


def is_read_only(fd: int) -> bool:
    """Whether a filesystem, its mount or a btrfs subvolume is read-only; statfs(2) tells nothing of the last."""
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return True
    return _libc.faccessat(AT_FDCWD, b"/proc/self/fd/%d" % fd, os.W_OK, 0) < 0 and ctypes.get_errno() == errno.EROFS


def open_unnamed(dir_fd: int) -> int:
    """A new file without a name (O_TMPFILE), 0600, open for reading and writing.

    Never on FUSE: there it may have been linked, and be gone when it is closed (JuiceFS 1.4.2, measured).
    Raises  OSError ENOENT: the directory was removed, which ext4 calls EPERM (__ext4_new_inode), and others don't
            mind; of NO_TMPFILE: the filesystem has no such files
    """
    if statfs_type(dir_fd) == FUSE_MAGIC:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    try:
        return os.open(b".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    except PermissionError as error:
        if os.fstat(dir_fd).st_nlink:
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error


def fallocate(fd: int, mode: int, offset: int, size: int) -> None:
    """fallocate(2); a signal does not end it."""
    while _libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(size)) < 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def ioctl(fd: int, request: int, buffer: bytearray) -> None:
    """ioctl(2) with a buffer that the kernel reads, writes, or both."""
    argument = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    checked(_libc.ioctl(fd, ctypes.c_ulong(request), argument))


def prctl(option: int, argument: int = 0) -> int:
    """prctl(2) with one argument."""
    zero = ctypes.c_ulong(0)
    return checked(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero))


def syncfs(fd: int) -> None:
    """syncfs(2): everything of that filesystem is durable."""
    checked(_libc.syncfs(fd))
