"""The threads that serve requests which come by io_uring: what they take, and that they give it back."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from fusefs.linux.fd import Fd
from fusefs.mount.native._core import N_RING_THREADS, Core
from fusefs.mount.requests.ring_threads import RingThreads
from tests.support.background_processes import in_time
from tests.support.foreground_mount import Mounted, links, trashd_mount, until
from tests.support.proc_stat import status_of
from tests.support.real_filesystems import tmpfs_volume

pytestmark = [pytest.mark.needs("root", "fuse", "fuse_uring"), pytest.mark.takes_engine]

MIB = 1 << 20
N_WRITERS = 12
LIMIT_S = 20.0


@pytest.fixture
def device() -> Iterator[Fd]:
    with Fd(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)) as device:
        yield device


def fail() -> None:
    pytest.fail("there is nothing to abort")


def n_rings() -> int:
    return [target for _fd, target in links("/proc/self/fd")].count("anon_inode:[io_uring]")


def n_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("ring")


def test_rings_that_are_not_used_leave_no_thread_and_no_file(device: Fd) -> None:
    before = n_rings()
    rings = RingThreads(device, fail, 1000)
    rings.prepare()
    assert n_threads() == N_RING_THREADS * len(os.sched_getaffinity(0))
    rings.give_up()
    rings.wait_for_end(LIMIT_S)
    assert not n_threads()
    del rings
    assert n_rings() <= before  # those of an earlier test, which its exception kept, may have gone meanwhile


def test_rings_that_need_more_open_files_than_there_are_leave_no_thread(device: Fd) -> None:
    rings = RingThreads(device, fail, 4)
    with pytest.raises(OSError, match="open files") as refused:
        rings.prepare()
    assert refused.value.errno == errno.EMFILE
    assert not n_threads()


def test_a_kernel_that_refuses_entries_is_an_error(device: Fd) -> None:
    """Nothing is mounted by this fd."""
    rings = RingThreads(device, fail, 1000)
    rings.prepare()
    with pytest.raises(OSError, match="not permitted"):
        rings.begin(cast(Core, object()))
    rings.wait_for_end(LIMIT_S)
    assert not n_threads()


def write_large(path: Path) -> None:
    def write(number: int) -> None:
        with open(path / f"file-{number}", "wb", buffering=0) as file:
            file.writelines(bytes(MIB) for _ in range(3))

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    writers = [threading.Thread(target=write, args=(number,)) for number in range(N_WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()


def memory_kib(mounted: Mounted) -> int:
    return int(status_of(mounted.pid)["RssAnon"][0])


def test_memory_of_large_requests_is_given_back() -> None:
    with tmpfs_volume() as volume:
        source = volume / "source"
        source.mkdir()
        options = ["coherence=exclusive", "uring=on", "passthrough=off"]
        with trashd_mount(source, options=options, limit_s=90) as mounted:
            in_time(partial(write_large, mounted.path))
            most = memory_kib(mounted)
            assert until(lambda: memory_kib(mounted) < most - 512, LIMIT_S), (most, memory_kib(mounted))
