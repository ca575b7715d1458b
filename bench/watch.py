"""What a command takes while it runs, all its processes together: memory and fds.

Looking costs the watched one time, so nothing is timed while it is watched.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.support import PYTHON, running, wait

_EVERY_S = 0.01


class Peak(NamedTuple):
    """The highest of each; a peak shorter than 10 ms may not be seen."""

    rss_kib: int = 0  # summed over the processes: what they share counts for each
    pss_kib: int = 0  # summed likewise: what they share counts once
    n_fds: int = 0  # of the process that has most
    n_processes: int = 0

    def or_higher(self, other: "Peak") -> "Peak":
        """The higher of each."""
        return Peak(*map(max, self, other))


def watch(command: Sequence[str | Path]) -> Peak:
    """The peak of a command and of all that it starts.

    Raises  OSError if it fails
    """
    peak = Peak()
    with running(command) as pid:
        while (code := wait(pid, _EVERY_S)) is None:
            peak = peak.or_higher(_measure_group(pid))
    if code:
        raise OSError(errno.ECHILD, f"exit code {code}", os.fspath(command[0]))
    return peak


def watch_interpreter() -> Peak:
    """The peak of an interpreter that does nothing."""
    return watch([PYTHON, "-c", "import time; time.sleep(0.2)"])


def _measure_group(group: int) -> Peak:
    usages = [usage for usage in map(_measure_process, _members(group)) if usage]
    rss, pss, fds = (zip(*usages, strict=True)) if usages else ((0,), (0,), (0,))
    return Peak(sum(rss), sum(pss), max(fds), len(usages))


def _members(group: int) -> Iterator[Path]:
    """The processes of a group, as directories of /proc."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group: the name may hold anything
            if int((process / "stat").read_bytes().rpartition(b")")[2].split()[2]) == group:
                yield process


def _measure_process(process: Path) -> tuple[int, int, int] | None:
    """Return the RSS and PSS in KiB and the number of fds of a process; None if it has ended."""
    try:
        lines = (process / "smaps_rollup").read_text(encoding="utf-8").splitlines()
        n_fds = len(os.listdir(process / "fd"))
    except OSError:
        return None
    sizes = {name: size.split()[0] for name, _, size in (line.partition(":") for line in lines[1:])}
    return int(sizes["Rss"]), int(sizes["Pss"]), n_fds
