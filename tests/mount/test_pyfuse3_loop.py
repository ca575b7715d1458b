"""The seam between pyfuse3 and trio: other tasks get the loop, it costs little, and it knows its pyfuse3."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing

from fusefs.mount.bridge import pyfuse3_loop
from tests.support.background_mounts import ended
from tests.support.busy_clients import ask_for_missing_names, hammered, one_file
from tests.support.foreground_mount import Mounted, has_begun, trashd_mount, until
from tests.support.fuse_waiting import N_WORKERS, Waiting, waiting_mount
from tests.support.fuse_watchdog import fuse_mount
from tests.support.proc_stat import status_of
from tests.support.trashd_command import EXECUTED, done_well

pytestmark = pytest.mark.needs("root", "fuse")

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0
MIB = 1 << 20
TOO_MANY = 300_000
N_REQUESTS = 10_000

# $0: a pyfuse3 that is not known.
OTHER_PYFUSE3 = """
import sys, pyfuse3
pyfuse3.__version__ = "4.0.0"
from fusefs.cli.main import main
sys.exit(main())
"""
# A pyfuse3 of a version that is known, which takes a lock of its own to read.
OTHER_LOCK = """
import sys, pyfuse3, trio
from fusefs.mount.bridge import pyfuse3_loop
hook = pyfuse3_loop.hook
def hook_all_but_the_lock(*words, **named):
    is_hooked = hook(*words, **named)
    vars(pyfuse3)["trio"].Lock = trio.Lock
    return is_hooked
pyfuse3_loop.hook = hook_all_but_the_lock
from fusefs.cli.main import main
sys.exit(main())
"""
WITH_LOG = 'exec "$@" 2>>"$0"'


@pytest.fixture
def source() -> Iterator[Path]:
    with one_file() as path:
        yield path


def ran_ns(pid: int) -> int:
    """Processor time of a process's main thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def seam_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What pyfuse3 takes for trio."""
    monkeypatch.setitem(vars(pyfuse3), "trio", trio)
    assert pyfuse3_loop.hook(lambda: None, lambda: None)
    return vars(pyfuse3)["trio"]


# Each task's turn.


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


def test_a_request_that_another_one_takes_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may be killed before its request is read: reading would stop all until the next request."""
    seam = seam_of(monkeypatch)
    n_found = 0

    async def find(requests: socket.socket) -> None:
        nonlocal n_found
        lock = seam.Lock()
        while True:
            async with lock:
                await seam.lowlevel.wait_readable(requests.fileno())
            assert requests.recv(1) == b"x"  # it does not wait: BlockingIOError
            n_found += 1

    async def take(requests: socket.socket) -> None:
        while True:
            await trio.lowlevel.wait_readable(requests.fileno())
            with suppress(BlockingIOError):
                requests.recv(1)

    async def ask() -> None:
        asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        also_asked = asked.dup()  # epoll takes an fd once
        with asking, asked, also_asked:
            asked.setblocking(False)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(find, asked)
                nursery.start_soon(take, also_asked)
                for _ in range(500):
                    await trio.testing.wait_all_tasks_blocked()
                    asking.send(b"x")
                nursery.cancel_scope.cancel()

    trio.run(ask)
    assert 0 < n_found < 500


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


def assert_keep_nobody_waiting(mount: Waiting, place: Path, waiting: list[Future[None]]) -> None:
    """While these wait others are answered, and they are when they are let go."""
    assert mount.waits(len(waiting))
    ask_for_missing_names(place, 1000)
    assert not any(one.done() for one in waiting)
    mount.ask("go")
    for one in waiting:
        one.result()
    assert mount.waits(0)


@pytest.mark.parametrize("kind", ["wait", "thread"])
def test_handlers_that_wait_keep_nobody_else_waiting(place: Path, kind: str) -> None:
    n_waiting = N_WORKERS - 1
    with waiting_mount(place, limit_s=LIMIT_S) as mount, ThreadPoolExecutor(n_waiting) as pool:
        assert_keep_nobody_waiting(
            mount, place, [pool.submit(mount.ask, f"{kind}-{number}") for number in range(n_waiting)]
        )


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


# What it costs.


def test_ten_thousand_requests_leave_nothing_behind(source: Path) -> None:
    with trashd_mount(source, limit_s=LIMIT_S, command=EXECUTED) as mounted:
        ask_for_missing_names(mounted.path, N_REQUESTS)
        n_threads, n_fds, firsts = (
            int(status_of(mounted.pid)["Threads"][0]),
            mounted.n_fds(),
            count(N_REQUESTS, N_REQUESTS),
        )

        def grows_by_kib() -> int:
            before_kib = int(status_of(mounted.pid)["RssAnon"][0])
            ask_for_missing_names(mounted.path, N_REQUESTS, next(firsts))
            return int(status_of(mounted.pid)["RssAnon"][0]) - before_kib

        assert until(lambda: grows_by_kib() * 1024 < MIB)  # what is left behind would be each time
        assert int(status_of(mounted.pid)["Threads"][0]) <= n_threads
        assert mounted.n_fds() <= n_fds


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
    n, n_looks_at_the_clock = 1000, 0

    def go_on() -> float:
        """A clock that goes on by a microsecond at each look at it, as a watching thread's does."""
        nonlocal n_looks_at_the_clock
        n_looks_at_the_clock += 1
        return n_looks_at_the_clock / 1e6

    async def wait_in_vain(low: Any, fd: int) -> None:
        for _ in range(n):
            with trio.move_on_after(0):
                await low.wait_readable(fd)

    monkeypatch.setattr(pyfuse3_loop, "monotonic", go_on)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as silent:
        trio.run(wait_in_vain, seam_of(monkeypatch).lowlevel, silent.fileno())
    assert n <= n_looks_at_the_clock < 3 * n


# A pyfuse3 that we do not know.


@contextmanager
def mounted_by_other_pyfuse3(source: Path, log: Path, program: str) -> Iterator[Path]:
    mount_point = source.with_name("mounted")
    mount_point.mkdir()
    argv: list[str | Path] = ["bash", "-c", WITH_LOG, log, "env", f"PYTHONPATH={REPO}", sys.executable]
    argv += ["-c", program, "mount", source, mount_point, "--foreground"]
    with fuse_mount(argv, mount_point, LIMIT_S):
        yield mount_point


@pytest.mark.parametrize(
    ("program", "told"),
    [(OTHER_PYFUSE3, "4.0.0 is not one that we know"), (OTHER_LOCK, "reads its requests otherwise")],
    ids=["version", "behaviour"],
)
def test_with_a_pyfuse3_that_is_not_known_the_mount_serves_and_says_so(
    source: Path, place: Path, program: str, told: str
) -> None:
    with (
        mounted_by_other_pyfuse3(source, place / "log", program) as mount_point,
        ThreadPoolExecutor(4) as pool,
    ):
        for one in [pool.submit(ask_for_missing_names, mount_point, 500, 500 * n) for n in range(4)]:
            one.result()
        (mount_point / "new").write_text("new")
        assert (source / "new").stat().st_mode & 0o777 == 0o666 & ~umask()
        assert sorted(os.listdir(mount_point)) == ["file", "new"]
        assert until(lambda: has_begun(mount_point))
        explained = json.loads(done_well("mount", "--explain", "--json", mount_point).out)
    assert not explained["fast_paths"]["seam"]["is_on"]
    said = (place / "log").read_text()
    assert told in said
    assert "Traceback" not in said


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_installed_pyfuse3_is_known(source: Path) -> None:
    with trashd_mount(source, limit_s=LIMIT_S) as mounted:
        assert (mounted.path / "file").read_text() == "content"
        assert "not one that we know" not in mounted.log.read_text()
