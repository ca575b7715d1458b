"""A full volume of the tests is full."""

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.support.other_users import as_user
from tests.support.real_filesystems import ON_DISK, full, loop_volume, tmpfs_volume

USER = 12001


def _errno_of(function: Callable[[], object]) -> str | None:
    try:
        function()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


@pytest.mark.needs("root", "loop")
@pytest.mark.parametrize("fs_type", [*ON_DISK, "tmpfs"])
def test_full_leaves_nobody_a_block_or_an_inode(fs_type: str) -> None:
    volumes: dict[str, Callable[[], AbstractContextManager[Path]]] = {
        "ext4": lambda: loop_volume("ext4", 16, ("-N", "200")),
        "xfs": lambda: loop_volume("xfs"),
        "btrfs": lambda: loop_volume("btrfs", 128, ("--mixed",)),
        "tmpfs": lambda: tmpfs_volume("8m", ("nr_inodes=200",)),
    }
    with volumes[fs_type]() as volume:
        mine = volume / "mine"
        mine.mkdir(mode=0o777)
        mine.chmod(0o777)
        (mine / "file").write_bytes(b"")
        (mine / "file").chmod(0o666)

        def grow() -> None:
            fd = os.open(mine / "file", os.O_WRONLY)
            try:
                os.write(fd, os.urandom(4096))
                os.fsync(fd)
            finally:
                os.close(fd)

        def make() -> None:
            (mine / "new").mkdir()

        with full(volume):
            for attempt in (grow, make):
                assert _errno_of(attempt) == "ENOSPC"
                assert as_user(USER, partial(_errno_of, attempt)) == "ENOSPC"
            if fs_type in ("ext4", "tmpfs"):
                assert os.statvfs(volume).f_bavail == 0
        grow()
        make()
