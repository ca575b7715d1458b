"""A backing filesystem that hangs keeps waiting its own callers, and no others; nothing piles up, and all can be ended.

What hangs is one name of a slow filesystem, and whatever is about it, until it is told to go on. Who waits for it can't
be killed, so each client is a process.
"""

import errno
import functools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.background_mounts import ended
from tests.support.background_processes import LIMIT_S, clients, ends, in_time, is_ended
from tests.support.busy_clients import work
from tests.support.foreground_mount import SHARED_LIMIT_S, until
from tests.support.hanging_mounts import N_FILES, HangingMount, hanging_mount
from tests.support.open_files import waits_in_the_kernel
from tests.support.proc_stat import status_of
from tests.support.real_filesystems import mount_of
from tests.support.trashd_command import EXECUTED, trashd

pytestmark = [pytest.mark.needs("root", "fuse"), pytest.mark.takes_engine]

N_CLIENTS = 700  # more than there are workers and threads
N_THREADS_MOST = 1024
N_FDS_MOST = 1600
KIB_A_CLIENT = 100
GONE = {*DAEMON_GONE, errno.EIO, errno.ENOENT, errno.EINTR}


@pytest.fixture(scope="module")
def slow_for_all() -> Iterator[HangingMount]:
    with hanging_mount("slow", limit_s=SHARED_LIMIT_S) as slow:
        yield slow


@pytest.fixture
def slow(slow_for_all: HangingMount, own_name: str) -> Iterator[HangingMount]:
    try:
        yield slow_for_all.own_directory(own_name)
    finally:
        slow_for_all.volume.go_on()


def test_a_file_that_hangs_keeps_nobody_else_waiting_in_its_directory(slow: HangingMount) -> None:
    slow.volume.hang("stuck-33")
    with clients([lambda: os.lstat(slow.top / "stuck/stuck-33")]) as (client,):
        slow.volume.wait_until_hung()
        in_time(lambda: [os.lstat(slow.top / f"stuck/stuck-{i}") for i in range(30)])
        slow.volume.go_on()
        assert ends(client) == 0


def test_a_listing_with_a_name_that_hangs_tells_all_names() -> None:
    """Plain ones at once; with attributes, when the hung one has been given up for the others' sake."""
    with hanging_mount("slow") as slow:
        slow.volume.hang("stuck-33")
        in_time(lambda: len(os.listdir(slow.top / "stuck")) == N_FILES + 1 or os._exit(1))
        others = [slow.top / f"stuck/stuck-{i}" for i in range(N_FILES) if i != 33]
        with clients([lambda: [os.lstat(path) for path in others] and None]) as (client,):
            assert ends(client) == 0


def crowd(top: Path, n: int) -> Callable[[], object]:
    """Many threads, each of which looks for a name of its own that is not there."""

    def look(number: int) -> int:
        try:
            os.lstat(top / f"stuck/stuck-absent-{number}")
        except OSError as error:
            return error.errno or 255
        return 0

    def act() -> None:
        with ThreadPoolExecutor(n) as pool:
            if set(pool.map(look, range(n))) == {errno.ENOENT}:
                raise FileNotFoundError(errno.ENOENT, "none of them is there")

    return act


def test_more_clients_than_workers_hang_and_nothing_piles_up() -> None:
    with hanging_mount("slow", command=EXECUTED) as slow:
        pid = slow.mounted.pid
        work(slow.top / "free")
        (slow.top / "stuck").lstat()  # all may come in, and look further
        before_kib = int(status_of(pid)["RssAnon"][0])
        slow.volume.hang("stuck")
        with clients([crowd(slow.top, N_CLIENTS)]) as pids:
            slow.volume.wait_until_hung()
            assert until(lambda: int((slow.mounted.fuse.connection / "waiting").read_text()) >= N_CLIENTS, LIMIT_S)
            assert int(status_of(pid)["Threads"][0]) < N_THREADS_MOST
            assert len(os.listdir(f"/proc/{pid}/fd")) < N_FDS_MOST
            assert int(status_of(pid)["RssAnon"][0]) - before_kib < N_CLIENTS * KIB_A_CLIENT
            slow.volume.go_on()
            assert {ends(client) for client in pids} == {errno.ENOENT}
        in_time(lambda: work(slow.top / "stuck"))
        in_time(lambda: work(slow.top / "free"))


def test_what_was_remembered_is_answered_though_it_hangs(slow: HangingMount) -> None:
    paths = [slow.top / f"stuck/stuck-{i}" for i in range(N_FILES)]
    for path in paths:
        path.lstat()
    slow.mounted.forget_all()
    slow.volume.hang("stuck")
    in_time(lambda: [path.lstat() for path in paths])


def test_stats_tell_how_many_wait_while_it_hangs(slow: HangingMount) -> None:
    (slow.top / "stuck").lstat()
    slow.volume.hang("stuck")
    with clients([crowd(slow.top, 9)]) as pids:
        slow.volume.wait_until_hung(9)
        assert until(lambda: n_threads(slow) == 9, LIMIT_S)
        slow.volume.go_on()
        assert {ends(client) for client in pids} == {errno.ENOENT}
        assert until(lambda: n_threads(slow) == 0, LIMIT_S)


def n_threads(slow: HangingMount) -> int:
    mounts = trashd("status", "--json").objects()[-1]["mounts"]
    (told,) = [mount["gauges"] for mount in mounts if mount["mount_point"] == str(slow.mounted.path)]
    return int(told["n_threads"])


# Ending it.


@contextmanager
def hung(*, n: int = 5) -> Iterator[tuple[HangingMount, list[int]]]:
    with hanging_mount("slow", expect_end=True) as slow:
        slow.volume.hang("stuck")
        with clients([functools.partial(os.lstat, slow.top / f"stuck/stuck-{i}") for i in range(n)]) as pids:
            slow.volume.wait_until_hung()
            assert until(lambda: all(waits_in_the_kernel(pid) for pid in pids), LIMIT_S)
            yield slow, pids


def test_umount_lazy_takes_it_out_of_sight_while_it_hangs() -> None:
    with hung() as (slow, pids):
        done = trashd("umount", "--lazy", slow.top)
        assert done.code == 0, done.err
        assert mount_of(slow.top) is None
        assert not any(is_ended(pid) for pid in pids)
        slow.volume.go_on()
        assert {ends(pid) for pid in pids} == {0}
        ended(os.pidfd_open(slow.mounted.pid))


def test_umount_tells_who_waits_that_it_is_busy() -> None:
    with hung() as (slow, pids):
        done = trashd("umount", slow.top)
        assert done.code == 8, done.err
        assert mount_of(slow.top) is not None
        slow.volume.go_on()
        assert {ends(pid) for pid in pids} == {0}
        assert trashd("umount", slow.top).code == 0
        ended(os.pidfd_open(slow.mounted.pid))


def fetch_ahead(slow: HangingMount) -> None:
    """A listing fetches attributes ahead, of a name that hangs; who listed has left."""
    slow.volume.hang("stuck-33")
    in_time(lambda: os.listdir(slow.top / "stuck") and None)
    in_time(lambda: [os.lstat(slow.top / f"stuck/stuck-{i}") for i in range(3)] and None)
    slow.volume.wait_until_hung()


def test_umount_is_not_held_up_by_what_nobody_waits_for_any_more() -> None:
    with hanging_mount("slow", expect_end=True) as slow:
        fetch_ahead(slow)
        done = trashd("umount", slow.top)
        assert done.code == 0, done.err
        assert mount_of(slow.top) is None
        slow.volume.go_on()
        ended(os.pidfd_open(slow.mounted.pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_while_what_it_fetches_hangs(number: signal.Signals) -> None:
    with hanging_mount("slow", expect_end=True) as slow:
        fetch_ahead(slow)
        os.kill(slow.mounted.pid, number)
        assert number == signal.SIGKILL or until(lambda: mount_of(slow.top) is None, LIMIT_S)
        slow.volume.go_on()
        ended(os.pidfd_open(slow.mounted.pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_it_hangs(number: signal.Signals) -> None:
    """The mount goes at once; so do those who wait. (The process itself can't end while a call below can't.)"""
    with hung() as (slow, pids):
        os.kill(slow.mounted.pid, number)
        assert until(lambda: mount_of(slow.top) is None, LIMIT_S)
        assert {ends(pid) for pid in pids} <= GONE | {0}
        slow.volume.go_on()
        ended(os.pidfd_open(slow.mounted.pid))


def test_a_killed_daemon_lets_go_who_waits() -> None:
    with hung() as (slow, pids):
        os.kill(slow.mounted.pid, signal.SIGKILL)
        slow.volume.go_on()
        ended(os.pidfd_open(slow.mounted.pid))
        assert {ends(pid) for pid in pids} <= GONE | {0}
