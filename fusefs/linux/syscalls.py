"""System calls that Python's os module lacks, through ctypes: thin, typed, raising only OSError.

All of them are here, so that one place defines how each is called, and whether Python's lock is held during the call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_long, c_size_t, c_uint, c_ulong
from functools import partial
from typing import Any, NamedTuple

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_SYMLINK_NOFOLLOW = 0x100
AT_NO_AUTOMOUNT = 0x800
AT_REMOVEDIR = 0x200
AT_STATX_FORCE_SYNC, AT_STATX_DONT_SYNC = 0x2000, 0x4000
STATX_BASIC_STATS = 0x7FF
STATX_BTIME = 0x800
STATX_MNT_ID = 0x1000
STATX_ATTR_ENCRYPTED, STATX_ATTR_MOUNT_ROOT = 0x800, 0x2000
STATX_SIZE = 256
MAX_HANDLE_SZ = 128
HANDLE_HEAD = struct.Struct("=Ii")
"""struct file_handle: size and type; the handle itself follows."""
FUSE_MAGIC = 0x65735546
NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
"""Errors from a filesystem that doesn't support files without a name."""
NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTEMPTY, errno.EEXIST)
"""Errors from a filesystem that can't exchange; the last two if it ignores the flag and tries a plain rename."""
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
FALLOC_FL_KEEP_SIZE = 1
SYNC_FILE_RANGE_WRITE = 2
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
BENEATH = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV
"""No `..` above the start, no symbolic links, no mounts."""
WALK_MAX_BYTES = 4000
"""The longest path for one call: the kernel's limit is 4096, including the final NUL."""
F_SETSIG = 10
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38

_HOW = struct.Struct("=QQQ")
_HOW_SIZE = c_size_t(_HOW.size)
"""struct open_how: flags, mode, and restrictions on the path."""
_ATTEMPTS = 128
_STATX = {
    "mask": "I", "blksize": "I", "attributes": "Q", "nlink": "I", "uid": "I", "gid": "I", "mode": "H", "_mode": "2s",
    "ino": "Q", "size": "Q", "blocks": "Q", "attributes_mask": "Q",
    "atime_s": "q", "atime_ns": "I", "_atime": "4s", "btime_s": "q", "btime_ns": "I", "_btime": "4s",
    "ctime_s": "q", "ctime_ns": "I", "_ctime": "4s", "mtime_s": "q", "mtime_ns": "I", "_mtime": "4s",
    "rdev": "Q", "dev": "Q", "mnt_id": "Q",
}  # fmt: skip
"""The fields of struct statx, in order; names with a leading `_` are padding. A device's two numbers are read as one
number: see `device_number`."""
_U64, _TWO_NUMBERS = struct.Struct("=Q"), struct.Struct("=II")
_NANO = 1_000_000_000

_NUMBERS = {
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "close_range": 436, "openat2": 437, "mount_setattr": 442,
}  # fmt: skip
"""Calls for which the C library may lack a function; their numbers are the same on all architectures (Linux 5.0)."""
_NUMBERS_BY_MACHINE = {
    "ioprio_set": {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282},
    "setgroups": {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206, "loongarch64": 159},
}
"""Older calls, called by number. The C library's setgroups would act on all threads."""
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "capget": (c_char_p, c_char_p),
    "close_range": (c_uint, c_uint, c_int),
    "faccessat": (c_int, c_char_p, c_int, c_int),
    "fallocate": (c_int, c_int, c_long, c_long),
    "fsconfig": (c_int, c_uint, c_char_p, c_char_p, c_int),
    "fsmount": (c_int, c_uint, c_uint),
    "fsopen": (c_char_p, c_uint),
    "getdents64": (c_int, c_char_p, c_size_t),
    "inotify_add_watch": (c_int, c_char_p, c_uint),
    "inotify_init1": (c_int,),
    "inotify_rm_watch": (c_int, c_int),
    "io_uring_setup": (c_uint, c_char_p),
    "ioctl": (c_int, c_ulong, c_char_p),
    "ioprio_set": (c_int, c_int, c_int),
    "mount": (c_char_p, c_char_p, c_char_p, c_ulong, c_char_p),
    "mount_setattr": (c_int, c_char_p, c_uint, c_char_p, c_size_t),
    "move_mount": (c_int, c_char_p, c_int, c_char_p, c_uint),
    "open_by_handle_at": (c_int, c_char_p, c_int),
    "open_tree": (c_int, c_char_p, c_uint),
    "prctl": (c_int, c_ulong, c_ulong, c_ulong, c_ulong),
    "setfsgid": (c_uint,),
    "setfsuid": (c_uint,),
    "setgroups": (c_int, c_char_p),
    "sync_file_range": (c_int, c_long, c_long, c_uint),
    "syncfs": (c_int,),
    "umount2": (c_char_p, c_int),
    "unshare": (c_int,),
}
_WITHOUT_PROTOTYPE = frozenset({"capset", "close", "fstatfs", "name_to_handle_at", "openat2", "renameat2", "statx"})
"""Calls that are made for each entry of a tree have no prototype: with one, a statx takes 2.7 µs instead of 1.3
(measured).

Without a prototype, numbers that fit into C's int, bytes and buffers are passed correctly; a size must be a c_size_t.
"""
_RESULTS = {"setfsgid": c_uint, "setfsuid": c_uint}
"""All other functions return C's int; calls by number return long."""


class _Library(ctypes.CDLL):
    """The C library. A function is loaded, and gets its prototype, when it is first called."""

    def __getitem__(self, name_or_ordinal: Any) -> Any:
        """Return a function by its name. Raises  KeyError: no prototype is known; OSError ENOSYS: no number is known"""
        name = name_or_ordinal
        number = _NUMBERS.get(name)
        if name in _NUMBERS_BY_MACHINE and (number := _NUMBERS_BY_MACHINE[name].get(os.uname().machine)) is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        function = super().__getitem__(name if number is None else "syscall")
        function.restype = _RESULTS.get(name, c_int) if number is None else c_long
        if name not in _WITHOUT_PROTOTYPE:
            function.argtypes = _PROTOTYPES[name] if number is None else (c_long, *_PROTOTYPES[name])
        return function if number is None else partial(function, number)


class _LibraryWithGil(_Library, ctypes.PyDLL):
    """The C library, called while Python's lock is held, so that other threads wait."""


_libc = _Library(None, use_errno=True)
_libc_with_gil = _LibraryWithGil(None, use_errno=True)
"""For calls that never block: releasing and retaking Python's lock takes a tenth of the time of a rename."""

Function = Callable[..., int]
"""A function to be called very often: its result is negative after a failure, and ctypes then has the errno."""
statx_function: Function = _libc.statx
statx_with_gil: Function = _libc_with_gil.statx
name_to_handle_at_with_gil: Function = _libc_with_gil.name_to_handle_at
_libc_without_errno = _LibraryWithGil(None)
"""For calls that can't fail, or that don't report a failure."""
setfsuid: Function = _libc_without_errno.setfsuid
setfsgid: Function = _libc_without_errno.setfsgid


def check_result(result: int, name: bytes | None = None) -> int:
    """Return the result of a C library call. Raises  OSError with errno and name if the call failed"""
    if result < 0:
        raise last_error(name)
    return result


def last_error(name: bytes | None = None) -> OSError:
    """Return the error of the last C library call."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), name)


def openat2(dir_fd: int, path: bytes, flags: int, resolve: int) -> int:
    """openat2(2). resolve: restrictions on the resolution of the path

    After EAGAIN (a race with a rename elsewhere) the call is retried, as openat2(2) advises.
    """
    how = _HOW.pack(flags | os.O_CLOEXEC, 0, resolve)
    for _ in range(_ATTEMPTS):
        fd: int = _libc.openat2(dir_fd, path, how, _HOW_SIZE)
        if fd >= 0 or ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    return check_result(fd, path)


def renameat2(old_dir_fd: int, old: bytes, new_dir_fd: int, new: bytes, flags: int) -> None:
    check_result(_libc.renameat2(old_dir_fd, old, new_dir_fd, new, flags), new)


class Statx(NamedTuple):
    """Fields from statx, including those that stat lacks: birth time (0: not known), mount ID, and attributes, whose
    bits are those of inode flags.
    """

    ino: int
    btime_ns: int
    mnt_id: int
    dev: int
    attributes: int


def statx_fields(*names: str) -> struct.Struct:
    """Return a parser for these fields of a struct statx, in the order of the struct."""
    return struct.Struct(
        "=" + "".join(code if name in names else f"{struct.calcsize(code)}x" for name, code in _STATX.items())
    )


class _DeviceNumbers(dict[int, int]):
    """Converts device numbers in struct statx to those of os.stat; all are cached, since a machine has few."""

    def __missing__(self, raw: int) -> int:
        number = self[raw] = os.makedev(*_TWO_NUMBERS.unpack(_U64.pack(raw)))
        return number


device_number: Callable[[int], int] = _DeviceNumbers().__getitem__
"""Converts a device number in struct statx to that of os.stat."""
_STATX_FIELDS = statx_fields("mask", "attributes", "ino", "btime_s", "btime_ns", "dev", "mnt_id")


def statx(fd: int, path: bytes = b"", *, asks_server: bool = False) -> Statx:
    """statx(2) of an fd (O_PATH is enough), or of a name in it (never following a link).

    asks_server  also ask a daemon or server, which may hang; otherwise birth times that the kernel doesn't know are
                 missing
    """
    buffer = ctypes.create_string_buffer(STATX_SIZE)
    flags = AT_SYMLINK_NOFOLLOW | (0 if asks_server else AT_STATX_DONT_SYNC) | (0 if path else AT_EMPTY_PATH)
    check_result(_libc.statx(fd, path, flags, STATX_BASIC_STATS | STATX_BTIME | STATX_MNT_ID, buffer), path)
    mask, attributes, ino, btime_s, btime_ns, dev, mnt_id = _STATX_FIELDS.unpack_from(buffer)
    btime_ns = btime_s * _NANO + btime_ns if mask & STATX_BTIME else 0
    return Statx(ino, btime_ns, mnt_id, device_number(dev), attributes)


def name_to_handle_at(dir_fd: int, name: bytes = b"") -> bytes:
    """Return the file handle (inode and generation) of a name or an fd: struct file_handle, for open_by_handle_at.

    The handle is empty if the filesystem does not support handles (EOPNOTSUPP on overlayfs and some network
    filesystems), or if a container's seccomp filter refuses the call (EPERM or ENOSYS).
    """
    buffer = ctypes.create_string_buffer(HANDLE_HEAD.pack(MAX_HANDLE_SZ, 0), HANDLE_HEAD.size + MAX_HANDLE_SZ)
    mount_id = ctypes.c_int()
    flags = 0 if name else AT_EMPTY_PATH
    if _libc.name_to_handle_at(dir_fd, name, buffer, ctypes.byref(mount_id), flags) < 0:
        return empty_handle_or_raise(name)
    size: int = HANDLE_HEAD.unpack_from(buffer)[0]
    return buffer.raw[: HANDLE_HEAD.size + size]


def empty_handle_or_raise(name: bytes) -> bytes:
    """Return an empty handle if the last call failed because handles are unsupported or forbidden. Raises  OSError"""
    if ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS, errno.EOVERFLOW):
        raise last_error(name)
    return b""


def format_handle(handle: bytes) -> str:
    """Format a file handle as `type:hex`; an empty handle as an empty string."""
    return f"{HANDLE_HEAD.unpack_from(handle)[1]}:{handle[HANDLE_HEAD.size :].hex()}" if handle else ""


def statfs_type(fd: int) -> int:
    """Return the magic number of an fd's filesystem."""
    buffer = ctypes.create_string_buffer(256)
    check_result(_libc.fstatfs(fd, buffer))
    kind: int = struct.unpack_from("=l", buffer)[0]
    return kind & 0xFFFFFFFF


def is_read_only(fd: int) -> bool:
    """Return whether a filesystem, its mount or a btrfs subvolume is read-only; statfs(2) doesn't report the latter."""
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return True
    return _libc.faccessat(AT_FDCWD, b"/proc/self/fd/%d" % fd, os.W_OK, 0) < 0 and ctypes.get_errno() == errno.EROFS


def open_unnamed(dir_fd: int) -> int:
    """Open a new file without a name (O_TMPFILE) for reading and writing, with mode 0600.

    This fails on FUSE: there, a file that is linked later may be lost when it is closed (JuiceFS 1.4.2, measured).
    Raises  OSError ENOENT: the directory was removed (for which ext4 returns EPERM, see __ext4_new_inode, and others
            succeed); one of NO_TMPFILE: the filesystem doesn't support such files
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
    """fallocate(2), repeated if a signal interrupts it."""
    while _libc.fallocate(fd, mode, offset, size) < 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def ioctl(fd: int, request: int, buffer: bytearray) -> None:
    """ioctl(2) with a buffer that the kernel reads, writes, or both."""
    argument = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    check_result(_libc.ioctl(fd, request, argument))


def prctl(option: int, argument: int = 0) -> int:
    return check_result(_libc.prctl(option, argument, 0, 0, 0))


def sync_file_range(fd: int, flags: int) -> None:
    """sync_file_range(2) of a whole file."""
    check_result(_libc.sync_file_range(fd, 0, 0, flags))


def syncfs(fd: int) -> None:
    check_result(_libc.syncfs(fd))


def getdents64(fd: int, size: int) -> bytes:
    """getdents64(2) with a buffer of this size. Returns structs linux_dirent64; b"" at the end."""
    buffer = ctypes.create_string_buffer(size)
    return ctypes.string_at(buffer, check_result(_libc.getdents64(fd, buffer, size)))


def open_by_handle_at(mount_fd: int, handle: bytes, flags: int) -> int:
    return check_result(_libc.open_by_handle_at(mount_fd, handle, flags))


def inotify_init1(flags: int) -> int:
    return check_result(_libc.inotify_init1(flags))


def inotify_add_watch(fd: int, path: bytes, mask: int) -> int:
    return check_result(_libc.inotify_add_watch(fd, path, mask))


def inotify_rm_watch(fd: int, watch: int) -> None:
    check_result(_libc.inotify_rm_watch(fd, watch))


def mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int, data: bytes | None) -> None:
    check_result(_libc.mount(source, target, kind, flags, data))


def umount2(target: bytes, flags: int) -> None:
    check_result(_libc.umount2(target, flags), target)


def open_tree(dir_fd: int, path: bytes, flags: int) -> int:
    return check_result(_libc.open_tree(dir_fd, path, flags))


def move_mount(from_fd: int, path: bytes, to_fd: int, to_path: bytes, flags: int) -> None:
    check_result(_libc.move_mount(from_fd, path, to_fd, to_path, flags))


def fsopen(kind: bytes, flags: int) -> int:
    return check_result(_libc.fsopen(kind, flags))


def fsconfig(fd: int, command: int, key: bytes | None, value: bytes | None) -> None:
    """fsconfig(2), with 0 as its last argument."""
    check_result(_libc.fsconfig(fd, command, key, value, 0))


def fsmount(fd: int, flags: int, attributes: int) -> int:
    return check_result(_libc.fsmount(fd, flags, attributes))


def mount_setattr(dir_fd: int, path: bytes, flags: int, attributes: bytes) -> None:
    """mount_setattr(2), Linux 5.12. attributes: struct mount_attr"""
    check_result(_libc.mount_setattr(dir_fd, path, flags, attributes, len(attributes)))


def io_uring_setup(n_entries: int, parameters: ctypes.Array[ctypes.c_char]) -> int:
    """io_uring_setup(2). parameters: struct io_uring_params, read and written"""
    return check_result(_libc.io_uring_setup(n_entries, parameters))


def close_range(first: int, last: int) -> None:
    """close_range(2), Linux 5.9."""
    check_result(_libc.close_range(first, last, 0))


def unshare(flags: int) -> None:
    check_result(_libc.unshare(flags))


def capget(header: bytes, size: int) -> bytes:
    """capget(2), of the calling thread. size: size of the sets in bytes"""
    sets = ctypes.create_string_buffer(size)
    check_result(_libc_with_gil.capget(header, sets))
    return sets.raw


def capset(header: bytes, sets: bytes) -> None:
    """capset(2), of the calling thread."""
    check_result(_libc_with_gil.capset(header, sets))


def setgroups(groups: Sequence[int]) -> None:
    """setgroups(2) for this thread only. Raises  OSError ENOSYS: the call's number on this machine is not known"""
    check_result(_libc_with_gil.setgroups(len(groups), struct.pack(f"={len(groups)}I", *groups)))


def ioprio_set(which: int, who: int, priority: int) -> None:
    """ioprio_set(2). Raises  OSError ENOSYS: the call's number on this machine is not known"""
    check_result(_libc.ioprio_set(which, who, priority))
