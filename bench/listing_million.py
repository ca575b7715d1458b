"""A million entries in one directory: how soon the first are there, and what the daemon keeps for each."""

import subprocess
import time
from pathlib import Path

from bench.listing_steps import Work, command, loop, rehearse, taking_part
from bench.operations import drop_caches
from bench.subjects import OURS, SUBJECTS, all_subjects, cpu_s
from bench.support import make_flat, time_command
from tests.support.fuse_watchdog import FuseMount

AT, SMALL = "list", "small"
FIRST = "first entries"
NAMES = "ls -U"
LOOKED = "scandir, lstat"
AFTER_NAMES = "memory: after ls -U"
PASSING = "memory: while ls -U, besides"
KNOWN = "memory: the kernel knows all"
UNCACHED = "memory: the same with --cache-size 0"
FORGOTTEN = "memory: it has forgotten all"
BYTES = (AFTER_NAMES, PASSING, KNOWN, UNCACHED, FORGOTTEN)
"""Figures in bytes for each entry, above what the daemon had before; the others are seconds."""
_IDLE_S, _IDLE_MAX_S = 1.0, 60.0


def take_names(work: Work) -> dict[str, float]:
    """How soon there are names, and what it takes to tell them; native has no daemon.

    Raises  Unable
    """
    names = command(NAMES, "ls", "-U", "{}", at=AT)
    with taking_part(work, all_subjects()) as (path, fuse):
        rehearse(names)
        time_command(["ls", "-l", path / SMALL])
        before = begin_peak(fuse) if fuse else 0
        found = {FIRST: first_entries(path / AT), NAMES: names.take(path)}
        if fuse:
            peak, now = memory_bytes(fuse, "VmHWM"), memory_bytes(fuse, "VmRSS")
            found |= {AFTER_NAMES: (now - before) / work.n, PASSING: (peak - now) / work.n}
    return found


def first_entries(directory: Path) -> float:
    """Seconds until `ls -U` into a pipe has told something; then it ends, as before `head`."""
    began = time.perf_counter()
    with subprocess.Popen(["ls", "-U", directory], stdout=subprocess.PIPE) as ls:
        assert ls.stdout
        ls.stdout.read(1)
        seconds = time.perf_counter() - began
        ls.kill()
    return seconds


def take_memory(work: Work) -> dict[str, float]:
    """What is kept for each entry when all were looked at.

    Raises  Unable
    """
    found = {}
    with taking_part(work, all_subjects()) as (path, fuse):
        assert fuse
        found[LOOKED], found[KNOWN] = _measure_listing(path, fuse, work.n)
        before = memory_bytes(fuse, "VmRSS")
        drop_caches()
        wait_until_idle(fuse)
        found[FORGOTTEN] = found[KNOWN] - (before - memory_bytes(fuse, "VmRSS")) / work.n
    if work.subject == OURS:
        with taking_part(work, {OURS: (*SUBJECTS[OURS], "--cache-size", "0")}) as (path, fuse):
            assert fuse
            _, found[UNCACHED] = _measure_listing(path, fuse, work.n)
    return found


def _measure_listing(path: Path, fuse: FuseMount, n: int) -> tuple[float, float]:
    """Return the seconds of a long listing, and the bytes for each entry by which the daemon has grown."""
    time_command(["ls", "-l", path / SMALL])
    before = memory_bytes(fuse, "VmRSS")
    seconds = loop(LOOKED, "ls -l, cold", n).take(path)
    return seconds, (memory_bytes(fuse, "VmRSS") - before) / n


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
    """Let it take in what the kernel told it to forget: no process waits for that, and nothing says that it is done."""
    until_s = time.monotonic() + _IDLE_MAX_S
    seen = -1.0
    while (now := cpu_s(fuse)) != seen and time.monotonic() < until_s:
        seen = now
        time.sleep(_IDLE_S)


def memory_bytes(fuse: FuseMount, key: str) -> int:
    """A line of /proc/PID/status."""
    lines = Path(f"/proc/{fuse.pid}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10
