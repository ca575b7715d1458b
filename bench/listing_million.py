"""A million entries in one directory: how soon the first are there, and what the daemon keeps for each."""

import contextlib
from pathlib import Path

from bench.listing_steps import Work, all_subjects, command, loop, rehearse, taking_part
from bench.operations import drop_caches
from bench.support import make_flat
from tests.support.fuse import FuseMount

AT = "list"
FIRST = "first entries"
NAMES = "ls -U"
LOOKED = "scandir, lstat"
AFTER_NAMES = "memory: peak while ls -U"
KNOWN = "memory: the kernel knows all"
FORGOTTEN = "memory: it has forgotten all"
BYTES = (AFTER_NAMES, KNOWN, FORGOTTEN)
"""Figures in bytes for each entry, above what the daemon had before; the others are seconds."""


def take_turn(work: Work) -> dict[str, float]:
    """All figures of one subject; native has no daemon.

    Raises  Unable
    """
    head = command(FIRST, "sh", "-c", 'ls -U "$0" | head', "{}", at=AT)
    with taking_part(work, all_subjects()) as (path, fuse):
        rehearse(head)
        found = {FIRST: head.take(path)}
        before = begin_peak(fuse) if fuse else 0
        found[NAMES] = command(NAMES, "ls", "-U", "{}", at=AT).take(path)
        if fuse:
            found[AFTER_NAMES] = (memory_bytes(fuse, "VmHWM") - before) / work.n
        found[LOOKED] = loop(LOOKED, "ls -l again", work.n).take(path)
        if fuse:
            found[KNOWN] = (memory_bytes(fuse, "VmRSS") - before) / work.n
            drop_caches()
            with contextlib.suppress(FileNotFoundError):
                (path / "no such name").lstat()  # what was forgotten before is taken before
            found[FORGOTTEN] = (memory_bytes(fuse, "VmRSS") - before) / work.n
    return found


def make(source: Path, n: int) -> None:
    """The directory."""
    source.mkdir()
    make_flat(source / AT, n)


def begin_peak(fuse: FuseMount) -> int:
    """What a daemon has now, which is the peak from here on."""
    Path(f"/proc/{fuse.pid}/clear_refs").write_text("5", encoding="ascii")
    return memory_bytes(fuse, "VmRSS")


def memory_bytes(fuse: FuseMount, key: str) -> int:
    """A line of /proc/PID/status."""
    lines = Path(f"/proc/{fuse.pid}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10
