"""A machine with trashd on it: booted, with the units of `trashd service install`."""

import contextlib
import json
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.booted_systemd import System, booted
from tests.support.foreground_mount import SHARED_LIMIT_S
from tests.support.trashd_command import done_well

REAPER = "trashd-reaper.service"
SLOW = "10/s"
"""What is large is never done by the time that it is looked at."""
# In the name of the service's own process, as root may.
_LESS_TIME = """
import socket, struct, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
    systemd.connect("/run/systemd/notify")
    sender = struct.pack("=iII", int(sys.argv[1]), 0, 0)
    systemd.sendmsg([b"WATCHDOG_USEC=1000000"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, sender)])
"""
CONTAINERS = ("stage", "orphans", "reaping", "restoring", "quarantine")


@contextlib.contextmanager
def booted_with_trashd(fstab: str = "", enabled: Sequence[str] = ()) -> Iterator[System]:
    """It comes up with these lines of fstab, whose sources and mount points it has, and with these services enabled."""

    def setup(root: Path) -> None:
        done_well("service", "install", "--root", root)
        (root / "etc/fstab").write_text(fstab)
        for path in re.findall(r"(?<!\S)/\S+", fstab):
            (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for unit in enabled:
            wants = root / "etc/systemd/system/multi-user.target.wants"
            wants.mkdir(exist_ok=True)
            (wants / unit).symlink_to(f"/usr/local/lib/systemd/system/{unit}")

        drop_ins = root / "etc/trashd/config.d"
        drop_ins.mkdir(parents=True, exist_ok=True)
        (drop_ins / "grace.toml").write_text('grace = "0s"\n')  # a volume of a test is new
        for unit in (REAPER, "trashd-mount@.service"):
            directory = root / f"etc/systemd/system/{unit}.d"
            directory.mkdir(parents=True)
            (directory / "many-tests.conf").write_text("[Unit]\nStartLimitIntervalSec=0\n")

    with booted(setup, limit_s=SHARED_LIMIT_S) as system:
        yield system


def drop_in(system: System, unit: str, *lines: str) -> None:
    """Change a service's [Service] section."""
    directory = system.path(f"run/systemd/system/{unit}.d")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "test.conf").write_text("\n".join(("[Service]", *lines, "")))
    system.systemctl("daemon-reload")


def hang(system: System, unit: str) -> None:
    """Stop a service's process, and have its watchdog find that out within a second.

    Who comes after it has the time that the unit gives it: a test's machine may stop whomever it likes for a while too.
    """
    pid = system.main_pid(unit)
    system.kill(pid, signal.SIGSTOP)
    system.run("python3", "-c", _LESS_TIME, str(pid))


def volume_at(system: System, path: str) -> Path:
    """A new tmpfs with a trash store, mounted while all runs; where we see it."""
    system.path(path).mkdir(parents=True)
    system.run("mount", "-t", "tmpfs", "-o", "size=256m,mode=1777", "tmpfs", path)
    system.trashd("init", path)
    return system.path(path)


def fill(directory: Path, n_files: int) -> None:
    """Make a directory with so many empty files."""
    directory.mkdir()
    for number in range(n_files):
        (directory / f"{number:06}").touch()


def swap(system: System, path: str, *options: str) -> str:
    """Swap a directory that is not kept at all; the orphan's id."""
    swap_result = json.loads(system.trashd("swap", "--json", "--keep-for", "0s", *options, path))
    return str(swap_result["id"])


def containers(volume: Path, *states: str) -> set[str]:
    """The containers in these states, of all users, in root's store there and in users' own."""
    found = volume.glob(".trashd*/u/*/*/*")
    return {path.name for path in found if path.parent.name in (states or CONTAINERS)}


def limit(system: System, rate: str | None) -> None:
    """Reap no more than so much, or as fast as it goes, from now on."""
    path = system.path("etc/trashd/config.d/limit.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'[defaults]\nmax_rate = "{rate or "none"}"\n')
    system.systemctl("reload", REAPER)


def inside(volume: Path) -> str:
    """The path of a test's volume, as the machine has it."""
    return f"/srv/{volume.name}"


def status_of(system: System, pid: int) -> dict[str, str]:
    """What /proc/PID/status says."""
    lines = system.proc(pid, "status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
