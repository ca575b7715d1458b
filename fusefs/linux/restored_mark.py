"""A mark on what was restored, with the time: a tree comes back with its old times, so that a rule would take it again.

A user who may write to a file can set the mark, and could as well set the file's times. A directory's mark spares all
that is in it, so that a user's counts only where no other user may write in that directory. Root sets a mark of its
own, which links, sockets, and files of every mode can have too. A later mark takes the place of an earlier one.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, RESTORED_XATTRS, Kernel

_DIGITS = 20


def mark_restored(kernel: Kernel, fd: Fd) -> bool:
    """Mark what an fd of any kind holds; whether that could be done."""
    value = b"%d" % time.time_ns()
    with suppress(OSError):
        for name in _names_for(fd):
            with suppress(OSError):
                kernel.set_xattr(fd.path(), name, value)
                return True
    return False


def restored_ns(fd: Fd) -> int:
    """When what an fd of any kind holds was restored last, in nanoseconds since the epoch; 0 if that is not known."""
    times = [0]
    for name in _names_for(fd):
        try:
            value = os.getxattr(fd.path(), name)
        except OSError:
            continue
        if value.isdigit() and len(value) <= _DIGITS:
            times.append(int(value))
    return max(times)


def _names_for(fd: Fd) -> tuple[str, ...]:
    """The attributes that we can set, and that count, the best first. Raises  OSError"""
    st, (roots, users) = os.fstat(fd), RESTORED_XATTRS
    is_shared = stat.S_ISDIR(st.st_mode) and st.st_mode & OTHERS_WRITE
    return (*((roots,) if os.geteuid() == 0 else ()), *(() if is_shared else (users,)))
