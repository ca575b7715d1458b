"""What may be in an archive alone is not read: by cat, by diff. The filesystem's kind is told, not real."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusefs.core.errors import Refused
from fusefs.linux.disk_usage import may_be_archived
from fusefs.linux.kernel import Kernel
from fusefs.store.look_inside import Difference, content_of, differences

pytestmark = pytest.mark.needs("root")

SCALE = 0x47504653


class ScaleKernel(Kernel):
    """Takes a directory's filesystem for Storage Scale, where a file without blocks is what was migrated."""

    def filesystem(self, fd: int) -> int:
        return SCALE


def hole(path: Path, n_bytes: int = 1 << 20) -> Path:
    path.touch()
    os.truncate(path, n_bytes)
    return path


def test_a_file_without_blocks_may_be_archived_where_there_are_archives(volume: Path) -> None:
    with hole(volume / "large").open() as large, hole(volume / "small", 100).open() as small:
        assert may_be_archived(ScaleKernel(), large.fileno())
        assert not may_be_archived(ScaleKernel(), small.fileno())
        assert not may_be_archived(Kernel(), large.fileno())
    (volume / "full").write_bytes(bytes(8192))
    with (volume / "full").open() as full:
        assert not may_be_archived(ScaleKernel(), full.fileno())


def test_cat_refuses_what_may_be_archived(volume: Path) -> None:
    kernel = ScaleKernel()
    with kernel.open_path(bytes(hole(volume / "f")), os.O_PATH) as fd, pytest.raises(Refused, match="archive"):
        next(content_of(kernel, fd, b"f"))


def test_diff_calls_what_may_be_archived_unreadable(volume: Path) -> None:
    kernel = ScaleKernel()
    for name, mtime in (("a", 1), ("b", 2)):
        (volume / name).mkdir()
        os.utime(hole(volume / name / "f"), (mtime, mtime))
    with (
        kernel.open_path(bytes(volume / "a"), os.O_RDONLY) as a,
        kernel.open_path(bytes(volume / "b"), os.O_RDONLY) as b,
    ):
        found = list(differences(kernel, a, b, b"", tells_new=True))
    assert found == [Difference(b"f", "unreadable")]
