"""A test runner that is cheap to fork: it has all tests in memory, and they fork from it tens of thousands of times."""

import ctypes
import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_MADV_COLLAPSE = 25
_HUGE = 2 << 20
_MUCH = 1.3
_FORKS_BETWEEN = 100
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def ease_forks() -> None:
    """What is in memory by now costs a fork little: it lies in huge pages, and no child's collector writes to it.

    A huge page is one entry to be copied and to be torn down again, where there were 512. A kernel that has none
    refuses, and forks cost what they cost. While a child lives, what is written to is split again.

    Source    madvise(2), Linux 6.1. Measured in processor time, with 113 MiB: tests/crash/test_killed.py 21.9 → 15.0 s,
              tests/store/test_hostile.py 12.0 → 8.2 s
    """
    gc.collect()
    gc.freeze()
    _collapse()


def _collapse() -> None:
    for begin, end in _private_memory():
        for address in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            _libc.madvise(address, _HUGE, _MADV_COLLAPSE)


def ease_each_fork() -> None:
    """Have this process, and none of its children, collapse what was split once in so many forks."""
    owner, numbers = os.getpid(), itertools.count(1)

    def collapse() -> None:
        if os.getpid() == owner and next(numbers) % _FORKS_BETWEEN == 0:
            _collapse()

    os.register_at_fork(before=collapse)


class Growth:
    """Whether a test runner has grown so much that forks are dear again, as a test with a million entries leaves it.

    Memory is given back then, as far as it is free, and the rest eased once more. Source: measured with 475 MiB, a fork
    8 ms before and 2 ms after
    """

    def __init__(self) -> None:
        self._resident = _n_resident()

    def undo(self) -> None:
        """To be called when no child lives."""
        if _n_resident() > _MUCH * self._resident:
            gc.unfreeze()
            gc.collect()
            _libc.malloc_trim(0)
            ease_forks()
            self._resident = _n_resident()


def _n_resident() -> int:
    """Pages of ours that are in memory. Source  proc_pid_statm(5)"""
    return int(Path("/proc/self/statm").read_text().split()[1])


def _private_memory() -> Iterator[tuple[int, int]]:
    """Where memory begins and ends that can be written to and is of no file: the heap and Python's arenas."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _offset, _device, inode, *name = line.split()
        if mode == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in span.split("-"))
            yield begin, end
