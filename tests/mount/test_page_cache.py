"""What the kernel keeps of a file's content in shared mode: as long as the file is what it was, and no longer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.real_filesystems import overlay_volume

pytestmark = pytest.mark.needs("root", "fuse")

LIMIT_S = 40.0
CONTENT = b"content " * 1000


class File(NamedTuple):
    """One, seen through the mount and behind it, where nothing tells of changes."""

    mounted: Mounted
    seen: Path
    behind: Path

    def costs_a_read(self) -> bool:
        """Whether it was read anew from the backing filesystem."""
        before = self.mounted.n_asked("read")
        assert self.seen.read_bytes() == self.behind.read_bytes()
        return self.mounted.n_asked("read") > before


@pytest.fixture
def file() -> Iterator[File]:
    with overlay_volume() as overlay:
        (overlay.path / "file").write_bytes(CONTENT)
        with trashd_mount(overlay.path, options=["coherence=shared", "passthrough=off"]) as mounted:
            yield File(mounted, mounted.path / "file", overlay.path / "file")


def test_what_has_not_changed_for_a_while_is_read_once(file: File) -> None:
    assert file.costs_a_read()
    assert until(lambda: not any(file.costs_a_read() for _ in range(3)), LIMIT_S)  # but for a kernel short of memory


def test_a_change_in_the_same_tick_is_seen_too(file: File) -> None:
    """Of the same size, and so soon that its time may be that of the one before."""
    for number in range(200):
        with file.behind.open("r+b", buffering=0) as behind:
            os.pwrite(behind.fileno(), b"%04d" % number, 0)
        assert file.seen.read_bytes()[:4] == b"%04d" % number


def test_a_time_that_is_set_back_hides_no_change(file: File) -> None:
    before = file.behind.stat()
    assert until(lambda: not file.costs_a_read(), LIMIT_S)
    file.behind.write_bytes(CONTENT.swapcase())
    os.utime(file.behind, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.seen.read_bytes() == CONTENT.swapcase()
