"""Pressure stall information, block device counters, early writeback of metadata, and the lowest priority.

Unlinks on ext4 leave inode tables, bitmaps and directories to be written. The kernel writes what is older than half a
minute, all of it at once: hundreds of requests, behind which whoever reads or flushes has to wait. So the writeback is
begun a little at a time.

The lowest priority changes nothing that a neighbour on the disk would feel (measured: the neighbour waits for the
journal). It counts where processors are short, and for reads.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from threading import Lock
from typing import NamedTuple, Self

from fusefs.core.pacing import Requests
from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import EXT_MAGIC
from fusefs.linux.syscalls import ioprio_set

PRESSURE = "/proc/pressure"
_PSI = ("io", "memory", "cpu")
_PAGE = 4096


# Columns of /sys/block/*/stat (Documentation/block/stat.rst).
_N_READS, _READS_MS, _IN_FLIGHT, _N_FLUSHES, _FLUSHES_MS = 0, 3, 8, 15, 16


def device_directory(dev: int) -> str:
    """What the kernel tells of a block device; there may be none of that number."""
    return f"/sys/dev/block/{os.major(dev)}:{os.minor(dev)}"


class StallTimes(NamedTuple):
    """Seconds since the boot in which some task stalled for it; None where this kernel does not count."""

    io_s: float | None
    memory_s: float | None
    cpu_s: float | None


class Psi:
    """/proc/pressure, as it is at the moment: each read makes the kernel add up."""

    def __init__(self, directory: str = PRESSURE) -> None:
        self._fds = [_open(f"{directory}/{what}") for what in _PSI]

    def read(self) -> StallTimes:
        """The sums."""
        return StallTimes(*(None if fd is None else _some_s(fd) for fd in self._fds))

    def close(self) -> None:
        """Let go of the files."""
        for fd in self._fds:
            if fd is not None:
                fd.close()


def _some_s(fd: Fd) -> float | None:
    """The total of the first line: `some avg10=0.00 avg60=0.00 avg300=0.00 total=123` (microseconds)."""
    try:
        text = os.pread(fd, _PAGE, 0)
    except OSError:
        return None  # EOPNOTSUPP: psi=0
    return int(text.partition(b"total=")[2].split(None, 1)[0]) / 1e6


class DeviceCounters:
    """The counters of the whole disk that a volume is on."""

    def __init__(self, fd: Fd) -> None:
        self._fd = fd

    @classmethod
    def of(cls, volume_fd: int) -> Self | None:
        """The device below a directory; None where there is none to be seen (network, btrfs, tmpfs)."""
        dev = os.fstat(volume_fd).st_dev
        own = device_directory(dev)
        # Flushes are counted for the disk alone, and processes in another partition of it are neighbours too.
        is_partition = os.path.exists(f"{own}/partition")
        fd = _open(f"{own}/../stat" if is_partition else f"{own}/stat")
        return None if fd is None else cls(fd)

    def _columns(self) -> list[bytes]:
        try:
            return os.pread(self._fd, _PAGE, 0).split()
        except OSError:
            return []  # ENODEV: unplugged

    def requests(self) -> Requests | None:
        """What it has done since it is there; None if it is gone."""
        columns = [int(column) for column in self._columns()]
        if len(columns) <= _IN_FLIGHT:
            return None
        n_flushes, flushes_ms = (columns[_N_FLUSHES], columns[_FLUSHES_MS]) if len(columns) > _FLUSHES_MS else (0, 0)
        return Requests(columns[_N_READS], columns[_READS_MS] / 1e3, n_flushes, flushes_ms / 1e3)

    def is_busy(self) -> bool:
        """Whether it has anything to do right now."""
        return self._columns()[_IN_FLIGHT : _IN_FLIGHT + 1] not in ([], [b"0"])

    def close(self) -> None:
        """Let go of the file."""
        self._fd.close()


def _open(path: str) -> Fd | None:
    with suppress(OSError):
        return Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    return None


_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_IDLE = 3 << 13
_NICEST = 19


def be_idle() -> None:
    """Run only when no other process wants a processor or the disk, with all that is forked from now on."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICEST)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        ioprio_set(_IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE)


class MetadataWriteback:
    """The block device of a volume, whose pages these are. Nothing is read from it, nor written to it, by us."""

    def __init__(self, fd: Fd) -> None:
        self._fd = fd
        self._used = Lock()
        """Taken while a thread is at it, and for good with the fd's end."""
        self._is_over = False

    @classmethod
    def of(cls, volume_fd: int) -> Self | None:
        """None where a filesystem does this by itself (xfs, btrfs), or we may not open the device."""
        with suppress(OSError):
            dev = os.fstat(volume_fd).st_dev
            if syscalls.statfs_type(volume_fd) == EXT_MAGIC:
                fd = Fd(os.open(_path_of(dev), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
                told = os.fstat(fd)
                if stat.S_ISBLK(told.st_mode) and told.st_rdev == dev:
                    return cls(fd)
                fd.close()
        return None

    def begin(self) -> None:
        """Have written what waits for no commit of the journal any more. It waits for nothing but room in the device's
        queue; in a thread, which may go on when it is closed.
        """
        if self._used.acquire(blocking=False):
            with suppress(OSError):  # unplugged
                syscalls.sync_file_range(self._fd, syscalls.SYNC_FILE_RANGE_WRITE)
            self._used.release()
            self._let_go()

    def close(self) -> None:
        """Let go of the device, at the latest when no thread is at it any more."""
        self._is_over = True
        self._let_go()

    def _let_go(self) -> None:
        if self._is_over and self._used.acquire(blocking=False):
            self._fd.close()


def _path_of(dev: int) -> bytes:
    """By the kernel's own name for a block device, which it has in /dev. Raises  OSError; there may be none"""
    with open(f"{device_directory(dev)}/uevent", "rb") as told:
        names = [line.partition(b"=")[2] for line in told.read().splitlines() if line.startswith(b"DEVNAME=")]
    return os.path.join(b"/dev", *names)
