"""Mounts of `trashd mount` as people make them, in the background; a process outside frees what hangs on one."""

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from fusefs.linux.mount_calls import claim_directory
from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.foreground_mount import until
from tests.support.fuse_watchdog import mount_fusectl
from tests.support.other_users import run_as
from tests.support.proc_stat import stat_of
from tests.support.real_filesystems import MountEntry, mounts, tmpfs_volume
from tests.support.trashd_command import TRASHD, CommandResult, done_well

RUNTIME = Path("/run/trashd")
FSTYPE = "fuse.trashd"
_END_S = 30

# $1 limit in seconds, $2 directory. A line on stdin says that all is well; the end of stdin, that the test's process
# died. Numbers of mounts are the whole machine's: only those below the directory are ours, in whatever namespace. What
# is mounted nowhere any more, or not yet, ends with its daemon.
_WATCHDOG = r"""
read -r -t "$1" && exit 0
cat /proc/[0-9]*/mountinfo 2>/dev/null |
    awk -v top="$2/" 'index($5, top) == 1 { sub(/.*:/, "", $3); print $3 }' | sort -u |
    while read -r number; do
        abort=/sys/fs/fuse/connections/$number/abort
        [[ ! -e $abort ]] || echo 1 > "$abort"
    done
grep -lzF -- "$2/" /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3 | xargs -r kill -KILL 2>/dev/null
exit 1
"""


@contextlib.contextmanager
def workbench(limit_s: float = 100) -> Iterator[Path]:
    """A tmpfs with `source/file` and an empty `target`, and nothing of ours mounted in the end.

    Raises  TimeoutError: a process hung, and was freed by an abort of what is mounted in it; AssertionError: something
            is left in /run/trashd
    """
    mount_fusectl()
    older = {entry.mount_id for entry in mounts()}
    with tmpfs_volume() as base, watchdog(base, limit_s) as guard:
        for name in ("source", "target"):
            (base / name).mkdir()
        (base / "source/file").write_text("content")
        try:
            yield base
        finally:
            for entry in reversed([entry for entry in mounts() if entry.mount_id not in older]):
                if entry.fs_type == FSTYPE:
                    done_well("umount", "--force", entry.mount_point)
            with contextlib.suppress(BrokenPipeError):
                guard.communicate(b"done\n")
            if guard.wait():
                raise TimeoutError(f"a mount hung for {limit_s} s")
        left = [claim_directory(os.fsencode(point)) for point in (base, base / "source", base / "target")]
        assert until(lambda: not any(map(os.path.lexists, left)))  # a daemon ends a moment after its mount


def watchdog(top: Path, limit_s: float) -> subprocess.Popen[bytes]:
    """A process that aborts what is mounted below a directory, and kills processes that were given a path there.

    Unless it is told in time that all is well.
    """
    argv = ("bash", "-c", _WATCHDOG, "watchdog", str(limit_s), str(top))
    return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)


def mount(*words: str | Path) -> CommandResult:
    """`trashd mount`, which has to succeed."""
    return done_well("mount", *words)


def as_owner(bench: Path, *words: str | Path, uid: int = 1000) -> CommandResult:
    """A command of the user whose bench it is, or of another one who has the same runtime directory."""
    env = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(bench / "run")}
    env |= {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    done = run_as(uid, [TRASHD, *words], env=env)
    return CommandResult(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


def backing_of(target: Path) -> Path:
    """The backing path that mountinfo tells of a mount of ours."""
    entry = our_mount(target)
    assert entry is not None
    return Path(os.fsdecode(entry.source))


def our_mount(target: Path) -> MountEntry | None:
    """The mount of ours that one sees at this path; no daemon is asked."""
    found = [entry for entry in mounts() if entry.mount_point == os.fsencode(target)]
    return found[-1] if found and found[-1].fs_type == FSTYPE else None


def daemon_of(target: Path) -> int:
    """The pid of the daemon that was started with this mount point, without those that it has forked."""
    found = _daemons(target)
    (pid,) = (pid for pid, parent in found.items() if parent not in found)
    return pid


def _daemons(target: Path) -> dict[int, int]:
    """The processes of the daemon of a mount point, each with its parent."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
            if b"mount" in words and os.fsencode(target) in words and int(pid) != os.getpid():
                found[int(pid)] = int(stat_of(int(pid))[1])
    return found


def is_dead(target: Path) -> bool:
    """Whether no daemon serves a mount any more."""
    try:
        os.listdir(target)
    except OSError as error:
        return error.errno in DAEMON_GONE
    return False


def kill_daemon(target: Path, number: int = signal.SIGKILL) -> None:
    """Signal the daemon of a mount point, if there is one, and wait for its end.

    Those that it has forked too: they have the connection open, which is alive as long as any of them is.
    """
    if found := _daemons(target):
        pid_fds = [os.pidfd_open(pid) for pid in found]
        os.kill(daemon_of(target), number)
        for pid_fd in pid_fds:
            ended(pid_fd)


def abort(target: Path) -> None:
    """Abort the connection of a mount of ours, and wait for its daemon's end."""
    entry, pid_fd = our_mount(target), os.pidfd_open(daemon_of(target))
    assert entry is not None
    Path(f"/sys/fs/fuse/connections/{entry.minor}/abort").write_text("1")
    ended(pid_fd)


def ended(pid_fd: int) -> None:
    """Wait for a process's end. Raises  TimeoutError; the fd is closed."""
    try:
        if not select.select([pid_fd], [], [], _END_S)[0]:
            raise TimeoutError("it goes on")
    finally:
        os.close(pid_fd)
