"""However the daemon ends, no process hangs: pending calls get an error."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.background_processes import clients, ends
from tests.support.foreground_mount import Mounted, fresh_mount

pytestmark = pytest.mark.needs("root", "fuse")

DEAD = {*DAEMON_GONE, errno.EIO}


def at_work(top: Path) -> list[Callable[[], None]]:
    """What is going on when the daemon ends; each for ever, until an OSError."""

    def write() -> None:
        with (top / "written").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(100_000))
                file.seek(0)
                os.fstat(file.fileno())  # what is written may pass the daemon by; this does not

    def make() -> None:
        i = 0
        while True:
            os.stat(top / "standing")  # once unmounted, the directory below could be written to
            path = top / f"made{i % 50}"
            path.write_bytes(b"x")
            path.rename(top / f"renamed{i % 50}")
            (top / f"renamed{i % 50}").unlink()
            i += 1

    def walk() -> None:
        while True:
            os.listdir(top)
            os.stat(top / "standing")

    def read() -> None:
        while True:
            fd = os.open(top / "standing", os.O_RDONLY | os.O_DIRECT)
            os.pread(fd, 4096, 0)
            os.close(fd)

    return [write, make, walk, read]


def wait_for_work(mounted: Mounted) -> None:
    """Until the clients' files are there."""
    while not ((mounted.backing / "written").exists() and any(mounted.backing.glob("*ed[0-9]*"))):
        pass


def end_lazily(mounted: Mounted) -> None:
    subprocess.run(["umount", "--lazy", mounted.path], check=True)
    os.kill(mounted.pid, signal.SIGTERM)


ENDS: dict[str, Callable[[Mounted], object]] = {
    "kill": lambda mounted: os.kill(mounted.pid, signal.SIGKILL),
    "abort": lambda mounted: mounted.fuse.abort(),
    "SIGTERM": lambda mounted: os.kill(mounted.pid, signal.SIGTERM),
    "SIGINT": lambda mounted: os.kill(mounted.pid, signal.SIGINT),
    "lazy unmount": end_lazily,
}


@pytest.mark.parametrize("how", ENDS)
def test_clients_get_errors_when_the_daemon_ends_under_load(how: str) -> None:
    with fresh_mount(expect_end=True) as mounted:
        (mounted.path / "standing").write_bytes(bytes(4096))
        with clients(at_work(mounted.path)) as pids:
            wait_for_work(mounted)
            ENDS[how](mounted)
            codes = {ends(pid) for pid in pids}
        # Unmounted, the names are gone and the directory below shows: ENOENT there.
        allowed = DEAD if how in ("kill", "abort") else DEAD | {errno.ENOENT}
        assert codes <= allowed, codes
