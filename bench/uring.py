"""FUSE over io_uring, as a benchmark needs it: the machine's switch is on, and is put back; who uses it, is seen."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from bench.support import tell

URING, DEVICE = "io_uring", "/dev/fuse"
_SWITCH = Path("/sys/module/fuse/parameters/enable_uring")
_RING = "anon_inode:[io_uring]"


@contextlib.contextmanager
def switched_on() -> Iterator[None]:
    """Let every daemon of this machine use io_uring for the time of the `with`.

    The kernel looks at the switch when a filesystem is mounted: what is mounted meanwhile keeps what it has.
    """
    before = _SWITCH.read_text(encoding="ascii").strip() if _SWITCH.exists() else None
    if before is None:
        tell("this kernel has no FUSE over io_uring")
    elif before == "N":
        _SWITCH.write_text("Y", encoding="ascii")
        tell(f"{_SWITCH} was N, is Y now, and will be N again")
    try:
        yield
    finally:
        if before == "N":
            _SWITCH.write_text("N", encoding="ascii")
            tell(f"{_SWITCH} is N again")


def transport(pid: int) -> str:
    """What a daemon's messages come by: a ring for each core that may ever be there, or the device.

    Raises  OSError: it is gone
    """
    n_rings = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            n_rings += os.readlink(fd) == _RING
    return URING if n_rings >= (os.cpu_count() or 1) else DEVICE
