"""The volumes of the tests are what they say, and leave nothing behind."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.support.foreground_mount import until
from tests.support.fuse_bad_rename import RENAME_EXCHANGE, RENAME_NOREPLACE, lying_volume, renameat2
from tests.support.fuse_watchdog import fuse_mount
from tests.support.other_users import as_user
from tests.support.real_filesystems import (
    ON_DISK,
    Project,
    Unsupported,
    btrfs_subvolume,
    full,
    limit_project,
    loop_volume,
    mount_of,
    mounts,
    project_of,
    project_quota_volume,
    set_project,
    tmpfs_volume,
)
from tests.support.sshfs_volumes import sshfs_volume

USER = 12001


class _Boom(Exception):
    """The body of a `with` raises it."""


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = {entry.mount_id for entry in mounts() if entry.fs_type != "fusectl"}
    yield
    assert {entry.mount_id for entry in mounts() if entry.fs_type != "fusectl"} == before


def _errno_of(function: Callable[[], object]) -> str | None:
    try:
        function()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


def _text_of(path: Path) -> str:
    """What a file holds; nothing if there is none any more."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _rename(old: Path, new: Path) -> Callable[[], object]:
    return lambda: old.rename(new)


@pytest.mark.needs("root", "loop")
@pytest.mark.parametrize("fs_type", ON_DISK)
def test_loop_volume_goes_with_its_loop_device_even_if_busy_and_raised(fs_type: str) -> None:
    kept = []
    with contextlib.suppress(_Boom), loop_volume(fs_type, mount_options=("noatime",)) as volume:
        entry = mount_of(volume)
        assert entry is not None
        assert (entry.fs_type, "noatime" in entry.options) == (fs_type, True)
        kept.append(os.open(volume, os.O_RDONLY))
        backing = Path("/sys/block", Path(os.fsdecode(entry.source)).name, "loop/backing_file")
        image = backing.read_text()
        raise _Boom
    assert mount_of(volume) is None
    os.close(kept.pop())
    assert until(lambda: _text_of(backing) != image), "the loop device stays"  # its last user was just closed


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


@pytest.mark.needs("root", "loop")
def test_full_of_one_kind_leaves_the_other() -> None:
    with loop_volume("ext4", 16, ("-N", "200")) as volume:
        with full(volume, blocks=False):
            assert os.statvfs(volume).f_ffree == 0
            assert os.statvfs(volume).f_bavail > 1000
        with full(volume, inodes=False, spare_kernel=False):
            assert os.statvfs(volume).f_bfree == 0
            (volume / "empty").write_bytes(b"")


@pytest.mark.needs("root", "btrfs")
def test_full_of_data_leaves_a_btrfs_its_names() -> None:
    with loop_volume("btrfs") as volume, full(volume, inodes=False):
        (volume / "d").mkdir()
        (volume / "d").rename(volume / "e")
        assert _errno_of(partial((volume / "f").write_bytes, bytes(1 << 16))) == "ENOSPC"


@pytest.mark.needs("root", "loop")
@pytest.mark.parametrize("fs_type", [pytest.param("xfs", marks=pytest.mark.needs("xfs")), "ext4"])
def test_project_is_a_wall_for_renames(fs_type: str) -> None:
    try:
        with project_quota_volume(fs_type) as volume:
            _check_project(volume)
    except Unsupported as reason:
        pytest.skip(str(reason))


def _check_project(volume: Path) -> None:
    inside, outside = volume / "inside", volume / "outside"
    inside.mkdir()
    outside.mkdir()
    set_project(inside, 7)
    assert project_of(inside) == Project(7, True)
    (inside / "child").mkdir()
    assert project_of(inside / "child") == Project(7, True)
    assert _errno_of(_rename(outside, inside / "outside")) == "EXDEV"
    set_project(outside, 7, is_inherited=False)
    assert project_of(outside) == Project(7, False)
    assert _errno_of(_rename(outside, inside / "outside")) is None
    try:
        limit_project(volume, 7, size_kib=64)
    except Unsupported:
        return
    inside.chmod(0o777)
    big = partial((inside / "f").write_bytes, bytes(1 << 20))
    assert as_user(USER, partial(_errno_of, big)) in ("EDQUOT", "ENOSPC")  # ext4, xfs


@pytest.mark.needs("root", "btrfs")
def test_subvolume_is_a_wall_for_renames_and_has_a_limit() -> None:
    with loop_volume("btrfs") as volume:
        subvolume = btrfs_subvolume(volume, "sub", limit_bytes=1 << 20)
        (volume / "d").mkdir()
        assert _errno_of(_rename(volume / "d", subvolume / "d")) == "EXDEV"
        assert _errno_of(lambda: (subvolume / "f").write_bytes(bytes(4 << 20))) == "EDQUOT"


@pytest.mark.needs("root", "sshfs")
def test_sshfs_refuses_every_flag() -> None:
    with sshfs_volume() as served:
        for name in "ab":
            (served.path / name).mkdir()
        for flags in (RENAME_EXCHANGE, RENAME_NOREPLACE):
            new = served.path / ("b" if flags == RENAME_EXCHANGE else "c")
            assert _errno_of(partial(renameat2, served.path / "a", new, flags)) == "EINVAL"
        (served.path / "a").rename(served.path / "c")
        assert sorted(os.listdir(served.backing)) == ["b", "c"]


@pytest.mark.needs("root", "fuse")
def test_watchdog_frees_who_waits_for_a_stopped_daemon(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    argv = [sys.executable, "-m", "tests.support.fuse_bad_rename", str(source), str(target)]
    answer: list[str | None] = []

    def wait_for_it() -> None:
        with fuse_mount(argv, target, limit_s=1) as mounted:
            os.kill(mounted.pid, signal.SIGSTOP)
            answer.append(_errno_of((target / "name").stat))

    with pytest.raises(TimeoutError):
        wait_for_it()
    assert answer in (["ECONNABORTED"], ["ENOTCONN"], ["ENOENT"])  # the last: it was unmounted before a wait


@pytest.mark.needs("root", "fuse")
def test_mount_ends_though_the_body_raised_with_a_file_open() -> None:
    files = []
    with contextlib.suppress(_Boom), lying_volume("honest") as served:
        files.append(os.open(served.path / "f", os.O_CREAT | os.O_RDWR))
        raise _Boom
    with pytest.raises(OSError, match="not connected"):
        os.close(files.pop())


@pytest.mark.needs("root", "fuse")
def test_daemon_that_does_not_mount_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 3"), fuse_mount(["sh", "-c", "exit 3"], tmp_path):
        pass
