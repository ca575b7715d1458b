"""A daemon that is forked from the test process has only files of its own."""

import os
from pathlib import Path

import pytest

from fusefs.mount.native._core import Prefetcher
from tests.support.foreground_mount import trashd_mount

pytestmark = pytest.mark.needs("root", "fuse")


@pytest.mark.parametrize("number", range(6, 24))
def test_what_the_test_has_still_to_close_stays_open_in_a_daemon(tmp_path: Path, number: int) -> None:
    opened = [os.open("/dev/null", os.O_RDONLY)]
    while opened[-1] < number:
        opened.append(os.dup(opened[0]))
    for fd in opened[:-1]:
        os.close(fd)
    prefetcher = Prefetcher(1)
    prefetcher.end()
    assert not prefetcher.add("", opened[-1], [b"name"], (0, 0), False, 1, 1)  # type: ignore[arg-type]
    with trashd_mount(tmp_path / "source") as mounted:
        assert os.listdir(mounted.path) == []
