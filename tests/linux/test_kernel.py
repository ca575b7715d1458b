"""Calls that some filesystem answers oddly: a listing again, a file without a name, a directory that moved."""

import errno
import os
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from fusefs.linux.batched_calls import rename_all_free
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from tests.support.fuse_slow import slow_volume
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import raw


def scanned(kernel: Kernel, fd: Fd) -> list[bytes]:
    """The names, one by one."""
    with kernel.scan(fd) as entries:
        return sorted(os.fsencode(entry.name) for entry in entries)


@pytest.mark.needs("root", "loop")
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


@pytest.mark.needs("root", "loop")
def test_a_directory_that_was_removed_is_told_as_such_by_ext4() -> None:
    """It says EPERM, as of what is forbidden. Other filesystems make the file; no name can be given to it."""
    with loop_volume("ext4") as volume:
        directory = volume / "gone"
        directory.mkdir()
        with Fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            directory.rmdir()
            with pytest.raises(FileNotFoundError):
                Kernel().create_unnamed(fd)


@pytest.mark.needs("root", "loop")
def test_a_directory_that_is_immutable_forbids_them() -> None:
    with loop_volume("ext4") as volume:
        directory = volume / "kept"
        directory.mkdir()
        subprocess.run(["chattr", "+i", directory], check=True)
        with Fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as fd, pytest.raises(PermissionError):
            Kernel().create_unnamed(fd)
        subprocess.run(["chattr", "-i", directory], check=True)


LONG_S = 600.0


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
                    os.rename("tree", "tree", src_dir_fd=there, dst_dir_fd=to)
                assert raised.value.errno == errno.ESTALE
            ours(there, to)
        finally:
            for fd in (held, there, to):
                os.close(fd)
    assert (tmp_path / "to/tree").is_dir()
