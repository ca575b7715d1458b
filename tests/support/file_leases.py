"""Leases on files, and what the kernel tells of them."""

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path


def is_broken_into(st: os.stat_result) -> bool:
    """Whether a process waits for the end of a lease on that file: there may be other leases on the machine."""
    file = f" {os.major(st.st_dev):02x}:{os.minor(st.st_dev):02x}:{st.st_ino} "
    return any(" BREAKING " in line and file in line for line in Path("/proc/locks").read_text().splitlines())


@contextmanager
def write_lease(path: Path) -> Iterator[Callable[[], object]]:
    """A process has a write lease on a file, which it keeps until it is told to give it up, or until the kernel does.

    Yields  what tells it
    """
    (ready, tells_ready), (end, tells_end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(tells_end)
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            fd = os.open(path, os.O_RDWR)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            os.write(tells_ready, b".")
            os.read(end, 1)
        finally:
            os._exit(0)
    for fd in (tells_ready, end):
        os.close(fd)
    try:
        assert os.read(ready, 1) == b"."
        yield partial(os.write, tells_end, b".")
    finally:
        os.close(tells_end)
        os.close(ready)
        os.waitpid(pid, 0)
