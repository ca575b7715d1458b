"""Extended attributes: by an fd, or by a name in a directory, in one system call: getxattrat(2), listxattrat(2).

`ls -l` asks for each file's ACL, or which it has, and hardly any has one: that is an answer here, no exception.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from functools import lru_cache
from pathlib import Path

from fusefs.core.common_xattrs import NAMES
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import FUSE_MAGIC, Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.linux.syscalls import AT_SYMLINK_NOFOLLOW, getxattrat, listxattrat

_ARGUMENTS = struct.Struct("=QII")
_ARGUMENTS_SIZE = ctypes.c_size_t(_ARGUMENTS.size)
"""struct xattr_args: where the value goes, how much room is there, flags."""
_ROOM, _ROOM_MAX = 256, 65536
_FILESYSTEMS = Path("/proc/filesystems")


class _XattrBuffer:
    """Where the kernel writes a value."""

    def __init__(self, size: int) -> None:
        self._value = ctypes.create_string_buffer(size)
        self._size = ctypes.c_size_t(size)
        self._arguments = _ARGUMENTS.pack(ctypes.addressof(self._value), size, 0)

    def get(self, dir_fd: int, name: bytes, xattr: bytes) -> bytes | int:
        if xattr == NAMES:
            size = listxattrat(dir_fd, name, AT_SYMLINK_NOFOLLOW, self._value, self._size)
        else:
            size = getxattrat(dir_fd, name, AT_SYMLINK_NOFOLLOW, xattr, self._arguments, _ARGUMENTS_SIZE)
        return self._value.raw[:size] if size >= 0 else ctypes.get_errno()


class _XattrBufferOfThread(threading.local):
    def __init__(self) -> None:
        self.room = _XattrBuffer(_ROOM)


_mine = _XattrBufferOfThread()


@lru_cache(maxsize=1)
def has_getxattrat() -> bool:
    """Whether there are such calls: kernels before Linux 6.13 have none, containers may deny them."""
    return all(_XattrBuffer(1).get(-1, b"name", xattr) == errno.EBADF for xattr in (b"user.none", NAMES))


def get_at(dir_fd: int, name: bytes, xattr: bytes) -> bytes | int:
    """The value of one, of what has a name in a directory, or an errno; never through a link. NAMES: the list of all"""
    if not has_getxattrat():
        return _get(b"/proc/self/fd/%d/%s" % (dir_fd, name), xattr, follow_symlinks=False)
    value = _mine.room.get(dir_fd, name, xattr)
    return _XattrBuffer(_ROOM_MAX).get(dir_fd, name, xattr) if value == errno.ERANGE else value


def get_of(fd: int, xattr: bytes) -> bytes | int:
    """The value of an xattr of what an fd of any kind holds, or an errno; NAMES: the list of all."""
    return _get(b"/proc/self/fd/%d" % fd, xattr)


def _get(path: bytes, xattr: bytes, *, follow_symlinks: bool = True) -> bytes | int:
    try:
        if xattr == NAMES:
            return b"".join(os.fsencode(one) + b"\0" for one in os.listxattr(path, follow_symlinks=follow_symlinks))
        return os.getxattr(path, xattr, follow_symlinks=follow_symlinks)
    except OSError as error:
        return error.errno or errno.EIO


def are_for_all(root: Fd) -> bool:
    """Whether a filesystem tells all users the same of extended attributes, if it lets them ask.

    A local one does, and one of FUSE's where the kernel checks permissions for it. Of any other one it is not known:
    NFS asks its server as each user, CIFS may be logged in as each, and a FUSE daemon may look at the caller.
    """
    kernel = Kernel()
    if kernel.is_local(root):
        return True
    if kernel.filesystem(root) != FUSE_MAGIC:
        return False
    device = os.fstat(root).st_dev
    return any("default_permissions" in mount.flags() for mount in read_mounts() if mount.st_dev() == device)


def is_selinux_enabled() -> bool:
    """Whether SELinux labels files, enforcing or not: then, and only then, the kernel has its filesystem.

    Source  selinuxfs: registered at boot, unless SELinux is compiled out, off by the command line, or not among the
            security modules in use; libselinux's is_selinux_enabled asks the same wherever it isn't mounted
    """
    try:
        return any(line.split()[-1:] == ["selinuxfs"] for line in _FILESYSTEMS.read_text().splitlines())
    except OSError:
        return False
