"""The seam between pyfuse3 and trio: whoever else needs the loop gets it, and it ends whatever is going on."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio

from fusefs.mount import loop
from tests.support.command import done_well
from tests.support.daemons import ended
from tests.support.fuse import fuse_mount
from tests.support.mounted import Mounted, trashd_mount, until
from tests.support.volumes import tmpfs_volume
from tests.support.waitingfs import N_WORKERS, waiting_mount

pytestmark = pytest.mark.needs("root", "fuse")

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
N_CLIENTS = 3
MIB = 1 << 20
TOO_MANY = 300_000

# Asks for names that are not there, as fast as it can, and lists, until the mount is gone.
HAMMER = """
import itertools, os, sys
for number in itertools.count():
    try:
        os.stat(f"{sys.argv[1]}/missing-{os.getpid()}-{number}")
    except FileNotFoundError:
        pass
    if number % 50 == 0:
        os.listdir(sys.argv[1])
"""
# $0: a pyfuse3 that is not known.
OTHER_PYFUSE3 = """
import sys, pyfuse3
pyfuse3.__version__ = "4.0.0"
from fusefs.cli.main import main
sys.exit(main())
"""
WITH_LOG = 'exec "$@" 2>>"$0"'


@pytest.fixture
def source() -> Iterator[Path]:
    with tmpfs_volume("64m") as volume:
        path = volume / "source"
        path.mkdir()
        (path / "file").write_text("content")
        yield path


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trashd-loop-") as path:
        yield Path(path)


@contextmanager
def hammered(path: Path) -> Iterator[None]:
    """Clients that never let the daemon come to rest."""
    clients = [
        subprocess.Popen([sys.executable, "-c", HAMMER, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(N_CLIENTS)
    ]
    try:
        yield
    finally:
        for client in clients:
            client.kill()
            client.communicate()


def ask_for_missing_names(path: Path, n: int, first: int = 0) -> None:
    for number in range(first, first + n):
        with suppress(FileNotFoundError):
            os.stat(f"{path}/missing{number}")


def ran_ns(pid: int) -> int:
    """Processor time of a process's main thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def status_of(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def seam_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What pyfuse3 takes for trio."""
    monkeypatch.setitem(vars(pyfuse3), "trio", trio)
    assert loop.hook(lambda: None, lambda: None)
    return vars(pyfuse3)["trio"]


# Everybody's turn.


def test_requests_without_end_let_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = seam_of(monkeypatch)
    n_requests, n_turns = 0, 0

    async def read_on(fd: int) -> None:
        nonlocal n_requests
        lock = seam.Lock()
        while n_turns < 20 and n_requests < TOO_MANY:
            async with lock:
                await seam.lowlevel.wait_readable(fd)
            n_requests += 1

    async def go_on() -> None:
        nonlocal n_turns
        while n_requests == 0:
            await trio.lowlevel.checkpoint()
        for _ in range(20):
            await trio.lowlevel.checkpoint()
            n_turns += 1

    async def both(fd: int) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on)
            for _ in range(N_WORKERS):
                nursery.start_soon(read_on, fd)

    always_readable = os.memfd_create("requests")
    try:
        trio.run(both, always_readable)
    finally:
        os.close(always_readable)
    assert n_turns == 20
    assert 20 < n_requests < TOO_MANY  # nor does each of them wait for the others


def test_other_tasks_go_on_while_clients_hammer(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, tempfile.TemporaryDirectory() as directory:
        manager.bind(f"{directory}/notify")
        manager.settimeout(LIMIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", f"{directory}/notify")
        monkeypatch.setenv("WATCHDOG_USEC", "30000")
        with trashd_mount(source, limit_s=LIMIT_S) as mounted, hammered(mounted.path):
            n_words = 0
            while n_words < 50:
                n_words += b"WATCHDOG=1" in manager.recv(4096)


def test_a_signal_is_heard_while_clients_hammer(source: Path) -> None:
    with trashd_mount(source, limit_s=LIMIT_S, expect_end=True) as mounted, hammered(mounted.path):
        pid_fd = os.pidfd_open(mounted.pid)
        os.kill(mounted.pid, signal.SIGTERM)
        ended(pid_fd)


@pytest.mark.parametrize("kind", ["wait", "thread"])
def test_handlers_that_wait_keep_nobody_else_waiting(place: Path, kind: str) -> None:
    n_waiting = N_WORKERS - 1
    with waiting_mount(place, limit_s=LIMIT_S) as mount, ThreadPoolExecutor(n_waiting) as pool:
        waiting = [pool.submit(mount.ask, f"{kind}-{number}") for number in range(n_waiting)]
        assert mount.waits(n_waiting)
        ask_for_missing_names(place, 1000)
        assert not any(one.done() for one in waiting)
        mount.ask("go")
        for one in waiting:
            one.result()
        assert mount.waits(0)


@pytest.mark.parametrize("kind", ["wait", "thread"])
def test_handlers_wait_and_answer_while_clients_hammer(place: Path, kind: str) -> None:
    with waiting_mount(place, limit_s=LIMIT_S) as mount, hammered(place), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(mount.ask, f"{kind}-{number}") for number in range(2)]
        assert until(lambda: mount.count("waiting") >= 2)
        mount.ask("go")
        for one in waiting:
            one.result()


def test_requests_of_all_workers_are_answered_again_and_again(place: Path) -> None:
    with waiting_mount(place, limit_s=LIMIT_S) as mount, ThreadPoolExecutor(2 * N_WORKERS) as pool:
        mount.ask("go")
        for one in [pool.submit(mount.ask, f"thread-{number}") for number in range(500)]:
            one.result()
        assert mount.waits(0)


# The end.


def test_an_abort_ends_the_daemon_while_clients_hammer(source: Path) -> None:
    with trashd_mount(source, limit_s=LIMIT_S, expect_end=True) as mounted, hammered(mounted.path):
        pid_fd = os.pidfd_open(mounted.pid)
        mounted.fuse.abort()
        ended(pid_fd)


def test_a_lazy_unmount_ends_the_daemon_while_clients_hammer(source: Path) -> None:
    with trashd_mount(source, limit_s=LIMIT_S, expect_end=True) as mounted, hammered(mounted.path):
        pid_fd = os.pidfd_open(mounted.pid)
        done_well("umount", "--lazy", mounted.path)
        ended(pid_fd)


@pytest.mark.parametrize("way", ["abort", "umount"])
def test_an_idle_daemon_ends_with_its_mount(source: Path, way: str) -> None:
    with trashd_mount(source, limit_s=LIMIT_S, expect_end=True) as mounted:
        ask_for_missing_names(mounted.path, 100)
        pid_fd = os.pidfd_open(mounted.pid)
        if way == "abort":
            mounted.fuse.abort()
        else:
            subprocess.run(["umount", mounted.path], check=True)
        ended(pid_fd)


@pytest.mark.parametrize("n_waiting", [0, 1, N_WORKERS - 1])
def test_cancelled_workers_let_go_whatever_they_wait_for(place: Path, n_waiting: int) -> None:
    with waiting_mount(place, limit_s=LIMIT_S) as mount:
        pid_fd = os.pidfd_open(mount.fuse.pid)
        with ThreadPoolExecutor(N_WORKERS) as pool:
            waiting = [pool.submit(mount.ask, f"wait-{number}") for number in range(n_waiting)]
            assert mount.waits(n_waiting)
            with suppress(OSError):
                mount.ask("cancel")
            ended(pid_fd)
            for one in waiting:
                with pytest.raises(OSError, match=r"."):
                    one.result()


# What it costs.


def test_ten_thousand_requests_leave_nothing_behind(source: Path) -> None:
    with trashd_mount(source, limit_s=LIMIT_S) as mounted:
        ask_for_missing_names(mounted.path, 2000)
        before = {field: status_of(mounted.pid, field) for field in ("Threads", "VmRSS")}
        n_fds = mounted.n_fds()
        ask_for_missing_names(mounted.path, 10_000, 2000)
        assert status_of(mounted.pid, "Threads") == before["Threads"]
        assert mounted.n_fds() == n_fds
        assert (status_of(mounted.pid, "VmRSS") - before["VmRSS"]) * 1024 < MIB


def test_a_mount_that_nobody_uses_takes_no_processor_time(source: Path) -> None:
    with trashd_mount(source, limit_s=LIMIT_S) as mounted:
        ask_for_missing_names(mounted.path, 1000)
        assert until(lambda: is_idle(mounted))


def is_idle(mounted: Mounted, for_s: float = 0.3) -> bool:
    """Whether the daemon does next to nothing for some time."""
    before_ns = ran_ns(mounted.pid)
    select.select([], [], [], for_s)
    return ran_ns(mounted.pid) - before_ns < for_s * 1e9 / 100


def test_a_client_that_comes_seldom_is_not_watched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 1000

    async def wait_in_vain(low: Any, fd: int) -> float:
        start_s = time.thread_time()
        for _ in range(n):
            with trio.move_on_after(0):
                await low.wait_readable(fd)
        return time.thread_time() - start_s

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as silent:
        with_trio_s = trio.run(wait_in_vain, trio.lowlevel, silent.fileno())
        with_seam_s = trio.run(wait_in_vain, seam_of(monkeypatch).lowlevel, silent.fileno())
    assert with_seam_s - with_trio_s < n * 15e-6


# A pyfuse3 that we do not know.


@contextmanager
def mounted_by_other_pyfuse3(source: Path, log: Path) -> Iterator[Path]:
    mount_point = source.with_name("mounted")
    mount_point.mkdir()
    argv: list[str | Path] = ["bash", "-c", WITH_LOG, log, "env", f"PYTHONPATH={REPO}", sys.executable]
    argv += ["-c", OTHER_PYFUSE3, "mount", source, mount_point, "--foreground"]
    with fuse_mount(argv, mount_point, LIMIT_S):
        yield mount_point


def test_with_a_pyfuse3_that_is_not_known_the_mount_serves_and_says_so(source: Path, place: Path) -> None:
    with mounted_by_other_pyfuse3(source, place / "log") as mount_point, ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(ask_for_missing_names, mount_point, 500, 500 * n) for n in range(4)]:
            one.result()
        (mount_point / "new").write_text("new")
        assert (source / "new").stat().st_mode & 0o777 == 0o666 & ~umask()
        assert sorted(os.listdir(mount_point)) == ["file", "new"]
    said = (place / "log").read_text()
    assert "4.0.0 is not one that we know" in said
    assert "Traceback" not in said


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_installed_pyfuse3_is_known(source: Path) -> None:
    with trashd_mount(source, limit_s=LIMIT_S) as mounted:
        assert (mounted.path / "file").read_text() == "content"
        assert "not one that we know" not in mounted.log.read_text()
