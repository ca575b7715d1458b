"""FUSE over io_uring, as a benchmark needs it: the machine's switch is on, and is put back; who uses it, is seen."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from bench.support import print_progress

URING, DEVICE = "io_uring", "/dev/fuse"
_SWITCH = Path("/sys/module/fuse/parameters/enable_uring")
_SWITCHED = Path("/run/trashd-tests.uring")
_RING = "anon_inode:[io_uring]"


@contextlib.contextmanager
def switched_on() -> Iterator[None]:
    """Let every daemon of this machine use io_uring for the time of the `with`.

    The kernel looks at the switch when a filesystem is mounted: what is mounted meanwhile keeps what it has. Whoever
    wants it on, a run of the tests too (.ci/pytest), holds a lock; the last of them puts back what the first has found.
    """
    if not _SWITCH.exists():
        print_progress("this kernel has no FUSE over io_uring")
        yield
        return
    with _SWITCHED.open("a+", encoding="ascii") as switched:
        fcntl.flock(switched, fcntl.LOCK_SH)
        if _SWITCH.read_text(encoding="ascii").strip() == "N":
            switched.write("N\n")
            switched.flush()
            _SWITCH.write_text("Y", encoding="ascii")
            print_progress(f"{_SWITCH} was N, is Y now, and will be N again")
        try:
            yield
        finally:
            _switch_back(switched)


def is_switched_on() -> bool:
    """Whether a mount that asks for io_uring would have it, as far as the machine's switch goes."""
    return _SWITCH.exists() and _SWITCH.read_text(encoding="ascii").strip() == "Y"


def _switch_back(switched: TextIO) -> None:
    if not os.fstat(switched.fileno()).st_size:
        return
    with contextlib.suppress(BlockingIOError):  # others still want it
        fcntl.flock(switched, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _SWITCH.write_text("N", encoding="ascii")
        switched.truncate(0)
        print_progress(f"{_SWITCH} is N again")


def transport(pid: int) -> str:
    """What a daemon's messages come by: a ring for each core that may ever be there, or the device.

    Raises  OSError: it is gone
    """
    n_rings = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            n_rings += os.readlink(fd) == _RING
    return URING if n_rings >= (os.cpu_count() or 1) else DEVICE
