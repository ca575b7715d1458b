"""A million entries in one directory: how soon the first are there, and what the daemon keeps for each."""

import time
from pathlib import Path

from bench.listing_steps import Work, all_subjects, command, loop, rehearse, taking_part
from bench.operations import drop_caches
from bench.subjects import OURS, SUBJECTS, cpu_s
from bench.support import make_flat, time_command
from tests.support.fuse import FuseMount

AT, SMALL = "list", "small"
FIRST = "first entries"
NAMES = "ls -U"
LOOKED = "scandir, lstat"
AFTER_NAMES = "memory: peak while ls -U"
KNOWN = "memory: the kernel knows all"
UNCACHED = "memory: the same with --cache-size 0"
FORGOTTEN = "memory: it has forgotten all"
BYTES = (AFTER_NAMES, KNOWN, UNCACHED, FORGOTTEN)
"""Figures in bytes for each entry, above what the daemon had before; the others are seconds."""
_IDLE_S, _IDLE_MAX_S = 1.0, 60.0


def take_turn(work: Work) -> dict[str, float]:
    """All figures of one subject; native has no daemon.

    Raises  Unable
    """
    head = command(FIRST, "sh", "-c", 'ls -U "$0" | head', "{}", at=AT)
    look = loop(LOOKED, "ls -l again", work.n)
    with taking_part(work, all_subjects()) as (path, fuse):
        rehearse(head)
        time_command(["ls", "-l", path / SMALL])
        before = begin_peak(fuse) if fuse else 0
        found = {FIRST: head.take(path), NAMES: command(NAMES, "ls", "-U", "{}", at=AT).take(path)}
        if fuse:
            found[AFTER_NAMES] = (memory_bytes(fuse, "VmHWM") - before) / work.n
        found[LOOKED] = look.take(path)
        if fuse:
            found[KNOWN] = (memory_bytes(fuse, "VmRSS") - before) / work.n
            drop_caches()
            wait_until_idle(fuse)
            found[FORGOTTEN] = (memory_bytes(fuse, "VmRSS") - before) / work.n
    if work.subject == OURS:
        with taking_part(work, {OURS: (*SUBJECTS[OURS], "--cache-size", "0")}) as (path, fuse):
            assert fuse
            time_command(["ls", "-l", path / SMALL])
            before = memory_bytes(fuse, "VmRSS")
            look.take(path)
            found[UNCACHED] = (memory_bytes(fuse, "VmRSS") - before) / work.n
    return found


def make(source: Path, n: int) -> None:
    """The directory, and a small one, so that all code of a daemon was run before its memory is looked at."""
    source.mkdir()
    make_flat(source / AT, n)
    make_flat(source / SMALL, 10)


def begin_peak(fuse: FuseMount) -> int:
    """What a daemon has now, which is the peak from here on."""
    Path(f"/proc/{fuse.pid}/clear_refs").write_text("5", encoding="ascii")
    return memory_bytes(fuse, "VmRSS")


def wait_until_idle(fuse: FuseMount) -> None:
    """Let it take in what the kernel told it to forget: nobody waits for that, and nothing says that it is done."""
    until_s = time.monotonic() + _IDLE_MAX_S
    seen = -1.0
    while (now := cpu_s(fuse)) != seen and time.monotonic() < until_s:
        seen = now
        time.sleep(_IDLE_S)


def memory_bytes(fuse: FuseMount, key: str) -> int:
    """A line of /proc/PID/status."""
    lines = Path(f"/proc/{fuse.pid}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10
