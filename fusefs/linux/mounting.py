"""Mounts made and unmade: one thin function for each call, OSError only."""

from __future__ import annotations

import ctypes
import os
import struct

from fusefs.linux.fd import Fd
from fusefs.linux.libc import AT_EMPTY_PATH, AT_FDCWD, checked

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_SYNCHRONOUS = 16
MS_DIRSYNC = 128
MS_NOSYMFOLLOW = 256
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

_NR_OPEN_TREE, _NR_MOVE_MOUNT, _NR_MOUNT_SETATTR = 428, 429, 442  # one number on every architecture
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MS_PRIVATE = 1 << 18
_FUSE_DEVICE = b"/dev/fuse"

_libc = ctypes.CDLL(None, use_errno=True)


def clone_tree(dir_fd: int) -> Fd:
    """A new mount of the directory that an fd holds, mounted nowhere yet; what is mounted inside is left out.

    Source  open_tree(2) with OPEN_TREE_CLONE; Linux 5.2
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | AT_EMPTY_PATH
    return Fd(checked(_libc.syscall(_NR_OPEN_TREE, int(dir_fd), b"", flags)))


def make_private(mount_fd: int) -> None:
    """Let no mount or unmount that happens elsewhere happen in this mount too.

    Source  mount_setattr(2); Linux 5.12
    """
    attributes = struct.pack("=QQQQ", 0, 0, _MS_PRIVATE, 0)
    size = ctypes.c_size_t(len(attributes))
    checked(_libc.syscall(_NR_MOUNT_SETATTR, int(mount_fd), b"", AT_EMPTY_PATH, attributes, size))


def move_mount(mount_fd: int, target: bytes) -> None:
    """Mount at a path what clone_tree gave."""
    checked(_libc.syscall(_NR_MOVE_MOUNT, int(mount_fd), b"", AT_FDCWD, target, _MOVE_MOUNT_F_EMPTY_PATH), target)


def open_fuse() -> Fd:
    """A connection to the kernel's FUSE that is not mounted yet."""
    return Fd(os.open(_FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))


def mount(source: bytes, target_fd: int, kind: bytes, flags: int, data: bytes) -> None:
    """mount(2) on the directory that an fd holds, whatever its path leads to by now."""
    target = f"/proc/self/fd/{int(target_fd)}".encode()
    checked(_libc.mount(source, target, kind, ctypes.c_ulong(flags), data))


def unmount(point: bytes, flags: int = 0) -> None:
    """umount2(2), not following a link; the topmost mount at that point."""
    checked(_libc.umount2(point, flags | UMOUNT_NOFOLLOW), point)
