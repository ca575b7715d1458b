"""A listing that is asked for again: the kernel is told what it does not know yet, and keeps what it believes.

It asks again after each change in a directory, and when memory is short: it has lost a page of it then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fusefs.core.metadata_cache import ROOT
from fusefs.linux.fd import Fd
from fusefs.mount.native._core import Node
from fusefs.mount.tree.vfs import Vfs
from tests.support.acls import ACCESS, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, fresh_mount
from tests.support.open_files import held
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.vfs_without_mount import DirectoryRequests, Names, vfs_at

pytestmark = [
    pytest.mark.needs("root", "fuse", "loop"),
    pytest.mark.takes_engine,
]

N_FILES = 1000
"""More than one answer takes."""
FEW = N_FILES // 20
"""What memory that is short costs meanwhile."""
HOUR_S, SECOND_S = 3600.0, 1.0
ACL = acl((USER_OBJ, 6, NOBODY), (USER, 6, 1000), (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 4, NOBODY))


@pytest.fixture(scope="module", params=["tmpfs", "ext4", "pages"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """pages: the kernel keeps those of files itself."""
    options = ("coherence=exclusive", f"passthrough={'off' if request.param == 'pages' else 'auto'}")
    made = loop_volume("ext4", 256) if request.param == "ext4" else tmpfs_volume()
    with fresh_mount(*options, made=made, limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def directory(mount: Mounted, own_name: str) -> Path:
    """That was listed with all that `ls -l` asks for, and is in use."""
    (mount.backing / own_name).mkdir()
    for number in range(N_FILES):
        (mount.backing / own_name / f"{number}").touch()
    list_long(mount.path / own_name)
    return mount.path / own_name


def list_long(path: Path) -> dict[str, tuple[object, ...]]:
    """What `ls -l` tells."""
    return {entry.name: told_of(path / entry.name, entry.inode()) for entry in os.scandir(path)}


def told_of(path: Path, number: int) -> tuple[object, ...]:
    seen = path.lstat()
    assert seen.st_ino == number
    value = None
    with suppress(OSError):
        value = os.getxattr(path, ACCESS, follow_symlinks=False)
    times = seen.st_mtime_ns, seen.st_ctime_ns
    return seen.st_mode, seen.st_nlink, seen.st_uid, seen.st_gid, seen.st_size, *times, value


def lose_pages(directory: Path) -> None:
    """As if memory was short."""
    with Fd(os.open(directory, os.O_RDONLY)) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def make_one(directory: Path) -> None:
    (directory / "new").touch()


def replace_one(directory: Path) -> None:
    (directory / "1").rename(directory / "2")


@pytest.mark.parametrize("change", [lose_pages, make_one, replace_one])
def test_only_names_are_asked_for_again(mount: Mounted, directory: Path, change: Callable[[Path], None]) -> None:
    with held(directory):
        change(directory)
        before = mount.n_asked("getxattr", "getattr", "lookup"), mount.n_asked("readdir")
        listed = list_long(directory)
        assert mount.n_asked("readdir") > before[1]
        assert mount.n_asked("getxattr", "getattr", "lookup") - before[0] < FEW
    assert listed == list_long(mount.backing / directory.name)


def change_all(directory: Path) -> None:
    """Each thing that a listing tells, of some."""
    part = N_FILES // 10
    for number in range(part):
        file = directory / str(number)
        file.chmod(0o600 if number % 2 else 0o4755)
        (directory / str(part + number)).write_text("text")
        os.truncate(directory / str(2 * part + number), number)
        (directory / f"link-{number}").hardlink_to(directory / str(3 * part + number))
        os.setxattr(directory / str(4 * part + number), ACCESS, ACL)
        (directory / str(5 * part + number)).rename(directory / f"moved-{number}")
        (directory / str(6 * part + number)).unlink()
        (directory / str(6 * part + number)).symlink_to("nowhere")
        os.utime(directory / str(7 * part + number), (number, number))
        os.chown(directory / str(8 * part + number), 1000, 1000)


def test_what_has_changed_is_told(mount: Mounted, directory: Path) -> None:
    with held(directory):
        change_all(directory)
        for change in (lose_pages, make_one):
            change(directory)
            assert list_long(directory) == list_long(mount.backing / directory.name)


def test_what_is_written_between_two_listings_has_its_size_in_each(mount: Mounted, directory: Path) -> None:
    with held(directory), Fd(os.open(directory / "7", os.O_RDWR)) as fd:
        for size in range(1, 5):
            os.write(fd, b"x")
            lose_pages(directory)
            assert list_long(directory)["7"][4] == size
    with Fd(os.open(directory / "7", os.O_WRONLY | os.O_APPEND)) as fd:
        os.write(fd, b"x")
    lose_pages(directory)
    assert list_long(directory) == list_long(mount.backing / directory.name)


def test_what_replaces_a_file_behind_the_mount_is_told_when_names_are_read_again(
    mount: Mounted, directory: Path
) -> None:
    """It has another inode number."""
    with held(directory):
        (mount.backing / directory.name / "new").write_text("text")
        (mount.backing / directory.name / "new").rename(mount.backing / directory.name / "5")
        lose_pages(directory)
        assert list_long(directory)["5"][4] == len("text")


def is_listed_in_full(vfs: Vfs) -> bool:
    """Whether a listing of the only file sends more than its name, of which the kernel then has a reference."""
    return any(one.entry.nodeid for one in DirectoryRequests(vfs).entries(ROOT))


@pytest.fixture(params=[HOUR_S, SECOND_S], ids=["hour", "second"])
def listed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Vfs, float]]:
    """A directory without a mount, with one file, that was listed; and for how long the kernel caches what it is."""
    (tmp_path / "file").touch()
    with vfs_at(tmp_path, timeout_s=request.param) as vfs:
        assert is_listed_in_full(vfs)
        yield vfs, request.param


def the_file(vfs: Vfs) -> Node:
    (node,) = (node for node in vfs.nodes if node is not vfs.nodes.root)
    return node


def test_what_the_kernel_has_cached_for_long_comes_once(listed: tuple[Vfs, float]) -> None:
    vfs, cached_s = listed
    assert is_listed_in_full(vfs) == (cached_s == SECOND_S)


def test_what_is_not_cached_for_much_longer_comes_again(listed: tuple[Vfs, float]) -> None:
    vfs, _cached_s = listed
    the_file(vfs).told_until_s = time.monotonic() + SECOND_S / 2
    assert is_listed_in_full(vfs)


def test_what_is_forgotten_comes_again(listed: tuple[Vfs, float]) -> None:
    vfs, _cached_s = listed
    Names(vfs).forget(the_file(vfs).nodeid, 2)
    assert is_listed_in_full(vfs)
