"""What unlinks leave to be written on ext4, begun by us: by the counters of a real block device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.linux.metadata_writeback import MetadataWriteback
from fusefs.linux.pressure import device_directory
from tests.support.foreground_mount import until
from tests.support.open_fds import open_fds
from tests.support.real_filesystems import loop_volume, sync, tmpfs_volume

pytestmark = pytest.mark.needs("root")


@contextmanager
def writeback_of(root: Path) -> Iterator[MetadataWriteback | None]:
    fd = os.open(root, os.O_RDONLY)
    found = MetadataWriteback.open_for(fd)
    os.close(fd)
    yield found
    if found is not None:
        found.close()


def n_written(root: Path) -> int:
    """Requests to write that the device has ended."""
    return int(Path(device_directory(root.stat().st_dev), "stat").read_text().split()[4])


def commit(root: Path) -> None:
    fd = os.open(root, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def test_what_a_commit_left_is_written_when_it_is_begun() -> None:
    with loop_volume("ext4", mount_options=["commit=3600"]) as root, writeback_of(root) as writeback:
        assert writeback is not None
        for number in range(500):
            (root / f"file{number}").touch()
        sync(root)
        for number in range(500):
            (root / f"file{number}").unlink()
        commit(root)
        before = n_written(root)
        writeback.begin()
        until(lambda: n_written(root) > before)


def test_who_is_late_finds_it_closed() -> None:
    with loop_volume("ext4") as root, writeback_of(root) as writeback:
        assert writeback is not None
        before = len(open_fds())
        writeback.close()
        writeback.begin()
        assert len(open_fds()) == before - 1


@pytest.mark.parametrize("fs_type", ["xfs", "btrfs"])
def test_others_write_theirs_by_themselves(fs_type: str) -> None:
    with loop_volume(fs_type) as root, writeback_of(root) as writeback:
        assert writeback is None


def test_what_has_no_device_has_nothing_to_write() -> None:
    with tmpfs_volume() as root, writeback_of(root) as writeback:
        assert writeback is None


def test_a_device_that_may_not_be_opened_is_left_alone() -> None:
    """As in a unit with PrivateDevices."""
    with loop_volume("ext4") as root:
        os.setegid(65534)
        os.seteuid(65534)
        try:
            with writeback_of(root) as writeback:
                assert writeback is None
        finally:
            os.seteuid(0)
            os.setegid(0)
