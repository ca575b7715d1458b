"""A directory that another machine moved is known here by its old place: it can be renamed all the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs.linux.batched_calls import rename_all_free
from fusefs.linux.kernel import Kernel
from tests.support.fuse_slow import slow_volume

LONG_S = 600.0


def _rename(old: int, new: int) -> None:
    os.rename("tree", "tree", src_dir_fd=old, dst_dir_fd=new)


def _rename_free(old: int, new: int) -> None:
    Kernel().rename_free(old, b"tree", new, b"tree")


def _rename_all_free(old: int, new: int) -> None:
    assert rename_all_free(Kernel(), old, new, ["tree"]) == []


@pytest.mark.quick
@pytest.mark.parametrize("ours", [_rename_free, _rename_all_free])
def test_a_directory_that_another_machine_moved_can_be_renamed(
    tmp_path: Path, ours: Callable[[int, int], None]
) -> None:
    for name in ("at/tree", "there", "to"):
        (tmp_path / name).mkdir(parents=True)
    with slow_volume(tmp_path, 0, LONG_S) as mount:
        held = os.open(mount.path / "at/tree", os.O_PATH)
        there, to = (os.open(mount.path / name, os.O_RDONLY) for name in ("there", "to"))
        try:
            (tmp_path / "at/tree").rename(tmp_path / "there/tree")  # behind the kernel's back
            for _ in range(2):
                with pytest.raises(OSError, match="Stale") as raised:
                    _rename(there, to)
                assert raised.value.errno == errno.ESTALE
            ours(there, to)
        finally:
            for fd in (held, there, to):
                os.close(fd)
    assert (tmp_path / "to/tree").is_dir()
