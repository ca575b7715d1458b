"""What the kernel tells of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat that follow the name, which may hold anything: state, parent, group, session, …

    Raises  FileNotFoundError or ProcessLookupError: it is gone
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def all_stats() -> Iterator[tuple[int, list[str]]]:
    """The pid of each process, and those fields; without those that end meanwhile."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield int(name), stat_of(int(name))
