"""Makes and removes mounts: system calls, claims on mount points in /run/trashd, and mounts in fstab and units."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.file_locks import flock_holders
from fusefs.linux.mountinfo import TRASHD_FSTYPE
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME
from fusefs.linux.syscalls import AT_EMPTY_PATH

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_SYNCHRONOUS = 16
MS_DIRSYNC = 128
MS_NOSYMFOLLOW = 256
MS_POSIXACL = 1 << 16
MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_CLOEXEC = 1
_MS_REMOUNT, _MS_PRIVATE, _MS_RELATIME = 1 << 5, 1 << 18, 1 << 21
_NO_FD = -1
_OF_A_FILESYSTEM = {MS_RDONLY: b"ro", MS_SYNCHRONOUS: b"sync", MS_DIRSYNC: b"dirsync"}
_OF_A_MOUNT = {
    MS_RDONLY: 1, MS_NOSUID: 2, MS_NODEV: 4, MS_NOEXEC: 8, MS_NOSYMFOLLOW: 0x200000,
}  # fmt: skip
"""The flags of mount(2) as options for fsconfig(2) and as attributes for fsmount(2)."""
_FUSE_DEVICE = b"/dev/fuse"


def clone_tree(dir_fd: int) -> Fd:
    """Return a new, detached mount of the directory behind an fd, without the mounts inside it.

    Source  open_tree(2) with OPEN_TREE_CLONE; Linux 5.2
    """
    return Fd(syscalls.open_tree(dir_fd, b"", _OPEN_TREE_CLONE | os.O_CLOEXEC | AT_EMPTY_PATH))


def make_private(mount_fd: int, flags: int = 0) -> None:
    """Prevent mounts and unmounts elsewhere from propagating to this mount. flags: as for `set_flags`"""
    _set_attributes(mount_fd, flags, 0, _MS_PRIVATE)


def set_flags(mount_fd: int, flags: int, to_clear: int = 0) -> None:
    """Set some flags of mount(2) and clear others; flags that apply to the whole filesystem are ignored.

    mount_fd  fd of the mount's root; O_PATH is enough
    Raises    OSError EBUSY: the mount can't become read-only while a file on it is open for writing
    """
    _set_attributes(mount_fd, flags, to_clear, 0)


def _set_attributes(mount_fd: int, flags: int, to_clear: int, propagation: int) -> None:
    """Source  mount_setattr(2); Linux 5.12"""
    bits_to_set = _attributes(flags)
    cleared = _attributes(to_clear) & ~bits_to_set
    attributes = struct.pack("=QQQQ", bits_to_set, cleared, propagation, 0)
    syscalls.mount_setattr(mount_fd, b"", AT_EMPTY_PATH, attributes)


def _attributes(flags: int) -> int:
    return sum(attribute for flag, attribute in _OF_A_MOUNT.items() if flags & flag)


def new_mount(kind: bytes, source: bytes, options: Mapping[bytes, bytes], flags: int) -> Fd:
    """Return a detached mount of a new filesystem. Closing the fd destroys the mount, unless it was attached before.

    source   at most 255 bytes
    options  the filesystem's options; the value of an option without a value is empty
    flags    flags of mount(2)
    Source   fsopen(2), fsconfig(2), fsmount(2); Linux 5.2
    """
    switches = {name: b"" for flag, name in _OF_A_FILESYSTEM.items() if flags & flag}
    with Fd(syscalls.fsopen(kind, _CLOEXEC)) as context:
        for name, value in {b"source": source, **options, **switches}.items():
            command = _FSCONFIG_SET_STRING if value else _FSCONFIG_SET_FLAG
            syscalls.fsconfig(context, command, name, value or None)
        syscalls.fsconfig(context, _FSCONFIG_CMD_CREATE, None, None)
        return Fd(syscalls.fsmount(context, _CLOEXEC, _attributes(flags)))


def move_mount(mount_fd: int, target_fd: int) -> None:
    """Mount the result of clone_tree or new_mount on the directory behind an fd."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
    syscalls.move_mount(mount_fd, b"", target_fd, b"", flags)


def check_move_mount() -> None:
    """Raise OSError if this process is not allowed to move mounts, e.g. because of a container's seccomp filter."""
    try:
        syscalls.move_mount(_NO_FD, b"x", _NO_FD, b"x", 0)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise


def open_fuse() -> Fd:
    """Open a FUSE connection that is not mounted yet."""
    return Fd(os.open(_FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))


def mount(source: bytes, target_fd: int, kind: bytes, flags: int, data: bytes) -> None:
    """mount(2) on the directory behind an fd, whatever its path leads to now."""
    target = f"/proc/self/fd/{int(target_fd)}".encode()
    syscalls.mount(source, target, kind, flags, data)


def remount(point_fd: int, flags: int) -> None:
    """Set these flags of a mount and its filesystem, and clear all others. point_fd: the mount's root

    Raises  OSError EBUSY: the mount can't become read-only while a file on it is open for writing
    """
    target = f"/proc/self/fd/{int(point_fd)}".encode()
    syscalls.mount(None, target, None, _MS_REMOUNT | _MS_RELATIME | flags, None)


def unmount(point: bytes, flags: int = 0) -> None:
    """Unmount the topmost mount at a mount point; do not follow a symbolic link."""
    syscalls.umount2(point, flags | UMOUNT_NOFOLLOW)


_SLUG_MAX_BYTES = 60
_NAMESPACES = ("/proc/self/ns/mnt", "/proc/1/ns/mnt")
"""Our mount namespace and the machine's. systemd gives a service its own, which is a slave of the machine's."""


def claim_directory(target: bytes) -> bytes:
    """Return the path in /run/trashd that is reserved for a mount point in this mount namespace."""
    return MOUNTS_RUNTIME + b"/" + claim_name(target)


def claim_name(target: bytes, namespace: str = _NAMESPACES[0]) -> bytes:
    """Return the name in /run/trashd that is reserved for a mount point in a mount namespace.

    The namespace matters because /run may be shared with other namespaces, and removing a directory that is a mount
    point in another namespace removes that mount.
    """
    number = os.stat(namespace).st_ino
    digest = hashlib.sha256(b"%d:%s" % (number, target)).hexdigest()[:16]
    slug = re.sub(rb"[^A-Za-z0-9._-]", b"_", os.path.basename(target))[:_SLUG_MAX_BYTES]
    return slug + b"-" + digest.encode()


def is_mount_point_claimed(target: bytes) -> bool:
    """Return whether one of root's daemons serves a mount point or is about to. Does not touch the daemon's lock."""
    for namespace in _NAMESPACES:
        with suppress(OSError):  # there is no claim, or this process can't read it
            if flock_holders(os.stat(MOUNTS_RUNTIME + b"/" + claim_name(target, namespace))):
                return True
    return False


_FSTAB, _OF_UNITS = b"/etc/fstab", b"/etc/trashd/mounts"
_OPTIONS = b"OPTIONS="


class MountLine(NamedTuple):
    """The options that one line of fstab or of a unit gives for a mount. place: file and line number"""

    place: str
    options: frozenset[str]


def read_mount_lines() -> Iterator[MountLine]:
    """Find the trashd mounts in fstab and in the units' files, as far as this process can read them.

    Source  fstab(5), systemd.exec(5) for EnvironmentFile=
    """
    for number, line in _lines(_FSTAB):
        fields = line.split()
        if len(fields) > 3 and fields[2] == TRASHD_FSTYPE:
            yield _line(_FSTAB, number, fields[3])
    names = list[bytes]()
    with suppress(OSError):
        names = sorted(os.listdir(_OF_UNITS))
    for name in names:
        path = os.path.join(_OF_UNITS, name)
        for number, line in _lines(path):
            if name.endswith(b".conf") and line.startswith(_OPTIONS):
                yield _line(path, number, line.removeprefix(_OPTIONS).strip(b"\"' "))


def _line(path: bytes, number: int, options: bytes) -> MountLine:
    return MountLine(f"{os.fsdecode(path)}:{number}", frozenset(os.fsdecode(options).split(",")))


def _lines(path: bytes) -> list[tuple[int, bytes]]:
    """Return the lines of a file that are not comments, with their numbers; [] if the file can't be read."""
    try:
        with open(path, "rb") as file:
            return [(number, line.strip()) for number, line in enumerate(file, 1) if not line.lstrip().startswith(b"#")]
    except OSError:
        return []
