"""Takes file locks, and finds out which processes hold one, without touching the lock.

Covers open file description locks, flocks, and the lock that ensures that only one service runs at a time.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress

from fusefs.linux.fd import Fd
from fusefs.linux.mountinfo import read_mounts

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock: type, whence, start, length (0: to the end), pid. Source  fcntl(2)"""
_NAME = b"lock"


def lock_open_file(fd: int) -> None:
    """Lock a file for as long as this fd, or a copy of it, is open. Raises  BlockingIOError: it is already locked"""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def is_locked(fd: int) -> bool:
    """Return whether any process, in any pid namespace, holds a lock from `lock_open_file`. fd: open for reading"""
    lock = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack(lock)[0] != fcntl.F_UNLCK)


def flock_holders(st: os.stat_result) -> list[int]:
    """Return the processes in this pid namespace that hold a flock on a file.

    /proc/locks contains the filesystem's device, which stat does not report on every filesystem (btrfs). If no mount
    has the file's device, locks on files with the same inode number on any filesystem are included.
    Source  proc_locks(5)
    """
    with open("/proc/locks", "rb") as lines:
        fields = [line.split() for line in lines]
    device = b"%02x:%02x" % (os.major(st.st_dev), os.minor(st.st_dev))
    holders = [
        (int(words[4]), words[5].rpartition(b":")[0])
        for words in fields
        if len(words) >= 6 and words[1] == b"FLOCK" and words[5].rpartition(b":")[2] == b"%d" % st.st_ino
    ]
    same = [pid for pid, at in holders if at == device]
    if same or not holders or any(mount.st_dev() == st.st_dev for mount in read_mounts()):
        return same
    return [pid for pid, _at in holders]


def uids_of(pid: int) -> frozenset[int]:
    """Return a process's real, effective, saved and filesystem UIDs; an empty set if the process has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as lines:
            return frozenset(int(uid) for line in lines if line.startswith(b"Uid:") for uid in line.split()[1:])
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()


def take_lock(directory: bytes, name: bytes = _NAME) -> Fd | None:
    """Take a lock in a directory (by default the service's), held while the returned fd is open; None if it is taken.

    Only the owner may open the lock file: any user who could open it could lock it, and so keep us out. Processes that
    are forked later must close the fd, or they keep the lock after the service has ended.
    """
    fd = Fd(os.open(directory + b"/" + name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fd.close()
        return None
    return fd


def is_service_running(directory: bytes) -> bool:
    """Return whether a service holds the lock; False if the service is in another pid namespace."""
    with suppress(OSError):
        return bool(flock_holders(os.stat(directory + b"/" + _NAME)))
    return False


def holds_service_lock(directory: bytes, pid: int) -> bool:
    """Return whether a process that claims to be the service holds the service's lock.

    This needs no permission, and does not touch the lock. The result is False if the process is in another pid
    namespace.
    """
    try:
        st = os.stat(directory + b"/" + _NAME)
    except FileNotFoundError:
        return False
    return pid in flock_holders(st)
