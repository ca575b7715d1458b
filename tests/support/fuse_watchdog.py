"""A FUSE daemon's mount that can't hang a test: a process outside watches, and frees those who wait.

A process that waits for a FUSE daemon can't be killed, and no signal handler of Python's runs in it; only the
daemon's end or an abort of the connection helps. So the watchdog is a process that never looks in there.

Source    Documentation/filesystems/fuse.rst, "Aborting a filesystem connection"
"""

import contextlib
import os
import select
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.support.real_filesystems import bind_mount, mounts, tmpfs_volume, unmount
from tests.support.trashd_command import SUPPORT, instead_of_exec

_CONTROL = Path("/sys/fs/fuse/connections")
_START_S = 60.0  # for a daemon to mount
_END_S = 20.0  # for a daemon to end by itself after its unmount

# $1 limit in seconds, $2 abort file, $3 process group, $4 mount point. A line on stdin says that all is
# well; the end of stdin, that the test's process died. The file is opened at once: when the connection is gone,
# another one gets its number.
_WATCHDOG = """
exec 3> "$2"
read -r -t "$1" && exit 0
echo 1 >&3
kill -KILL -- "-$3" 2>/dev/null
umount --lazy --no-mtab "$4" 2>/dev/null
exit 1
"""


@dataclass(frozen=True, slots=True)
class FuseMount:
    """A live mount of a daemon."""

    path: Path
    pid: int  # of the daemon, and its process group
    connection: Path  # its directory in fusectl

    def abort(self) -> None:
        """Make the kernel answer every request, waiting or to come, with an error."""
        (self.connection / "abort").write_text("1")

    def n_waiting(self) -> int:
        """How many requests the kernel has no answer to yet."""
        return int((self.connection / "waiting").read_text())


@dataclass(frozen=True, slots=True)
class FuseVolume:
    """A directory and the FUSE mount that serves it."""

    path: Path
    backing: Path


def program(module: str, *words: str | Path) -> list[str | Path]:
    """What runs a module of tests/support."""
    import_module("pyfuse3")  # here, not in each of them
    return [*SUPPORT, f"tests.support.{module}", *words]


@contextlib.contextmanager
def served_volume(module: str, *words: str, limit_s: float = 60) -> Iterator[FuseVolume]:
    """One of our filesystems on a tmpfs. words: after SRC and MNT. Raises  TimeoutError: it hung, see fuse_mount"""
    with tmpfs_volume() as base:
        volume = FuseVolume(base / "mount", base / "backing")
        for directory in (volume.path, volume.backing):
            directory.mkdir()
        with fuse_mount(program(module, volume.backing, volume.path, *words), volume.path, limit_s):
            yield volume


@contextlib.contextmanager
def device_for_all() -> Iterator[Path]:
    """A /dev/fuse that users may open, as udev makes it; gives the directory that it is in."""
    with tmpfs_volume(options=["dev"]) as devices:
        node = devices / "fuse"
        os.mknod(node, stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
        node.chmod(0o666)
        with bind_mount(node, Path("/dev/fuse")):
            yield devices


def mount_fusectl() -> None:
    """Have the control filesystem mounted in this namespace."""
    if not any(entry.fs_type == "fusectl" for entry in mounts()):
        subprocess.run(["mount", "-t", "fusectl", "none", str(_CONTROL)], check=True)


@contextlib.contextmanager
def fuse_mount(
    argv: Sequence[str | Path],
    mount_point: Path,
    limit_s: float = 100,
    *,
    stdio: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    prepare: Callable[[], object] | None = None,
) -> Iterator[FuseMount]:
    """Mount by a daemon that stays in the foreground, and unmount at the end, whatever the body did.

    argv      must mount on `mount_point`
    limit_s   for body and unmount; then clients get ECONNABORTED or ENOTCONN
    stdio     a socket to be the daemon's stdin and stdout
    stderr    a file to be the daemon's stderr; None: that of the test process
    prepare   what the daemon's process calls first
    Raises    TimeoutError: the watchdog had to act; RuntimeError: the daemon did not mount
    """
    mount_fusectl()
    mount_point = mount_point.resolve()
    older = {entry.mount_id for entry in mounts()}
    files = subprocess.DEVNULL if stdio is None else stdio
    daemon = subprocess.Popen(
        argv,
        stdin=files,
        stdout=stdio,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=True,  # its own group: what it starts ends with it
        preexec_fn=instead_of_exec(argv, prepare=prepare, pass_fds=pass_fds),  # noqa: PLW1509
    )
    try:
        minor = _wait_for_mount(daemon, mount_point, older)
        connection = _CONTROL / str(minor)
        its_argv = ("bash", "-c", _WATCHDOG, "watchdog", str(limit_s), connection / "abort")
        watchdog = subprocess.Popen(
            (*its_argv, str(daemon.pid), mount_point),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        mounted = FuseMount(mount_point, daemon.pid, connection)
        try:
            yield mounted
        finally:
            _leave(mounted, daemon)
            has_fired = _dismiss(watchdog)
            if has_fired:
                raise TimeoutError(f"{argv[0]} on {mount_point} hung: aborted after {limit_s} s")
    finally:
        _end_group(daemon)


def _wait_for_mount(daemon: subprocess.Popen[bytes], mount_point: Path, older: set[int]) -> int:
    """The connection's number: the minor device number of the mount (a stat there may hang)."""
    wanted = os.fsencode(mount_point)
    deadline_s = time.monotonic() + _START_S
    pid_fd = os.pidfd_open(daemon.pid)
    try:
        with Path("/proc/self/mountinfo").open("rb") as changes:  # POLLPRI: some mount came or went
            poll = select.poll()
            poll.register(pid_fd, select.POLLIN)
            poll.register(changes, select.POLLPRI)
            while True:
                for entry in mounts():
                    if entry.mount_point == wanted and entry.mount_id not in older:
                        return entry.minor
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise RuntimeError(f"{daemon.args!r} did not mount within {_START_S} s")
                if any(fd == pid_fd for fd, _ in poll.poll(left_s * 1000)):
                    break
    finally:
        os.close(pid_fd)
    ended = os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT)
    code = ended.si_status if ended else "unknown"
    raise RuntimeError(f"{daemon.args!r} ended without a mount: exit code {code}")


def _leave(mounted: FuseMount, daemon: subprocess.Popen[bytes]) -> None:
    """Unmount; who still uses the mount gets errors. The watchdog is on guard still: this may hang too."""
    if unmount(mounted.path):
        with contextlib.suppress(OSError):  # the last user may have left meanwhile
            mounted.abort()
    pid_fd = os.pidfd_open(daemon.pid)
    try:
        select.select([pid_fd], [], [], _END_S)
    finally:
        os.close(pid_fd)


def _dismiss(watchdog: subprocess.Popen[bytes]) -> bool:
    """Whether the watchdog had acted."""
    with contextlib.suppress(BrokenPipeError):
        watchdog.communicate(b"done\n")
    return watchdog.wait() != 0


def _end_group(daemon: subprocess.Popen[bytes]) -> None:
    """Kill what is left; before the leader is reaped, so that the number can't be another group's by now."""
    if daemon.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()
