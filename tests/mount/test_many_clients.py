"""A request goes to the queue of its client's core, and to no other: whatever waits there, the next one is answered.

A thousand clients, threads of a few processes, are on one core.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.background_processes import LIMIT_S, clients, ends, in_time, is_ended
from tests.support.busy_clients import work
from tests.support.file_leases import write_lease
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.fsfreeze import frozen
from tests.support.open_files import waits_in_the_kernel
from tests.support.real_filesystems import loop_volume, tmpfs_volume

pytestmark = [pytest.mark.needs("root", "fuse", "fuse_uring"), pytest.mark.takes_engine]

N_PROCESSES, N_THREADS = 8, 125
N_CLIENTS = N_PROCESSES * N_THREADS
STACK_BYTES = 128 << 10
STORM_S = 1.5


class Place(NamedTuple):
    """A mount with a file to be leased, and another one."""

    mounted: Mounted
    behind: Path

    @property
    def leased(self) -> Path:
        return self.mounted.path / "leased"


@pytest.fixture
def place() -> Iterator[Place]:
    with tmpfs_volume() as volume:
        source = volume / "source"
        (source / "free").mkdir(parents=True)
        for name in ("leased", "other", "free/free-0", "free/free-1"):
            (source / name).write_bytes(b"content")
        options = ["coherence=shared", "uring=on"]
        with trashd_mount(source, options=options, limit_s=90) as mounted:
            yield Place(mounted, source)


def on_one_core(act: Callable[[], object]) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    act()


def by_threads(act: Callable[[], object]) -> None:
    """Something that each of many threads does on that core. Raises  what the first of them did"""
    failures: list[OSError] = []

    def try_it() -> None:
        try:
            act()
        except OSError as error:
            failures.append(error)

    threading.stack_size(STACK_BYTES)
    threads = [threading.Thread(target=try_it) for _ in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def a_thousand(place: Place, act: Callable[[], object]) -> Iterator[list[int]]:
    """That many clients on one core that do something, all of whom wait when the block begins."""
    each = partial(on_one_core, partial(by_threads, act))
    with clients([each] * N_PROCESSES) as pids:
        assert until(lambda: place.mounted.fuse.n_waiting() >= N_CLIENTS, LIMIT_S)
        yield pids


def let_a_thousand_wait(place: Place) -> None:
    with write_lease(place.behind / "leased") as give_up, a_thousand(place, place.leased.read_bytes) as pids:
        give_up()
        assert {ends(pid) for pid in pids} == {0}


def looks_for_what_is_not_there(place: Place) -> None:
    with suppress(FileNotFoundError):
        os.lstat(place.mounted.path / f"missing-{threading.get_native_id()}")


def test_a_stat_on_a_core_is_answered_where_a_thousand_wait_for_a_lease(place: Place) -> None:
    with (
        write_lease(place.behind / "leased") as give_up,
        a_thousand(place, place.leased.read_bytes) as pids,
    ):
        for _ in range(2):
            place.mounted.forget_all()
            in_time(partial(on_one_core, (place.mounted.path / "other").stat))
        in_time(partial(on_one_core, partial(work, place.mounted.path / "free")))
        assert not any(map(is_ended, pids))
        give_up()
        assert {ends(pid) for pid in pids} == {0}


def test_what_comes_at_once_for_all_entries_of_a_core_is_answered(place: Place) -> None:
    """Once a thousand have waited there are as many entries, and more than the ring has room for answers to."""
    let_a_thousand_wait(place)
    os.kill(place.mounted.pid, signal.SIGSTOP)
    try:
        with a_thousand(place, partial(looks_for_what_is_not_there, place)) as pids:
            os.kill(place.mounted.pid, signal.SIGCONT)
            assert {ends(pid) for pid in pids} == {0}
    finally:
        os.kill(place.mounted.pid, signal.SIGCONT)
    in_time(partial(on_one_core, partial(work, place.mounted.path / "free")))


def looks_and_syncs(place: Place, until_s: float) -> None:
    """A thread in twelve waits for the disk, and another thread answers that; the others are answered at once."""
    number, n = threading.get_native_id(), 0
    with (place.mounted.path / f"synced-{number}").open("wb") as file:
        while time.monotonic() < until_s:
            n += 1
            if number % 12:
                with suppress(FileNotFoundError):
                    os.lstat(place.mounted.path / f"missing-{number}-{n}")
            else:
                os.fsync(file.fileno())


def test_no_answer_is_lost_where_a_ring_is_full_of_them_and_its_thread_is_woken(place: Place) -> None:
    """More entries in a ring than it has room for answers to, and answers by other threads meanwhile."""
    let_a_thousand_wait(place)
    each = partial(on_one_core, partial(by_threads, partial(looks_and_syncs, place, time.monotonic() + STORM_S)))
    with clients([each] * 2) as pids:
        assert {ends(pid) for pid in pids} == {0}
    in_time(partial(on_one_core, partial(work, place.mounted.path / "free")))


@pytest.mark.needs("loop")
@pytest.mark.parametrize("uring", ["on", "off"])
def test_who_waits_for_a_frozen_disk_keeps_nobody_of_that_core_waiting_after_many_waited(uring: str) -> None:
    with loop_volume("ext4", 64) as volume:
        source = volume / "source"
        for name in ("one", "two", "three", "another"):
            (source / name).mkdir(parents=True)
        (source / "leased").write_bytes(b"content")
        files = [source / f"another/file-{number}" for number in range(40)]
        for file in files:
            file.touch()
        with trashd_mount(source, options=["coherence=exclusive", f"uring={uring}"], limit_s=90) as mounted:
            place = Place(mounted, source)
            let_a_thousand_wait(place)
            for name in ("one", "two", "three", "another"):
                (mounted.path / name).stat()
            makes = [partial(on_one_core, (mounted.path / name / "new").mkdir) for name in ("one", "two", "three")]
            with frozen(source) as thaw, clients(makes) as makers:
                assert until(lambda: all(map(waits_in_the_kernel, makers)), LIMIT_S)
                looks = [partial(on_one_core, (mounted.path / "another" / file.name).stat) for file in files]
                with clients(looks) as lookers:
                    assert {ends(pid) for pid in lookers} == {0}
                assert not any(map(is_ended, makers))
                thaw()
                assert {ends(pid) for pid in makers} == {0}


def cores_of(task: Path) -> str:
    (cores,) = re.findall(r"^Cpus_allowed_list:\s*(.*)", (task / "status").read_text(), re.MULTILINE)
    return str(cores)


def test_threads_begun_by_one_that_has_one_core_run_on_any(place: Place) -> None:
    tasks = Path(f"/proc/{place.mounted.pid}/task")
    before = {*tasks.iterdir()}
    with write_lease(place.behind / "leased") as give_up, a_thousand(place, place.leased.read_bytes) as pids:
        assert cores_of(Path("/proc/self")) in {cores_of(task) for task in {*tasks.iterdir()} - before}
        give_up()
        assert {ends(pid) for pid in pids} == {0}
