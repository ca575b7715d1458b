"""The identity of this machine, boot, command and terminal session, and the present time on each clock."""

from __future__ import annotations

import os
import time
from functools import cache

from fusefs.core.orphan_age import Clock, Now
from fusefs.core.record import Invocation
from fusefs.linux.kernel import Kernel


def host_id() -> str:
    """Return the machine ID, or the host name if there is no ID (containers)."""
    try:
        with open("/etc/machine-id", "rb") as file:
            return file.read().decode("ascii").strip() or os.uname().nodename
    except (OSError, ValueError):
        return os.uname().nodename


@cache
def boot_id() -> str:
    """Return the running kernel's boot ID. All containers on this kernel share this ID, and also file locks."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:  # text mode would load another ASCII codec
        return file.read().decode("ascii").strip()


@cache
def invocation() -> Invocation:
    """Return the Invocation for this process's records. Its ID is random and contains nothing of the command line."""
    return Invocation(os.urandom(8).hex(), session())


def invocation_of(pid: int) -> Invocation | None:
    """Return an Invocation for records written on behalf of another process; None if that process is not visible.

    pid  pid of the process or of one of its threads; 0: it is in another pid namespace
    """
    if pid <= 0:
        return None
    try:
        start = _Process(pid).start
    except (OSError, ValueError):
        return None
    return Invocation(f"{pid & 0xFFFF_FFFF:08x}{start & 0xFFFF_FFFF:08x}", session(pid))


def session(pid: int = 0) -> str:
    """Return the ID of a process's terminal session, the same for all commands of one shell; "": not known.

    `trashd undo` restores what the last command of the same session removed. The ID names the session leader, with its
    start time and boot in case the pid is reused. If sudo or a similar program gives its command a separate terminal
    and session, the calling user's session counts.
    """
    try:
        leader = _Process(os.getsid(pid))
        while leader.parent:
            parent = _Process(leader.parent)
            if parent.session in (0, leader.pid) or not parent.has_terminal:
                break
            caller = _Process(parent.session)
            if caller.uid == leader.uid:
                break
            leader = caller  # a program in the caller's session created this session, for another user
        return f"{boot_id()[:8]}.{leader.pid}.{leader.start}"
    except (OSError, ValueError):
        return ""


class _Process:
    """A process. Source  proc_pid_stat(5): the fields that follow its name, which may contain anything"""

    def __init__(self, pid: int) -> None:
        directory = f"/proc/{pid}"
        with open(f"{directory}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self.pid = pid
        self.uid = os.stat(directory).st_uid
        self.parent, self.session = int(fields[1]), int(fields[3])
        self.has_terminal = int(fields[4]) != 0
        self.start = int(fields[19])


_MOMENT_NS = 100_000_000


def read_now(kernel: Kernel, clocks: tuple[Clock, ...] = ()) -> Now:
    """Return the present moment. clocks: the saved histories of the wall clock"""
    return Now(kernel.now_ns(), kernel.boot_ns(), boot_id(), clocks)


def clocks_ns() -> tuple[int, int]:
    """Read CLOCK_REALTIME and CLOCK_BOOTTIME without a stall in between, which would look like a wall-clock change."""
    while True:
        began_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        wall_ns, boot_ns = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if boot_ns - began_ns < _MOMENT_NS:
            return wall_ns, boot_ns
