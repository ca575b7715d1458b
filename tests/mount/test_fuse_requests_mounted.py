"""Requests under traffic, signals and changes of mind: each is answered once, and rightly."""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.busy_clients import stat_missing_names
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.real_filesystems import volume_of

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), pytest.mark.takes_engine]

N_EACH = 120  # files of a client, while the filesystem changes some hundred times
# A daemon whose filesystem becomes slow and quick again all the time. $1 and on: as for trashd.
MOODY = """
import sys, threading, time
from fusefs.mount.tables.tables_lock import TablesLock
begin = TablesLock.__init__
def begin_moody(self, *args, **named):
    begin(self, *args, **named)
    self.latency = None
    def change():
        while True:
            time.sleep(0.002)
            self.is_slow = not self.is_slow
    threading.Thread(target=change, daemon=True).start()
TablesLock.__init__ = begin_moody
from fusefs.cli.main import main
sys.exit(main())
"""


def test_signals_that_interrupt_lose_nothing(mount: Mounted) -> None:
    """Names and files made durable, and others' requests between, while the caller has no rest."""
    path = mount.path
    (path / "file").write_bytes(b"x")
    n_signals = 0

    def heard(_number: int, _frame: object) -> None:
        nonlocal n_signals
        n_signals += 1

    before = signal.signal(signal.SIGALRM, heard)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for number in range(300):
            fd = os.open(path / f"new{number % 7}", os.O_CREAT | os.O_RDWR)
            os.write(fd, b"y" * 10_000)
            os.fsync(fd)
            os.close(fd)
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(directory)
            os.close(directory)
            os.setxattr(path / "file", "user.number", b"%d" % number)
            os.unlink(path / f"new{number % 7}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert n_signals
    assert os.listdir(path) == ["file"]
    assert os.getxattr(path / "file", "user.number") == b"299"


def test_whoever_takes_the_number_of_what_was_deleted_has_it_as_below(mount: Mounted) -> None:
    """The kernel has not let go of it yet; meanwhile another client asks on."""
    path = mount.path
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(stat_missing_names, path, 3000)
        for number in range(500):
            make = Path.touch if number % 2 else Path.mkdir
            make(path / "a")
            assert (path / "a").stat().st_ino == (mount.backing / "a").stat().st_ino
            (path / "a").unlink() if number % 2 else (path / "a").rmdir()
        others.result()


@pytest.mark.parametrize("fs_type", ["tmpfs", "overlay"], ids=["unopened", "opened"])
def test_traffic_while_the_filesystem_becomes_slow_and_quick_again_is_answered_once(fs_type: str) -> None:
    options = ("coherence=exclusive", "passthrough=off")
    command = (sys.executable, "-c", MOODY)
    with volume_of(fs_type) as volume, trashd_mount(volume / "source", options=options, command=command) as mounted:
        failures: list[str] = []

        def work(path: Path) -> None:
            path.mkdir()
            for number in range(N_EACH):
                one, other = path / f"a{number}", path / f"b{number}"
                one.write_bytes(b"%d" % number * 100)
                one.rename(other)
                if one.exists() or other.read_bytes() != b"%d" % number * 100:
                    failures.append(f"{other}: {other.read_bytes()[:9]!r}")
                os.setxattr(other, "user.a", b"%d" % number)
                if number % 3:
                    other.unlink()
                elif os.getxattr(other, "user.a") != b"%d" % number:
                    failures.append(f"{other}: attribute")
                if number % 20 == 0 and len(os.listdir(path)) != number // 3 + 1:
                    failures.append(f"{path}: {len(os.listdir(path))} at {number}")

        workers = [threading.Thread(target=work, args=(mounted.path / f"w{number}",)) for number in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert failures == []
        for number in range(3):
            assert len(os.listdir(mounted.path / f"w{number}")) == len(range(0, N_EACH, 3))
