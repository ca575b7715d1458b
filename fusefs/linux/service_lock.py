"""The service's lock: one service at a time, and every process can tell whether it runs."""

from __future__ import annotations

import fcntl
import os

from fusefs.linux.fd import Fd
from fusefs.linux.lock_holders import flock_holders

_NAME = b"lock"


def take(directory: bytes, name: bytes = _NAME) -> Fd | None:
    """The lock of a directory, a service's by its usual name, for as long as the fd is open; None while another has it.

    Only its owner may open the file: who can open it can hold it, and so keep us out. Processes forked
    later must close it, or they keep it after the service's end.
    """
    fd = Fd(os.open(directory + b"/" + name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fd.close()
        return None
    return fd


def is_held(directory: bytes, pid: int) -> bool:
    """Whether the process that says it is the service holds the lock: needs no permission, and disturbs no taker.

    Not seen from another pid namespace.
    """
    try:
        ino = os.stat(directory + b"/" + _NAME).st_ino
    except FileNotFoundError:
        return False
    return pid in flock_holders(ino)
