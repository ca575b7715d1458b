"""A real systemd as PID 1, in private namespaces over an overlay of this machine's own root, or of another one.

Nothing of it can stay: its mounts are in its own mount namespace, all its processes end with its PID 1, and its cgroup
is removed in the end. A process outside ends it if the test's process can't.

Source    https://systemd.io/CONTAINER_INTERFACE; sd_notify(3): PID 1 tells when it has booted
"""

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fuse_watchdog import mount_fusectl

REPO = Path(__file__).parents[2]
TRASHD = Path(sys.executable).with_name("trashd")
_BOOT_S, _END_S, _COMMAND_S, _PATIENCE_S = 60.0, 60.0, 60.0, 60.0
_GLANCE_S = 0.1
_NOTIFY = Path("run/host/notify")
_NUMBERS = itertools.count()

# $1 an empty directory; the rest are paths on other filesystems than /, to be seen inside. Tells its pid as soon as
# the new root stands in $1/root, and boots at a line on stdin. /proc/sys is one for all namespaces: systemd's own
# settings would be the machine's. A read-only /sys keeps udev out.
_INIT = r"""
set -euo pipefail
base=$1 root=$1/root
read -r pid _ < /proc/self/stat
mount -t tmpfs -o mode=755,size=512m boot "$base"
mkdir "$base"/{upper,work,root}
mount -t overlay -o "lowerdir=$LOWER,upperdir=$base/upper,workdir=$base/work" overlay "$root"
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t fusectl fusectl "$root/sys/fs/fuse/connections"
mount -t tmpfs -o mode=755 dev "$root/dev"
for node in null zero full random urandom tty fuse autofs; do cp -a "/dev/$node" "$root/dev/"; done
chmod 666 "$root/dev/fuse"
mkdir "$root"/dev/{pts,shm}
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mkdir "$root/run/host"
for path in "${@:2}"; do mkdir -p "$root$path"; mount --rbind "$path" "$root$path"; done
# The project may lie in /tmp, where CI cloned it.
[[ -e $root$REPO ]] || { mkdir -p "$root$REPO"; mount --rbind "$REPO" "$root$REPO"; }
# Or below a directory that lets none of its users pass.
above=$REPO
while above=${above%/*}; [[ $above ]]; do chmod a+x "$root$above"; done

hostname trashd-test
ip link set lo up 2>/dev/null || true
: > "$root/etc/fstab"
echo "$MACHINE_ID" > "$root/etc/machine-id"
rm -rf "$root"/{etc,usr/local/lib}/systemd "$root/etc/trashd" "$root/var/lib/trashd"
rm -f "$root/sbin/mount.fuse.trashd"
mkdir -p "$root"/etc/systemd/{system,system-generators}
for generator in "$root"/lib/systemd/system-generators/*; do
    [[ $generator == *-fstab-generator ]] || ln -s /dev/null "$root/etc/systemd/system-generators/${generator##*/}"
done
for unit in getty.target systemd-modules-load.service kmod-static-nodes.service systemd-update-utmp.service \
    sys-kernel-{config,debug,tracing}.mount proc-sys-fs-binfmt_misc.automount systemd-update-utmp-runlevel.service; do
    ln -s /dev/null "$root/etc/systemd/system/$unit"
done

echo "$pid"
read -r _
exec < /dev/null >&2
cd "$root"
mkdir .old
pivot_root . .old
umount -l .old
mount --make-rshared /
unset MACHINE_ID REPO LOWER
export NOTIFY_SOCKET=/run/host/notify
exec /lib/systemd/systemd --system --log-target=journal "--unit=$UNIT"
"""

# $1 limit in seconds, $2 PID 1. A line on stdin says that all is well; the end of stdin, that the test's process died.
# A process that waits for a FUSE daemon can't be killed, and PID 1 can't end before it.
_WATCHDOG = """
read -r -t "$1" && exit 0
while read -r _ _ device _; do
    abort=/sys/fs/fuse/connections/${device#*:}/abort
    [[ $device != 0:* || ! -e $abort ]] || echo 1 > "$abort"
done < "/proc/$2/mountinfo"
kill -KILL "$2"
exit 1
"""


class NotBooted(Exception):
    """systemd did not come up; the message is what it said."""


@dataclass(frozen=True, slots=True)
class System:
    """A booted systemd.

    pid   of its PID 1, as we see it
    """

    pid: int

    @property
    def root(self) -> Path:
        return Path(f"/proc/{self.pid}/root")

    def path(self, inside: str | Path) -> Path:
        return self.root / str(inside).lstrip("/")

    def argv(self, *words: str | Path) -> list[str | Path]:
        namespaces = ("--mount", "--pid", "--ipc", "--uts", "--net", "--cgroup")
        return ["nsenter", f"--target={self.pid}", *namespaces, "--wd=/", "--", *words]

    def run(self, *words: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root. Raises  AssertionError: it ended with another code than that (None: any)"""
        done = subprocess.run(
            self.argv(*words),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "COLUMNS": "80"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S, check=False,
        )  # fmt: skip
        assert code is None or done.returncode == code, done
        return done

    def systemctl(self, *words: str | Path, code: int | None = 0) -> str:
        return self.run("systemctl", "--no-pager", *words, code=code).stdout

    def trashd(self, *words: str | Path, code: int | None = 0) -> str:
        return self.run(TRASHD, *words, code=code).stdout

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        lines = self.systemctl("show", f"--property={','.join(properties)}", unit).splitlines()
        return dict(line.split("=", 1) for line in lines)

    def state(self, unit: str) -> str:
        return self.show(unit, "ActiveState")["ActiveState"]

    def main_pid(self, unit: str) -> int:
        """The main process of a service, as it is called inside; 0: there is none."""
        return int(self.show(unit, "MainPID")["MainPID"])

    def proc(self, pid: int, name: str) -> str:
        return self.path(f"proc/{pid}/{name}").read_text()

    def kill(self, pid: int, number: int) -> None:
        self.run("/bin/kill", f"-{number}", str(pid))

    def power_off(self, limit_s: float = _END_S) -> None:
        """Let it end as a machine does. Raises  TimeoutError"""
        pid_fd = os.pidfd_open(self.pid)
        try:
            os.kill(self.pid, signal.SIGRTMIN + 4)
            if not select.select([pid_fd], [], [], limit_s)[0]:
                raise TimeoutError(f"it was not off in {limit_s} s")
        finally:
            os.close(pid_fd)

    def journal(self, *matches: str) -> list[dict[str, Any]]:
        """The journal's entries that match, such as `UNIT=x.service`; all fields."""
        self.run("journalctl", "--sync")  # what was said is there
        lines = self.run("journalctl", "--output=json", "--all", "--no-pager", *matches).stdout.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def messages(self, unit: str) -> list[str]:
        """What a unit said, and what systemd said of it."""
        self.run("journalctl", "--sync")
        entries = self.run("journalctl", "--output=cat", "--no-pager", f"--unit={unit}").stdout
        return entries.splitlines()

    def wait_for(self, is_so: Callable[[], bool], what: str, limit_s: float = _PATIENCE_S) -> None:
        """Return when something is so: looked at again with each entry of the journal, and now and then.

        Raises  TimeoutError, with the end of the journal
        """
        deadline_s = time.monotonic() + limit_s
        follow = self.argv("journalctl", "--follow", "--lines=0", "--output=cat", "--no-pager")
        with subprocess.Popen(follow, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as journal:
            assert journal.stdout is not None
            try:
                while not is_so():
                    if time.monotonic() > deadline_s:
                        tail = self.run("journalctl", "--lines=40", "--no-pager").stdout
                        raise TimeoutError(f"not in {limit_s} s: {what}\n{tail}")
                    if select.select([journal.stdout], [], [], _GLANCE_S)[0]:
                        os.read(journal.stdout.fileno(), 1 << 16)
            finally:
                journal.kill()


@contextlib.contextmanager
def booted(
    setup: Callable[[Path], None] | None = None,
    *,
    unit: str = "multi-user.target",
    limit_s: float = 100,
    lower: Path = Path("/"),
) -> Iterator[System]:
    """A booted systemd.

    setup     gets the new root before it boots
    unit      what it boots
    limit_s   after this it is killed, whatever hangs in there
    lower     the root directory below the overlay, this machine's own or another one's
    Raises    NotBooted; OSError: no namespaces or no cgroup for it
    """
    mount_fusectl()
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="systemd-")))
        said = stack.enter_context(tempfile.TemporaryFile())
        cgroup = stack.enter_context(_cgroup(base.name))
        variables = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "MACHINE_ID": uuid.uuid4().hex,
            "UNIT": unit,
            "REPO": str(REPO),
            "LOWER": str(lower),
        }
        kinds = ("--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "--net", "--cgroup")
        init = subprocess.Popen(
            [*_joining(cgroup), "unshare", *kinds, "--propagation=private", "--",
             "bash", "-c", _INIT, "init", base, *_elsewhere()],
            env={"container": "trashd", **variables},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, start_new_session=True,
        )  # fmt: skip
        assert init.stdin is not None
        assert init.stdout is not None
        try:
            told = init.stdout.readline()
            if not told:
                raise NotBooted(_text(said.fileno()))
            pid = int(told)
            with _watchdog(limit_s, pid):
                try:
                    root = Path(f"/proc/{pid}/root{base}/root")
                    with _announcement(root / _NOTIFY) as announced:
                        if setup is not None:
                            setup(root)
                        init.stdin.write(b"boot\n")
                        init.stdin.flush()
                        if not announced():
                            raise NotBooted(_text(said.fileno()))
                    yield System(pid)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    init.wait(_END_S)
        finally:
            init.kill()
            init.wait(_END_S)
            init.stdin.close()
            init.stdout.close()


def _joining(cgroup: Path) -> list[str | Path]:
    """What runs a command in a cgroup, which thereby is the root of its cgroup namespace."""
    return ["bash", "-c", 'echo "$$" > "$1/cgroup.procs" && exec "${@:2}"', "join", cgroup]


def _text(fd: int) -> str:
    return os.pread(fd, 1 << 16, 0).decode("utf-8", "replace").strip() or "it said nothing"


def _elsewhere() -> list[Path]:
    """What the command needs and an overlay of / does not show, being on another filesystem."""
    needed = dict.fromkeys((REPO, Path(sys.prefix), Path(sys.base_prefix)))
    device = Path("/").stat().st_dev
    return [path for path in needed if path.stat().st_dev != device]


@contextlib.contextmanager
def _cgroup(name: str) -> Iterator[Path]:
    """A new cgroup of the unified hierarchy.

    Named for the directory of temporary files too: .ci/pytest removes what a killed test leaves.
    """
    path = _unified() / f"{Path(tempfile.gettempdir()).name}.{name}.{next(_NUMBERS)}"
    path.mkdir()
    try:
        yield path
    finally:
        while "populated 1" in (path / "cgroup.events").read_text():
            time.sleep(_GLANCE_S)  # of who has ended something is left for a moment
        for directory, _names, _files in os.walk(path, topdown=False):
            os.rmdir(directory)


def _unified() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == "cgroup2":
            return Path(before.split()[4])
    raise FileNotFoundError("no cgroup2 hierarchy is mounted")


@contextlib.contextmanager
def _watchdog(limit_s: float, pid: int) -> Iterator[None]:
    argv = ("bash", "-c", _WATCHDOG, "watchdog", str(limit_s), str(pid))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.communicate(b"done\n")
    if process.returncode:
        raise TimeoutError(f"systemd was ended after {limit_s} s")


@contextlib.contextmanager
def _announcement(path: Path) -> Iterator[Callable[[], bool]]:
    """Whether PID 1 says in time that it has booted; asks once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as ours:
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            ours.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)

        def announced() -> bool:
            deadline_s = time.monotonic() + _BOOT_S
            while (left_s := deadline_s - time.monotonic()) > 0:
                ours.settimeout(left_s)
                with contextlib.suppress(TimeoutError):
                    if b"READY=1" in ours.recv(1 << 12).split(b"\n"):
                        return True
            return False

        yield announced


def probe() -> None:
    """Boot once, up to nothing. Raises  OSError, NotBooted"""
    with booted(unit="sysinit.target"):
        pass
