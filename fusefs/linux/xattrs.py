"""Extended attributes of what an fd holds, and what filesystems have of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fusefs.core.metadata_cache import NAMES
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import FUSE_MAGIC, Kernel
from fusefs.linux.mountinfo import read_mounts

_FILESYSTEMS = Path("/proc/filesystems")


def get_of(fd: int, xattr: bytes) -> bytes | int:
    """The value of an xattr of what an fd of any kind holds, or an errno; NAMES: the list of all."""
    path = b"/proc/self/fd/%d" % fd
    try:
        if xattr == NAMES:
            return b"".join(os.fsencode(one) + b"\0" for one in os.listxattr(path))
        return os.getxattr(path, xattr)
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
