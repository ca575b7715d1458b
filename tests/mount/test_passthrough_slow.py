"""What passes the daemon by on slow backing is not remembered: operations go to threads, and their answers are kept."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from tests.support.foreground_mount import Mounted, fresh_mount
from tests.support.open_files import opened
from tests.support.passthrough_files import n_messages, why_off

pytestmark = [pytest.mark.needs("root", "fuse", "passthrough"), pytest.mark.rests_on("passthrough")]


@pytest.fixture
def slow() -> Iterator[Mounted]:
    """Operations go to threads, and their answers are remembered."""
    with fresh_mount("coherence=exclusive", "backing=slow") as mounted:
        (mounted.backing / "file").write_bytes(bytes(8192))
        assert why_off(mounted) is None
        yield mounted


def test_of_what_is_being_written_on_slow_backing_nothing_is_remembered(slow: Mounted) -> None:
    file = slow.path / "file"
    file.stat()
    with opened(file, os.O_WRONLY | os.O_APPEND) as fd, opened(file, os.O_RDONLY) as reader:
        for number in range(1, 6):
            os.write(fd, bytes(1000))
            assert file.stat().st_size == os.fstat(reader).st_size == 8192 + 1000 * number
            slow.forget_all()
            with os.scandir(slow.path) as entries:
                assert [entry.stat().st_size for entry in entries] == [8192 + 1000 * number]
    assert file.stat().st_size == 8192 + 5000
    assert n_messages(slow) == 0


def test_of_what_is_read_on_slow_backing_the_time_of_access_is_right(slow: Mounted) -> None:
    file, below = slow.path / "file", slow.backing / "file"
    os.utime(file, ns=(10**18, 10**18))
    slow.forget_all()
    assert file.stat().st_atime_ns == 10**18
    with opened(file, os.O_RDONLY) as fd:
        os.pread(fd, 100, 0)
        assert file.stat().st_atime_ns == below.stat().st_atime_ns > 10**18
    slow.forget_all()
    assert file.stat().st_atime_ns == below.stat().st_atime_ns


def test_what_is_written_to_memory_on_slow_backing_is_told_at_once(slow: Mounted) -> None:
    file, below = slow.path / "file", slow.backing / "file"
    old_ns = file.stat().st_mtime_ns
    with opened(file, os.O_RDWR) as fd, mmap.mmap(fd, 8192) as mapped:
        mapped[0] = 1
        assert file.stat().st_mtime_ns == below.stat().st_mtime_ns > old_ns
        os.utime(below, ns=(0, 0))
        mapped.flush()
        mapped[0] = 2
        assert file.stat().st_mtime_ns == below.stat().st_mtime_ns
