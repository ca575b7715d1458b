"""The slow filesystem is slow as it is told, and ends with its block."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.fuse_slow import slow_volume
from tests.support.real_filesystems import mount_of, tmpfs_volume

pytestmark = pytest.mark.needs("root", "fuse")


def test_lookup_takes_the_delay_which_is_changed_at_run_time() -> None:
    with tmpfs_volume() as source, slow_volume(source, 20_000) as slow:
        (source / "x").touch()
        assert _stat_s(slow.path / "x") >= 0.02
        (source / "y").touch()
        slow.delay(40_000)
        assert _stat_s(slow.path / "y") >= 0.04


def _stat_s(path: Path) -> float:
    began = time.monotonic()
    os.stat(path)
    return time.monotonic() - began


def test_end_leaves_neither_mount_nor_process_though_somebody_hangs() -> None:
    with tmpfs_volume() as source:
        with slow_volume(source) as slow:
            slow.hang("x")
            client = subprocess.Popen(["stat", slow.path / "x"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            slow.wait_until_hung()
        assert mount_of(slow.path) is None
        assert not slow.path.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(slow.fuse.pid, 0)
        assert client.wait(10) == 1
