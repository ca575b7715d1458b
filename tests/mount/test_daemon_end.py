"""However the daemon ends, no process hangs: pending calls get an error."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.real_filesystems import mount_of, tmpfs_volume

pytestmark = pytest.mark.needs("root", "fuse")

DEAD = {*DAEMON_GONE, errno.EIO}
LIMIT_S = 60.0


@contextmanager
def a_mount() -> Iterator[Mounted]:
    with tmpfs_volume() as volume:
        source = volume / "source"
        source.mkdir()
        with trashd_mount(source, expect_end=True) as mounted:
            yield mounted


def clients(top: Path) -> list[Callable[[], None]]:
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


def start(client: Callable[[], None]) -> int:
    """A process that ends with the errno that it met."""
    pid = os.fork()
    if pid == 0:
        try:
            client()
        except OSError as error:
            os._exit(error.errno or 255)
        finally:
            os._exit(254)
    return pid


def exit_code(pid: int) -> int:
    """How a client ended; it must, in time."""
    fd = os.pidfd_open(pid)
    try:
        assert select.select([fd], [], [], LIMIT_S)[0], f"client {pid} hangs"
    finally:
        os.close(fd)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def wait_for_work(mounted: Mounted) -> None:
    """Until the clients' files are there."""
    while not ((mounted.backing / "written").exists() and any(mounted.backing.glob("*ed[0-9]*"))):
        pass


def end_by_kill(mounted: Mounted) -> None:
    os.kill(mounted.pid, signal.SIGKILL)


def end_by_abort(mounted: Mounted) -> None:
    mounted.fuse.abort()


def end_by_sigterm(mounted: Mounted) -> None:
    os.kill(mounted.pid, signal.SIGTERM)


def end_by_sigint(mounted: Mounted) -> None:
    os.kill(mounted.pid, signal.SIGINT)


def end_by_lazy_unmount(mounted: Mounted) -> None:
    subprocess.run(["umount", "--lazy", mounted.path], check=True)
    os.kill(mounted.pid, signal.SIGTERM)


@pytest.mark.parametrize("end", [end_by_kill, end_by_abort, end_by_sigterm, end_by_sigint, end_by_lazy_unmount])
def test_clients_get_errors_when_the_daemon_ends_under_load(end: Callable[[Mounted], None]) -> None:
    with a_mount() as mounted:
        (mounted.path / "standing").write_bytes(bytes(4096))
        pids = [start(client) for client in clients(mounted.path)]
        wait_for_work(mounted)
        end(mounted)
        codes = {exit_code(pid) for pid in pids}
        # Unmounted, the names are gone and the directory below shows: ENOENT there.
        allowed = DEAD if end in (end_by_kill, end_by_abort) else DEAD | {errno.ENOENT}
        assert codes <= allowed, codes


def test_killed_daemon_leaves_a_dead_mount_point() -> None:
    """Nothing below shows, so that a nightly rsync --delete sees an error and no empty directory."""
    with a_mount() as mounted:
        end_by_kill(mounted)
        _wait(mounted)
        assert mount_of(mounted.path) is not None
        for call in (os.listdir, lambda path: os.stat(path / "any"), lambda path: os.mkdir(path / "d")):
            with pytest.raises(OSError, match=r"not connected|abort|canceled"):
                call(mounted.path)


def _wait(mounted: Mounted) -> None:
    fd = os.pidfd_open(mounted.pid)
    try:
        assert select.select([fd], [], [], LIMIT_S)[0], "the daemon did not end"
    finally:
        os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_unmounts_though_files_are_open(number: signal.Signals) -> None:
    with a_mount() as mounted:
        fd = os.open(mounted.path / "busy", os.O_WRONLY | os.O_CREAT)
        try:
            os.write(fd, b"written before")
            os.kill(mounted.pid, number)
            _wait(mounted)
            assert mount_of(mounted.path) is None
            with pytest.raises(OSError, match=r"not connected|abort|I/O error"):
                os.fsync(fd)
        finally:
            with contextlib.suppress(OSError):  # the flush has no daemon to go to
                os.close(fd)
        assert (mounted.backing / "busy").read_bytes() == b"written before"
        assert os.listdir(mounted.path) == []


def test_idle_daemon_ends_clean_on_sigterm() -> None:
    with a_mount() as mounted:
        (mounted.path / "file").write_bytes(b"kept")
        os.kill(mounted.pid, signal.SIGTERM)
        _wait(mounted)
        assert mount_of(mounted.path) is None
        assert (mounted.backing / "file").read_bytes() == b"kept"
        assert "Error" not in mounted.log.read_text()
