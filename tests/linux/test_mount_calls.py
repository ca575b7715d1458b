"""Calls that mount: what a clone shows and what not, what a link is, and whose name a FUSE mount has."""

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fusefs.linux import mount_calls
from fusefs.linux.fd import Fd
from tests.support.real_filesystems import mount_of, mounts, tmpfs_volume, unmount

pytestmark = pytest.mark.needs("root")


@pytest.fixture
def volume() -> Iterator[Path]:
    with ExitStack() as stack:
        base, path = stack.enter_context(tmpfs_volume()), stack.enter_context(tmpfs_volume())
        (path / "file").write_text("content")
        (path / "inside").mkdir()
        (base / "clone").mkdir()
        (path / "base").symlink_to(base)
        yield path
        for entry in mounts():
            if entry.mount_point == os.fsencode(base / "clone"):
                unmount(entry.mount_point)


def clone(volume: Path) -> Path:
    """Mount a private clone of it elsewhere."""
    target = (volume / "base").resolve() / "clone"
    with (
        Fd(os.open(volume, os.O_PATH)) as dir_fd,
        mount_calls.clone_tree(dir_fd) as mount_fd,
        Fd(os.open(target, os.O_PATH)) as target_fd,
    ):
        mount_calls.make_private(mount_fd)
        mount_calls.move_mount(mount_fd, target_fd)
    return target


def test_a_clone_of_a_directory_shows_nothing_above_it(volume: Path) -> None:
    target = (volume / "base").resolve() / "clone"
    (volume / "inside/deep").touch()
    with (
        Fd(os.open(volume / "inside", os.O_PATH)) as dir_fd,
        mount_calls.clone_tree(dir_fd) as mount_fd,
        Fd(os.open(target, os.O_PATH)) as target_fd,
    ):
        mount_calls.move_mount(mount_fd, target_fd)
    assert os.listdir(target) == ["deep"]


def test_a_clone_leaves_out_what_is_mounted_inside(volume: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", volume / "inside"], check=True)
    (volume / "inside/hidden").touch()
    assert os.listdir(clone(volume) / "inside") == []
    unmount(volume / "inside")


def test_a_private_clone_is_not_covered_with_the_original(volume: Path) -> None:
    subprocess.run(["mount", "--make-shared", volume], check=True)
    target = clone(volume)
    subprocess.run(["mount", "-t", "tmpfs", "cover", volume], check=True)
    assert os.listdir(volume) == []
    assert (target / "file").read_text() == "content"
    unmount(volume)


def test_unmount_does_not_follow_a_link(volume: Path) -> None:
    link = volume / "link"
    link.symlink_to(clone(volume))
    with pytest.raises(OSError, match="Invalid argument") as caught:
        mount_calls.unmount(os.fsencode(link))
    assert caught.value.errno == errno.EINVAL


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("source", [b"/plain", b"/with, comma\\ and \xc3\xa9 \xff"])
def test_a_fuse_mount_has_the_source_that_it_was_given(volume: Path, source: bytes) -> None:
    target = volume / "inside"
    with mount_calls.open_fuse() as fd, Fd(os.open(target, os.O_PATH)) as target_fd:
        data = f"fd={int(fd)},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0".encode()
        mount_calls.mount(source, target_fd, b"fuse.trashd", mount_calls.MS_NOSUID, data)
        entry = mount_of(target)
        mount_calls.unmount(os.fsencode(target), mount_calls.MNT_DETACH)
    assert entry is not None
    assert (entry.fs_type, entry.source) == ("fuse.trashd", source)
    assert "nosuid" in entry.options


@pytest.mark.needs("fuse")
def test_the_fuse_mount_is_made_where_the_fd_is_not_where_its_path_leads(volume: Path) -> None:
    target = volume / "inside"
    with mount_calls.open_fuse() as fd, Fd(os.open(target, os.O_PATH)) as target_fd:
        target.rename(volume / "moved")
        target.mkdir()
        data = f"fd={int(fd)},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0".encode()
        mount_calls.mount(b"source", target_fd, b"fuse.trashd", 0, data)
        assert mount_of(target) is None
        mount_calls.unmount(os.fsencode(volume / "moved"), mount_calls.MNT_DETACH)
