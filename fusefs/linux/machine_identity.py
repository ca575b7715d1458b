"""The identity of this machine, boot, command and terminal session, and the present moment by each of its clocks."""

from __future__ import annotations

import os
import time
from functools import cache

from fusefs.core.orphan_age import Clock, Now
from fusefs.core.record import Invocation
from fusefs.linux.kernel import Kernel


def host_id() -> str:
    """The machine id, or the host name where there is none (containers)."""
    try:
        with open("/etc/machine-id", "rb") as file:
            return file.read().decode("ascii").strip() or os.uname().nodename
    except (OSError, ValueError):
        return os.uname().nodename


@cache
def boot_id() -> str:
    """The running kernel's boot id: the same in all its containers, so that locks are seen among them."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:  # a file of text would load its own ASCII
        return file.read().decode("ascii").strip()


@cache
def invocation() -> Invocation:
    """This process as its records tell of it. The id is random; nothing is derived from what was typed."""
    return Invocation(os.urandom(8).hex(), session())


def invocation_of(pid: int) -> Invocation | None:
    """A process, as the records tell of it that another one writes for it; None: it is not to be seen.

    pid  of it, or of a thread of it; 0: in another pid namespace
    """
    if pid <= 0:
        return None
    try:
        start = _Process(pid).start
    except (OSError, ValueError):
        return None
    return Invocation(f"{pid & 0xFFFF_FFFF:08x}{start & 0xFFFF_FFFF:08x}", session(pid))


def session(pid: int = 0) -> str:
    """The terminal's session that a process belongs to, the same for all commands of one shell; "": not to be told.

    That of its leader, which is told from a later one of the same number by its start and boot. `sudo` and the like may
    give what they run a terminal and a session of its own: then that of the user who called them.
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
            leader = caller  # its program has made this session, for another user
        return f"{boot_id()[:8]}.{leader.pid}.{leader.start}"
    except (OSError, ValueError):
        return ""


class _Process:
    """A process. Source  proc_pid_stat(5): what follows its name, which may hold anything"""

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


def moment(kernel: Kernel, clocks: tuple[Clock, ...] = ()) -> Now:
    """Now. clocks: what is remembered of the wall clock"""
    return Now(kernel.now_ns(), kernel.boot_ns(), boot_id(), clocks)


def clocks_ns() -> tuple[int, int]:
    """CLOCK_REALTIME and CLOCK_BOOTTIME, of one moment: a stall between the two would look like a jump of the first."""
    while True:
        began_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        wall_ns, boot_ns = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if boot_ns - began_ns < _MOMENT_NS:
            return wall_ns, boot_ns
