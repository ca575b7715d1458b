"""What goes wrong below is told as it is, and ends when it ends: full, over quota, failing, shut down, unmounted."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.foreground_mount import fresh_mount, trashd_mount, until
from tests.support.fuse_eio import broken_volume
from tests.support.open_files import errno_of
from tests.support.real_filesystems import full, loop_volume

pytestmark = pytest.mark.needs("root", "fuse", "loop")

_EXT4_IOC_SHUTDOWN = 0x8004587D
_WITHOUT_LOG = struct.pack("=I", 2)
MIB = 1 << 20


def write_until_refused(path: Path) -> tuple[int, int]:
    """The errno that ends it, and how long the file is then."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while not (number := errno_of(lambda: os.write(fd, bytes(MIB)))):
            pass
        return number, os.fstat(fd).st_size
    finally:
        os.close(fd)


def changes(top: Path) -> dict[str, Callable[[], object]]:
    """One of each kind of change."""
    return {
        "open": (top / "new").touch,
        "mkdir": (top / "directory").mkdir,
        "symlink": lambda: (top / "link").symlink_to("x" * 200),
        "mkfifo": lambda: os.mkfifo(top / "fifo"),
        "rename": lambda: (top / "old").rename(top / "renamed"),
        "setxattr": lambda: os.setxattr(top / "old", "user.a", bytes(2000)),
        "unlink": (top / "old").unlink,
    }


def test_full_volume_refuses_what_it_refuses_below_and_takes_more_when_there_is_room() -> None:
    with loop_volume("ext4", 32) as volume:
        for name in ("source", "twin"):
            (volume / name).mkdir()
            (volume / name / "old").touch()
        with trashd_mount(volume / "source") as mounted:
            with full(volume):
                here, there = changes(mounted.path), changes(volume / "twin")
                answers = {name: errno_of(here[name]) for name in here}
                assert answers == {name: errno_of(there[name]) for name in there}
                assert answers["mkdir"] == errno.ENOSPC
                assert errno_of(lambda: (mounted.path / "big").write_bytes(bytes(MIB))) == errno.ENOSPC
            number, size = write_until_refused(mounted.path / "log")
            assert number == errno.ENOSPC
            assert (mounted.backing / "log").stat().st_size == size > MIB
            (mounted.path / "log").unlink()
            # The last handle's release, and the blocks with it, may come after the unlink.
            assert until(lambda: errno_of(lambda: (mounted.path / "log").write_bytes(bytes(MIB))) == 0)


def test_io_error_in_the_middle_is_told_and_the_rest_goes_on() -> None:
    with broken_volume() as broken:
        for name in ("unlink-a", "file"):
            (broken.backing / name).touch()
        for name in ("rmdir-a", "opendir-a", "readdir-a"):
            (broken.backing / name).mkdir()
        for number in range(50):
            (broken.backing / "readdir-a" / f"{number}").touch()
        with trashd_mount(broken.path, broken.path.parent / "shown") as mounted:
            for act in (
                (mounted.path / "unlink-a").unlink,
                (mounted.path / "rmdir-a").rmdir,
                lambda: os.listdir(mounted.path / "opendir-a"),
                lambda: os.listdir(mounted.path / "readdir-a"),
            ):
                assert errno_of(act) == errno.EIO
            (mounted.path / "file").unlink()
            assert not (broken.backing / "file").exists()


def test_filesystem_that_is_shut_down_gives_its_errors_and_the_daemon_stays() -> None:
    with fresh_mount(made=loop_volume("ext4", 32)) as mounted:
        (mounted.backing / "old").write_text("content")
        with (mounted.path / "old").open("rb+", buffering=0) as old:
            root = os.open(mounted.backing, os.O_RDONLY)
            fcntl.ioctl(root, _EXT4_IOC_SHUTDOWN, _WITHOUT_LOG)
            os.close(root)
            assert errno_of(lambda: old.write(b"new")) == errno.EIO
            assert errno_of(lambda: os.fsync(old.fileno())) == errno.EIO
        for name, act in changes(mounted.path).items():
            assert errno_of(act) in (errno.EIO, errno.EROFS), name
        assert Path(f"/proc/{mounted.pid}").exists()


def test_backing_filesystem_unmounted_under_it_lives_as_long_as_the_mount(tmp_path: Path) -> None:
    with loop_volume("ext4", 32) as volume, trashd_mount(volume / "source", tmp_path / "shown") as mounted:
        subprocess.run(["umount", "--lazy", volume], check=True)
        (mounted.path / "file").write_text("content")
        assert (mounted.path / "file").read_text() == "content"
        assert os.listdir(volume) == []
