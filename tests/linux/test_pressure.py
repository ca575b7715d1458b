"""What others wait for, as this kernel tells it: its sums, and the counters of a real block device."""

import mmap
import os
import threading
from pathlib import Path

import pytest

from fusefs.linux.pressure import Device, Psi, Queue
from tests.support.volumes import loop_volume, tmpfs_volume

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


def device_of(root: Path) -> Device | None:
    fd = os.open(root, os.O_RDONLY)
    try:
        return Device.of(fd)
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


@pytest.mark.needs("root")
def test_a_device_counts_reads_and_flushes_and_the_time_they_take() -> None:
    with loop_volume("ext4") as root:
        device = device_of(root)
        assert device is not None
        append_durably(root / "file")
        before = device.requests()
        append_durably(root / "file")
        read_past_the_caches(root / "file")
        after = device.requests()
        device.close()
    assert before is not None
    assert after is not None
    since = after.since(before)
    assert since.n_reads >= 1
    assert since.n_flushes >= 1
    assert since.reads_s >= 0.0
    assert since.flushes_s >= 0.0


@pytest.mark.needs("root")
def test_a_volume_in_memory_has_no_device() -> None:
    with tmpfs_volume() as root:
        assert device_of(root) is None
        fd = os.open(root, os.O_RDONLY)
        queue = Queue(fd)
        assert not queue.is_busy()
        queue.close()
        os.close(fd)


@pytest.mark.needs("root")
def test_a_queue_is_busy_while_somebody_waits_for_the_device_and_not_when_nobody_does() -> None:
    with loop_volume("ext4") as root:
        fd = os.open(root, os.O_RDONLY)
        queue = Queue(fd)
        assert not any(queue.is_busy() for _ in range(10))
        was_busy = threading.Event()

        def write() -> None:
            for _ in range(2000):
                append_durably(root / "file")
                if was_busy.is_set():
                    return

        writer = threading.Thread(target=write)
        writer.start()
        while writer.is_alive() and not was_busy.is_set():
            if queue.is_busy():
                was_busy.set()
        writer.join()
        queue.close()
        os.close(fd)
    assert was_busy.is_set()
