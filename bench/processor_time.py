"""Processor time of a mount's daemon and of its clients: by control groups, where version 2 of them can be written.

They hold whatever the daemon or a client starts, and count in nanoseconds; without them it is ticks of /proc/PID/stat,
where children count once they have ended.

Source  Documentation/admin-guide/cgroup-v2.rst: cpu.stat is there whether the controller is on or not
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from bench.support import print_progress
from tests.support.real_filesystems import mounts

DAEMON, CLIENTS = "daemon", "clients"
_PROCESSES, _STAT = "cgroup.procs", "cpu.stat"


@contextlib.contextmanager
def groups() -> Iterator[None]:
    """Have a group for each of the two in the `with`, if this machine lets us."""
    made: list[Path] = []
    try:
        for path in (_top(), *(_top() / kind for kind in (DAEMON, CLIENTS))):
            path.mkdir()
            made.append(path)
    except OSError as error:
        print_progress(f"no control groups of version 2, so processor time is in ticks of /proc: {error}")
    try:
        yield
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # somebody is left in it: a daemon that hangs
                path.rmdir()


def counted_by() -> str:
    """What processor time is counted by, for people."""
    return "control groups" if _group(DAEMON) else "ticks of /proc/PID/stat"


def in_group(kind: str, command: list[str]) -> list[str]:
    """A command that starts in a group, by a shell that becomes it."""
    group = _group(kind)
    return ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / _PROCESSES), *command] if group else command


def move(kind: str, pid: int) -> None:
    """Have a process that has done nothing yet in a group."""
    if group := _group(kind):
        (group / _PROCESSES).write_text(str(pid), encoding="ascii")


def used_s(kind: str, pid: int) -> float:
    """Seconds so far, of a process and what it has started; of all who have been in its group, if there is one.

    Raises  OSError: it is gone
    """
    if group := _group(kind):
        stat = dict(line.split() for line in (group / _STAT).read_text(encoding="ascii").splitlines())
        return int(stat["usage_usec"]) / 1e6
    # pid (name) state …: the name may hold anything; the 14th to 17th field are its own and its children's times.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _group(kind: str) -> Path | None:
    """None: there is none."""
    with contextlib.suppress(OSError):
        if (path := _top() / kind).exists():
            return path
    return None


def _top() -> Path:
    """What holds the groups, below the one that this process is in.

    Raises  OSError: there is no such hierarchy
    """
    where = [os.fsdecode(entry.mount_point) for entry in mounts() if entry.fs_type == "cgroup2"]
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    if not where or not own:
        raise OSError(errno.ENOENT, "not mounted")
    return Path(where[0], own[0], f"trashd-bench-{os.getpid()}")
