"""What a command and all its processes need of memory and fds, seen from outside."""

from __future__ import annotations

import functools
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.support.proc_stat import status_of
from tests.support.reap_process import session

_GLANCE_S = 0.02  # a look walks all processes, and all their pages: more often it would have half a processor


class Peak(NamedTuple):
    """The most that was seen.

    memory_kib   of all processes together, what several share counted once
    largest_kib  of one process, as the kernel remembers it (VmHWM)
    n_fds        of one process
    n_processes  at a time
    """

    memory_kib: int = 0
    largest_kib: int = 0
    n_fds: int = 0
    n_processes: int = 0

    def or_more(self, other: Peak) -> Peak:
        """The larger of each."""
        return Peak(*map(max, zip(self, other, strict=True)))


@functools.cache
def bare_interpreter_kib() -> int:
    """The memory of a Python that does nothing."""
    code = "import re; print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def watch(argv: Sequence[str | Path], n_fds_max: int) -> tuple[int, Peak]:
    """Run a command in a session of its own; its exit code and its peak. An fd more than it may have is EMFILE."""
    begun = ["sh", "-c", 'read -r _ && exec "$@" </dev/null', "sh"]
    limited = [*begun, "prlimit", f"--nofile={n_fds_max}", *argv]
    command = subprocess.Popen(limited, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    pid_fd, peak = os.pidfd_open(command.pid), Peak()
    try:
        peak = _measure(command.pid)  # however late the next look is
        assert command.stdin is not None
        with command.stdin as begins:
            begins.write(b"\n")
        looked_s = 0.0
        while not select.select([pid_fd], [], [], max(_GLANCE_S, 2 * looked_s))[0]:
            began_s = time.thread_time()
            peak = peak.or_more(_measure(command.pid))
            looked_s = time.thread_time() - began_s
    finally:
        os.close(pid_fd)
    return command.wait(), peak


_RUN = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(done.returncode)
"""


def beside_small_parent(argv: Sequence[str | Path]) -> list[str | Path]:
    """Return the command that runs `argv` and then prints on stderr the most memory that it had, KiB.

    Its parent is a small process: what a process begins with counts as its own, and a test runner is larger than what
    it starts. Source: setmax_mm_hiwater_rss in begin_new_exec, fs/exec.c
    """
    return [sys.executable, "-S", "-c", _RUN, *argv]


def peak_of(pid: int) -> int:
    """The most memory that a process has had, KiB. Raises  OSError"""
    return int(status_of(pid).get("VmHWM", ["0"])[0])


def _measure(leader: int) -> Peak:
    memory_kib = n_processes = largest_kib = n_fds = 0
    for pid, _state in session(leader):
        with suppress(OSError):  # it has ended by now
            memory_kib += int(status_of(pid, "smaps_rollup").get("Pss", ["0"])[0])
            largest_kib = max(largest_kib, peak_of(pid))
            n_fds = max(n_fds, len(os.listdir(f"/proc/{pid}/fd")))
            n_processes += 1
    return Peak(memory_kib, largest_kib, n_fds, n_processes)
