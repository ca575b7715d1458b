"""The processes that serve a FUSE connection: who they are, and their end."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from fusefs.linux.fd import Fd

_DEVICE = "/dev/fuse"


@contextmanager
def servers(connection: int, uid: int) -> Iterator[list[Fd]]:
    """A pidfd of each process of a user's that has a connection open, if we may look at it; none before Linux 6.16.

    connection  its number: the mount's minor device number. That is another's soon after the mount's end: ask before
    uid         who mounted it. Anyone can be sent an fd of it, as D-Bus is while it passes one on, and serves nothing
    Source      fs/fuse/dev.c: fuse_dev_show_fdinfo
    """
    found: list[Fd] = []
    try:
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with suppress(OSError):  # it has ended, or is not ours to look at
                pid_fd = Fd(os.pidfd_open(pid))  # first: it is of the process that is looked at, or of one that is gone
                if pid != os.getpid() and os.stat(f"/proc/{pid}").st_uid == uid and _serves(pid, connection):
                    found.append(pid_fd)
                else:
                    pid_fd.close()
        yield found
    finally:
        for pid_fd in found:
            pid_fd.close()


def _serves(pid: int, connection: int) -> bool:
    told = b"fuse_connection:\t%d\n" % connection
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{number}") == _DEVICE:
                with open(f"/proc/{pid}/fdinfo/{number}", "rb") as info:
                    if told in info.read():
                        return True
    return False


def kill_late(pid_fds: Iterable[int], patience_s: float) -> bool:
    """Wait for the end of processes, and kill those that have not come to it in time; whether there were any."""
    deadline_s = time.monotonic() + patience_s
    late = [fd for fd in pid_fds if not _has_ended(fd, max(0.0, deadline_s - time.monotonic()))]
    for fd in late:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    return bool(late)


def _has_ended(pid_fd: int, limit_s: float) -> bool:
    poll = select.poll()
    poll.register(pid_fd, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))
