"""The daemon under load: its other tasks go on, and it ends with its mount; an idle one costs nothing."""

import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pytest

from tests.support.background_mounts import ended
from tests.support.busy_clients import hammered, one_file, stat_missing_names
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.proc_stat import status_of
from tests.support.trashd_command import EXECUTED, done_well

pytestmark = [
    pytest.mark.needs("root", "fuse"),
    pytest.mark.parametrize("engine", ["engine=auto", "engine=plain"]),
]

LIMIT_S = 100.0
MIB = 1 << 20
N_REQUESTS = 10_000


@pytest.fixture
def source() -> Iterator[Path]:
    with one_file() as path:
        yield path


def test_other_tasks_go_on(source: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, tempfile.TemporaryDirectory() as directory:
        manager.bind(f"{directory}/notify")
        manager.settimeout(LIMIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", f"{directory}/notify")
        monkeypatch.setenv("WATCHDOG_USEC", "30000")
        with trashd_mount(source, options=[engine], limit_s=LIMIT_S) as mounted, hammered(mounted.path):
            n_words = 0
            while n_words < 50:
                n_words += b"WATCHDOG=1" in manager.recv(4096)


def test_a_signal_is_heard(source: Path, engine: str) -> None:
    with (
        trashd_mount(source, options=[engine], limit_s=LIMIT_S, expect_end=True) as mounted,
        hammered(mounted.path),
    ):
        pid_fd = os.pidfd_open(mounted.pid)
        os.kill(mounted.pid, signal.SIGTERM)
        ended(pid_fd)


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "hammered"])
@pytest.mark.parametrize("way", ["abort", "umount"])
def test_it_ends_with_its_mount(source: Path, engine: str, way: str, is_idle: bool) -> None:
    with trashd_mount(source, options=[engine], limit_s=LIMIT_S, expect_end=True) as mounted:
        stat_missing_names(mounted.path, 100)
        with nullcontext() if is_idle else hammered(mounted.path):
            pid_fd = os.pidfd_open(mounted.pid)
            if way == "abort":
                mounted.fuse.abort()
            elif is_idle:
                subprocess.run(["umount", mounted.path], check=True)
            else:
                done_well("umount", "--lazy", mounted.path)
            ended(pid_fd)


def test_ten_thousand_requests_leave_nothing_behind(source: Path, engine: str) -> None:
    with trashd_mount(source, options=[engine], limit_s=LIMIT_S, command=EXECUTED) as mounted:
        stat_missing_names(mounted.path, N_REQUESTS)
        n_threads, n_fds, firsts = (
            int(status_of(mounted.pid)["Threads"][0]),
            mounted.n_fds(),
            count(N_REQUESTS, N_REQUESTS),
        )

        def grows_by_kib() -> int:
            before_kib = int(status_of(mounted.pid)["RssAnon"][0])
            stat_missing_names(mounted.path, N_REQUESTS, next(firsts))
            return int(status_of(mounted.pid)["RssAnon"][0]) - before_kib

        assert until(lambda: grows_by_kib() * 1024 < MIB)  # what is left behind would be each time
        assert int(status_of(mounted.pid)["Threads"][0]) <= n_threads
        assert mounted.n_fds() <= n_fds


def test_a_mount_that_nobody_uses_takes_no_processor_time(source: Path, engine: str) -> None:
    with trashd_mount(source, options=[engine], limit_s=LIMIT_S) as mounted:
        stat_missing_names(mounted.path, 1000)
        assert until(lambda: is_idle(mounted))


def is_idle(mounted: Mounted, for_s: float = 0.3) -> bool:
    """Whether the daemon does next to nothing for some time."""
    before_ns = ran_ns(mounted.pid)
    select.select([], [], [], for_s)
    return ran_ns(mounted.pid) - before_ns < for_s * 1e9 / 100


def ran_ns(pid: int) -> int:
    """Processor time of a process's threads."""
    return sum(int(Path(task, "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
