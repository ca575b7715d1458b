"""Which disk a mount has."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusefs.linux.mountinfo import Mount, disk_of, read_mounts
from tests.support.real_filesystems import loop_volume, tmpfs_over, tmpfs_volume

_LOOP = Mount(1, 0, b"7:0", b"/", b"/m", b"ext4", b"/dev/loop0", b"rw")


@pytest.mark.needs("root", "loop")
@pytest.mark.parametrize("fs_type", ["ext4", pytest.param("btrfs", marks=pytest.mark.needs("btrfs"))])
def test_a_disk_is_the_same_as_long_as_it_is_attached(fs_type: str) -> None:
    with loop_volume(fs_type) as first, loop_volume(fs_type) as second:
        disks = [disk_of(next(one for one in read_mounts() if one.point == bytes(path))) for path in (first, second)]
        again = disk_of(next(one for one in read_mounts() if one.point == bytes(first)))
    assert [one.is_block for one in disks] == [True, True]
    assert disks[0] == again != disks[1]


@pytest.mark.parametrize("fs_type", [b"fuseblk", b"fuse.sshfs", b"fuse.trashd"])
def test_what_a_user_mounts_by_fuse_is_no_disk(fs_type: bytes) -> None:
    assert not disk_of(_LOOP._replace(fstype=fs_type)).is_block


@pytest.mark.needs("root", "loop")
@pytest.mark.parametrize("option", ["uhelper=udisks2", "user=alice"])
def test_what_a_user_had_mounted_is_told_by_libmount(option: str) -> None:
    with loop_volume("ext4") as volume, tmpfs_over(Path("/run/mount")):
        mount = next(one for one in read_mounts() if one.point == bytes(volume))
        assert not disk_of(mount).is_users
        Path("/run/mount/utab").write_text(f"SRC=/dev/loop0 TARGET={volume} ROOT=/ OPTS={option}\n")
        assert disk_of(mount).is_users


@pytest.mark.needs("root")
def test_a_filesystem_in_memory_is_no_disk() -> None:
    with tmpfs_volume() as volume:
        assert not disk_of(next(one for one in read_mounts() if one.point == bytes(volume))).is_block
