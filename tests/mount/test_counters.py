"""The daemon's side of the mounts in `trashd status`: what is counted where, and that counting wakes no thread."""

import os
from bisect import bisect_right
from contextlib import closing
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.core.mount_counters import (
    BOUNDS_NS,
    CounterLayout,
    CounterTable,
    Gauges,
    Remembered,
    Remembering,
    decode,
    encode,
)
from fusefs.linux.fd import Fd
from fusefs.mount.places.counters import CELL_OF, Counters
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.vfs import Vfs
from tests.support.vfs_without_mount import options_of


@pytest.fixture
def counted() -> tuple[Counters, bytearray]:
    """Numbers, and the file that they are."""
    table = CounterTable(version="", pid=0, started_ns=0)
    data = bytearray(encode(table))
    return Counters(memoryview(data)[-8 * CounterLayout(table).n_cells :].cast("Q")), data


def test_what_is_remembered_is_counted_by_sort(counted: tuple[Counters, bytearray]) -> None:
    stats, data = counted
    for i, sort in enumerate(Remembering):
        for _ in range(i):
            stats.hit(sort)
        stats.miss(sort)
    assert decode(data).remembered == {sort.label(): Remembered(i, 1) for i, sort in enumerate(Remembering)}


@pytest.mark.parametrize(
    "took_ns", [1, BOUNDS_NS[0] - 1, BOUNDS_NS[0], BOUNDS_NS[0] + 1, BOUNDS_NS[-1] - 1, BOUNDS_NS[-1], 10**12]
)
def test_an_answer_is_counted_in_the_bucket_of_its_time(
    counted: tuple[Counters, bytearray], took_ns: int, tmp_path: Path
) -> None:
    stats, data = counted
    with Fd(os.open(tmp_path, os.O_PATH)) as root, closing(Vfs(root, TablesLock(), stats, options_of(), 1000)) as vfs:
        vfs.core.count(CELL_OF["read"], took_ns, True)
    told = decode(data).operations
    bucket = bisect_right(BOUNDS_NS, took_ns)
    assert told["read"].counts == tuple(int(i == bucket) for i in range(len(BOUNDS_NS) + 1))
    assert (told["read"].n_failed, told["read"].total_ns, told["read"].max_ns) == (1, took_ns, took_ns)
    assert sum(one.n() for one in told.values()) == 1


def test_an_idle_daemon_is_not_woken(counted: tuple[Counters, bytearray]) -> None:
    """Gauges are looked at after something happened, once for all that happened, and then no more."""
    stats, data = counted
    n_looks = 0

    def look() -> Gauges:
        nonlocal n_looks
        n_looks += 1
        return Gauges(n_nodes=n_looks)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stats.keep_gauges, look)
            await trio.testing.wait_all_tasks_blocked()
            assert n_looks == 1
            for _ in range(1000):
                stats.changed()
            await trio.sleep(3600)
            assert n_looks == 2
            stats.changed()
            await trio.sleep(3600)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert decode(data).gauges["n_nodes"] == n_looks == 3


def test_gauges_are_new_before_it_is_told_that_they_are(counted: tuple[Counters, bytearray]) -> None:
    stats, data = counted
    told: list[int] = []

    def look() -> Gauges:
        told.append(decode(data).updated_ns)
        return Gauges()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stats.keep_gauges, look)
            await trio.testing.wait_all_tasks_blocked()
            stats.changed()
            await trio.sleep(3600)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert told == [0, 0]
    assert decode(data).updated_ns > 0


def test_gauges_follow_the_end_of_threads_that_nobody_tells(counted: tuple[Counters, bytearray]) -> None:
    stats, data = counted
    at_work = [2, 2, 1, 0]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stats.keep_gauges, lambda: Gauges(n_threads=at_work.pop(0)))
            await trio.sleep(3600)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert at_work == []
    assert decode(data).gauges["n_threads"] == 0
