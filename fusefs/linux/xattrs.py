"""Extended attributes of one file, and the mark on restored files.

A restored tree has its old times, so a rule would match it again. To prevent this, the mark holds the time of the
restore. Any user who may write to a file can set the mark, but could also set the file's times. A mark on
a directory spares everything in it, so a user's mark counts only if no other user may write in that directory. Root
sets a different mark, which links, sockets, and files of any mode can have, too. A later mark replaces an earlier one.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from fusefs.core.metadata_cache import NAMES
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import FUSE_MAGIC, OTHERS_WRITE, RESTORED_XATTRS, Kernel
from fusefs.linux.mountinfo import read_mounts

_FILESYSTEMS = Path("/proc/filesystems")


def read_xattr(fd: int, xattr: bytes) -> bytes | int:
    """Return the value of an xattr, or an errno. fd: O_PATH is enough. xattr: NAMES for the list of all names"""
    path = b"/proc/self/fd/%d" % fd
    try:
        if xattr == NAMES:
            return b"".join(os.fsencode(one) + b"\0" for one in os.listxattr(path))
        return os.getxattr(path, xattr)
    except OSError as error:
        return error.errno or errno.EIO


def are_same_for_all_users(root: Fd) -> bool:
    """Return whether a filesystem returns the same extended attributes to every user who may read them.

    Local filesystems do, and so do FUSE filesystems for which the kernel checks permissions. For others, this is not
    known: NFS asks its server as each user, CIFS may have a login for each, and a FUSE daemon may check its caller.
    """
    kernel = Kernel()
    if kernel.is_local(root):
        return True
    if kernel.filesystem(root) != FUSE_MAGIC:
        return False
    device = os.fstat(root).st_dev
    return any("default_permissions" in mount.flags() for mount in read_mounts() if mount.st_dev() == device)


def is_selinux_enabled() -> bool:
    """Return whether SELinux labels files, enforcing or not: if so, the kernel has registered selinuxfs.

    Source  the kernel registers selinuxfs at boot, unless SELinux is compiled out, disabled on the command line, or not
            among the security modules in use; if selinuxfs isn't mounted, libselinux's is_selinux_enabled also checks
            this
    """
    try:
        return any(line.split()[-1:] == ["selinuxfs"] for line in _FILESYSTEMS.read_text().splitlines())
    except OSError:
        return False


_DIGITS = 20


def mark_restored(kernel: Kernel, fd: Fd) -> bool:
    """Mark a file as restored now. fd: O_PATH is enough. Returns  whether that succeeded"""
    value = b"%d" % time.time_ns()
    with suppress(OSError):
        for name in _mark_names(fd):
            with suppress(OSError):
                kernel.set_xattr(fd.path(), name, value)
                return True
    return False


def restored_ns(fd: Fd) -> int:
    """Return when a file was last restored, in nanoseconds since the epoch; 0: not known. fd: O_PATH is enough"""
    times = [0]
    for name in _mark_names(fd):
        try:
            value = os.getxattr(fd.path(), name)
        except OSError:
            continue
        if value.isdigit() and len(value) <= _DIGITS:
            times.append(int(value))
    return max(times)


def _mark_names(fd: Fd) -> tuple[str, ...]:
    """Return the names of the marks that we can set and that count, the best one first. Raises  OSError"""
    st, (roots, users) = os.fstat(fd), RESTORED_XATTRS
    is_shared = stat.S_ISDIR(st.st_mode) and st.st_mode & OTHERS_WRITE
    return (*((roots,) if os.geteuid() == 0 else ()), *(() if is_shared else (users,)))
