"""Who holds a flock, without touching it."""

from __future__ import annotations

import os
from contextlib import suppress


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


def command_of(pid: int) -> str:
    """The name of a process's program; empty if it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/comm", "rb") as file:
        return os.fsdecode(file.read().rstrip(b"\n"))
    return ""
