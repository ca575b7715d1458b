"""A listing of an open directory tells what is in it now, not what was in it at an earlier look."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import raw

pytestmark = pytest.mark.needs("root", "loop")


def scanned(kernel: Kernel, fd: Fd) -> list[bytes]:
    """The names, one by one."""
    with kernel.scan(fd) as entries:
        return sorted(os.fsencode(entry.name) for entry in entries)


@pytest.mark.parametrize("how", [Kernel.list, Kernel.list_inos, scanned])
@pytest.mark.parametrize(
    "fs_type",
    ["tmpfs", "ext4", pytest.param("xfs", marks=pytest.mark.needs("xfs")),
     pytest.param("btrfs", marks=pytest.mark.needs("btrfs"))],
)  # fmt: skip
def test_listing_again_tells_what_was_made_meanwhile(
    fs_type: str, how: Callable[[Kernel, Fd], Collection[bytes]]
) -> None:
    """A btrfs listing ends where the directory ended at open or lseek (Linux 6.6), and os.scandir seeks afterwards."""
    kernel = Kernel()
    with tmpfs_volume() if fs_type == "tmpfs" else loop_volume(fs_type) as volume:
        (volume / "d").mkdir()
        with kernel.open_path(raw(volume)) as root, kernel.open_dir(root, b"d") as fd:
            assert list(how(kernel, fd)) == []
            (volume / "d" / "new").touch()
            assert list(how(kernel, fd)) == [b"new"]
