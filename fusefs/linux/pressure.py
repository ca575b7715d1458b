"""Reads pressure stall information and block device counters, and sets the lowest priority.

The lowest priority does not help other processes that write to the disk (measured: they wait for the journal). It helps
processes that read, and those that need a busy processor.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple, Self

from fusefs.core.pacing import Requests
from fusefs.linux.fd import Fd
from fusefs.linux.syscalls import ioprio_set

PRESSURE = "/proc/pressure"
_PSI = ("io", "memory", "cpu")
_PAGE = 4096


# Columns of /sys/block/*/stat (Documentation/block/stat.rst).
_N_READS, _READS_MS, _IN_FLIGHT, _N_FLUSHES, _FLUSHES_MS = 0, 3, 8, 15, 16


def device_directory(dev: int) -> str:
    """Return a block device's directory in /sys, which might not exist."""
    return f"/sys/dev/block/{os.major(dev)}:{os.minor(dev)}"


class StallTimes(NamedTuple):
    """Seconds since boot during which some task stalled for each resource; None if the kernel doesn't count them."""

    io_s: float | None
    memory_s: float | None
    cpu_s: float | None


class Psi:
    """Reads /proc/pressure; each read makes the kernel update its sums."""

    def __init__(self, directory: str = PRESSURE) -> None:
        self._fds = [_open(f"{directory}/{what}") for what in _PSI]

    def read(self) -> StallTimes:
        return StallTimes(*(None if fd is None else _some_s(fd) for fd in self._fds))

    def close(self) -> None:
        for fd in self._fds:
            if fd is not None:
                fd.close()


def _some_s(fd: Fd) -> float | None:
    """Read the total in the first line: `some avg10=0.00 avg60=0.00 avg300=0.00 total=123` (microseconds)."""
    try:
        text = os.pread(fd, _PAGE, 0)
    except OSError:
        return None  # EOPNOTSUPP: psi=0 on the kernel's command line
    return int(text.partition(b"total=")[2].split(None, 1)[0]) / 1e6


class DeviceCounters:
    """The counters of the whole disk that holds a volume."""

    def __init__(self, fd: Fd) -> None:
        self._fd = fd

    @classmethod
    def open_for(cls, volume_fd: int) -> Self | None:
        """Open the counters for a directory's filesystem; None if no device is visible (network, btrfs, tmpfs)."""
        dev = os.fstat(volume_fd).st_dev
        own = device_directory(dev)
        # Flushes are only counted for the whole disk, and users of its other partitions matter, too.
        is_partition = os.path.exists(f"{own}/partition")
        fd = _open(f"{own}/../stat" if is_partition else f"{own}/stat")
        return None if fd is None else cls(fd)

    def _columns(self) -> list[bytes]:
        try:
            return os.pread(self._fd, _PAGE, 0).split()
        except OSError:
            return []  # ENODEV: unplugged

    def requests(self) -> Requests | None:
        """Return the number and duration of requests completed since the disk appeared; None if the disk is gone."""
        columns = [int(column) for column in self._columns()]
        if len(columns) <= _IN_FLIGHT:
            return None
        n_flushes, flushes_ms = (columns[_N_FLUSHES], columns[_FLUSHES_MS]) if len(columns) > _FLUSHES_MS else (0, 0)
        return Requests(columns[_N_READS], columns[_READS_MS] / 1e3, n_flushes, flushes_ms / 1e3)

    def is_busy(self) -> bool:
        """Return whether the disk has any request in progress."""
        return self._columns()[_IN_FLIGHT : _IN_FLIGHT + 1] not in ([], [b"0"])

    def close(self) -> None:
        self._fd.close()


def _open(path: str) -> Fd | None:
    with suppress(OSError):
        return Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    return None


_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_IDLE = 3 << 13
_NICEST = 19


def set_idle_priority() -> None:
    """Let this process, and later forks of it, run only when no other process needs a processor or the disk."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICEST)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        ioprio_set(_IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE)
