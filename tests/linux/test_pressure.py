"""What others wait for, as this kernel tells it: its sums, and the counters of a real block device."""

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusefs.core.pacing import Requests
from fusefs.engine.pace import DeviceQueue
from fusefs.linux.pressure import DeviceCounters, Psi
from tests.support.foreground_mount import until
from tests.support.real_filesystems import loop_volume, tmpfs_volume

BLOCK = 4096


def read_past_the_caches(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(fd, [mmap.mmap(-1, BLOCK)], 0)
    finally:
        os.close(fd)


def append_durably(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(fd, bytes(BLOCK))
        os.fsync(fd)
    finally:
        os.close(fd)


def device_of(root: Path) -> DeviceCounters | None:
    fd = os.open(root, os.O_RDONLY)
    try:
        return DeviceCounters.open_for(fd)
    finally:
        os.close(fd)


def test_sums_of_stalls_never_fall() -> None:
    psi = Psi()
    before, after = psi.read(), psi.read()
    psi.close()
    for sooner, later in zip(before, after, strict=True):
        assert (sooner is None) == (later is None)
        assert sooner is None or later is None or 0.0 <= sooner <= later


def test_a_kernel_without_pressure_tells_none(tmp_path: Path) -> None:
    psi = Psi(str(tmp_path))
    assert psi.read() == (None, None, None)
    psi.close()


def test_a_pressure_file_that_can_not_be_read_tells_none(tmp_path: Path) -> None:
    for name in ("io", "memory", "cpu"):
        (tmp_path / name).mkdir()  # EISDIR, as psi=0 is EOPNOTSUPP
    psi = Psi(str(tmp_path))
    assert psi.read() == (None, None, None)
    psi.close()


def has_both(now: Requests | None, before: Requests) -> bool:
    """Whether there was a read and a flush since then, each with a time."""
    assert now is not None
    since = now.since(before)
    assert min(since.reads_s, since.flushes_s) >= 0.0
    return since.n_reads >= 1 and since.n_flushes >= 1


@pytest.mark.needs("root")
def test_a_device_counts_reads_and_flushes_and_the_time_they_take() -> None:
    with loop_volume("ext4") as root:
        device = device_of(root)
        assert device is not None
        append_durably(root / "file")
        before = device.requests()
        append_durably(root / "file")
        read_past_the_caches(root / "file")
        assert before is not None
        assert until(lambda: has_both(device.requests(), before))  # it counts a read after its end
        device.close()


@pytest.mark.needs("root")
def test_a_volume_in_memory_has_no_device() -> None:
    with tmpfs_volume() as root:
        assert device_of(root) is None
        fd = os.open(root, os.O_RDONLY)
        queue = DeviceQueue(fd)
        assert not queue.is_busy()
        queue.close()
        os.close(fd)


@pytest.mark.needs("root")
def test_a_queue_is_busy_while_somebody_waits_for_the_device_and_not_when_nobody_does() -> None:
    with loop_volume("ext4") as root:
        fd = os.open(root, os.O_RDONLY)
        queue = DeviceQueue(fd)
        assert until(lambda: not queue.is_busy())  # the mount may have left something to write
        is_seen = threading.Event()

        def write() -> None:
            while not is_seen.is_set():
                append_durably(root / "file")

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            was_busy = until(queue.is_busy)
            is_seen.set()
            writing.result()
        queue.close()
        os.close(fd)
    assert was_busy
