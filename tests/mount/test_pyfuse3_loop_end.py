"""The end of the seam between pyfuse3 and trio: whatever is going on, the daemon ends with its mount."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing

from fusefs.mount.bridge import pyfuse3_loop
from tests.support.background_mounts import ended
from tests.support.busy_clients import ask_for_missing_names, hammered, one_file
from tests.support.foreground_mount import trashd_mount
from tests.support.fuse_waiting import N_WORKERS, waiting_mount
from tests.support.trashd_command import done_well

pytestmark = pytest.mark.needs("root", "fuse")

LIMIT_S = 100.0


@pytest.fixture
def source() -> Iterator[Path]:
    with one_file() as path:
        yield path


def test_when_the_connection_is_gone_each_worker_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(pyfuse3), "trio", trio)
    n_told, n_ended = 0, 0

    def gone() -> None:
        nonlocal n_told
        n_told += 1

    assert pyfuse3_loop.hook(lambda: None, gone)
    seam: Any = vars(pyfuse3)["trio"]

    async def work(connection: int) -> None:
        nonlocal n_ended
        async with seam.Lock():
            await seam.lowlevel.wait_readable(connection)
        n_ended += 1

    async def go() -> None:
        connection, other_end = os.pipe()
        try:
            with trio.fail_after(LIMIT_S):
                async with trio.open_nursery() as nursery:
                    for _ in range(N_WORKERS):
                        nursery.start_soon(work, connection)
                    await trio.testing.wait_all_tasks_blocked()
                    os.close(other_end)
        finally:
            os.close(connection)

    trio.run(go)
    assert n_ended == N_WORKERS
    assert n_told >= 1


@pytest.mark.parametrize("n_waiting", [1, N_WORKERS])
def test_a_signal_ends_an_aborted_service_though_handlers_wait(place: Path, n_waiting: int) -> None:
    """All of them, even: then no thread reads, and so none sees the abort."""
    with waiting_mount(place, limit_s=LIMIT_S) as mount:
        pid_fd = os.pidfd_open(mount.fuse.pid)
        with ThreadPoolExecutor(N_WORKERS) as pool:
            waiting = [pool.submit(mount.ask, f"wait-{number}") for number in range(n_waiting)]
            if n_waiting < N_WORKERS:
                assert mount.waits(n_waiting)
            mount.fuse.abort()
            for one in waiting:
                with pytest.raises(OSError, match=r"."):
                    one.result()
            os.kill(mount.fuse.pid, signal.SIGINT)
            ended(pid_fd)


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "hammered"])
@pytest.mark.parametrize("way", ["abort", "umount"])
def test_a_daemon_ends_with_its_mount(source: Path, way: str, is_idle: bool) -> None:
    with trashd_mount(source, limit_s=LIMIT_S, expect_end=True) as mounted:
        ask_for_missing_names(mounted.path, 100)
        with nullcontext() if is_idle else hammered(mounted.path):
            pid_fd = os.pidfd_open(mounted.pid)
            if way == "abort":
                mounted.fuse.abort()
            elif is_idle:
                subprocess.run(["umount", mounted.path], check=True)
            else:
                done_well("umount", "--lazy", mounted.path)
            ended(pid_fd)


@pytest.mark.parametrize("n_waiting", [0, 1, N_WORKERS - 1])
@pytest.mark.parametrize("words", [(), ("--read-first",)])
def test_cancelled_workers_let_go_whatever_they_wait_for(place: Path, n_waiting: int, words: tuple[str, ...]) -> None:
    with waiting_mount(place, *words, limit_s=LIMIT_S) as mount:
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
