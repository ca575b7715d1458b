"""A mark on what was restored, with the time: a tree comes back with its old times, so that a rule would take it again.

A user who may write to a file can set the mark, and could as well set the file's times. Root sets one that links,
sockets and files of every mode can have; a user's own is on what that user may write to. The mark stays where it is,
and a later one takes its place.
"""

from __future__ import annotations

import os
import time

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import RESTORED_XATTRS, Kernel

_DIGITS = 20


def mark_restored(kernel: Kernel, fd: Fd) -> bool:
    """Mark what an fd of any kind holds; whether that could be done."""
    value = b"%d" % time.time_ns()
    for name in RESTORED_XATTRS[os.geteuid() != 0 :]:
        try:
            kernel.set_xattr(fd.path(), name, value)
        except OSError:
            continue
        return True
    return False


def restored_ns(fd: Fd) -> int:
    """When what an fd of any kind holds was restored last, in nanoseconds since the epoch; 0 if that is not known."""
    times = [0]
    for name in RESTORED_XATTRS[os.geteuid() != 0 :]:
        try:
            value = os.getxattr(fd.path(), name)
        except OSError:
            continue
        if value.isdigit() and len(value) <= _DIGITS:
            times.append(int(value))
    return max(times)
