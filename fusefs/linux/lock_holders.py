"""Open file description locks: taking one, and whether or by which process one is held, without touching it."""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock: kind, whence, begin, length (0: to the end), pid. Source  fcntl(2)"""


def lock_open_file(fd: int) -> None:
    """Lock a file as long as this fd, or a copy of it, is open. Raises  BlockingIOError: another process has it"""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def is_locked(fd: int) -> bool:
    """Whether that lock is held, in whatever pid namespace; an fd that can read is enough."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def flock_holders(ino: int) -> list[int]:
    """The processes that took a flock on a file with that inode number: those of this pid namespace.

    The device in the list is not always stat's (btrfs): a file of another filesystem may have the same number.
    Source  proc_locks(5)
    """
    with open("/proc/locks", "rb") as lines:
        fields = [line.split() for line in lines]
    return [
        int(words[4])
        for words in fields
        if len(words) >= 6 and words[1] == b"FLOCK" and words[5].rpartition(b":")[2] == b"%d" % ino
    ]
