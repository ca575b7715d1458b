"""What the kernel tells of processes."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GLANCE_S = 0.002


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


def status_of(pid: int, file: str = "status") -> dict[str, list[str]]:
    """The words of each line of /proc/PID/status, or another file like it, by its key. Raises  as `stat_of`"""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return {key: value.split() for key, _, value in (line.partition(":") for line in lines)}


def stop(pid: int) -> None:
    """Send SIGSTOP, and wait until that has come to each thread: the one that takes the signal tells the others."""
    os.kill(pid, signal.SIGSTOP)
    while any(b") R" in task or b") S" in task for task in _tasks(pid)):
        time.sleep(_GLANCE_S)


def _tasks(pid: int) -> Iterator[bytes]:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield Path(f"/proc/{pid}/task/{thread}/stat").read_bytes()
