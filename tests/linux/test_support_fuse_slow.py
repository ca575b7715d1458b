"""The slow filesystem is slow as it is told, many requests at a time, and an honest filesystem otherwise."""

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from fusefs.linux.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE
from tests.support.fuse_slow import SlowVolume, Xattrs, slow_volume
from tests.support.make_trees import make_tree, snapshot
from tests.support.open_files import held
from tests.support.oracle_subjects import Native, Story, Subject
from tests.support.other_users import as_user
from tests.support.real_filesystems import mount_of, tmpfs_volume

pytestmark = pytest.mark.needs("root", "fuse")

N = 64
HOUR_US = 3600 * 10**6


@contextmanager
def _volume(ttl_s: float = 1.0, *, xattrs: Xattrs = Xattrs.ALL) -> Iterator[SlowVolume]:
    with tmpfs_volume() as source, slow_volume(source, 0, ttl_s, xattrs=xattrs, limit_s=30) as slow:
        yield slow


def _took_s(call: Callable[..., object], *args: object) -> float:
    began = time.monotonic()
    call(*args)
    return time.monotonic() - began


def test_lookup_takes_the_delay_which_is_changed_at_run_time() -> None:
    with tmpfs_volume() as source, slow_volume(source, 20_000) as slow:
        (source / "x").touch()
        assert _took_s(os.stat, slow.path / "x") >= 0.02
        (source / "y").touch()
        slow.delay(40_000)
        assert _took_s(os.stat, slow.path / "y") >= 0.04


def test_only_lookup_and_getattr_take_the_delay_unless_all_shall() -> None:
    with _volume() as slow, (slow.path / "x").open("wb", buffering=0) as file:
        before = slow.n_messages
        slow.delay(HOUR_US)
        os.fsync(file.fileno())
        slow.delay(20_000)
        slow.delay_all()
        assert _took_s(os.fsync, file.fileno()) >= 0.02
        assert slow.n_messages["fsync"] == before.get("fsync", 0) + 2


def test_kernel_believes_names_and_attributes_for_their_time() -> None:
    with _volume(ttl_s=60) as slow:
        (slow.backing / "x").touch()
        with held(slow.path / "x"):
            os.stat(slow.path / "x")
            asked = slow.n_messages
            os.stat(slow.path / "x")
            assert slow.n_messages == asked


def test_kernel_asks_each_time_where_nothing_is_to_be_believed() -> None:
    with _volume(ttl_s=0) as slow:
        (slow.backing / "x").touch()
        for _ in range(3):
            os.stat(slow.path / "x")
        assert slow.n_messages["lookup"] == 3


def test_many_requests_are_under_way_at_a_time() -> None:
    with _volume() as slow, ThreadPoolExecutor(N) as threads:
        slow.hang("f")
        answers = [threads.submit(os.path.exists, slow.path / f"f{number}") for number in range(N)]
        slow.wait_until_hung(N)
        assert slow.n_under_way == slow.max_under_way == N
        slow.go_on()
        assert not any(answer.result() for answer in answers)
        assert slow.n_under_way == 0


def test_what_hangs_goes_on_when_it_may_and_nothing_else_waits() -> None:
    with _volume() as slow, ThreadPoolExecutor(1) as threads:
        make_tree(slow.backing / "t", {"stuck": "1", "free": "2"})
        slow.hang("stuck")
        answer = threads.submit((slow.path / "t/stuck").read_text)
        slow.wait_until_hung()
        assert (slow.path / "t/free").read_text() == "2"
        assert not answer.done()
        slow.go_on()
        assert answer.result() == "1"


def test_inode_hangs_by_the_name_that_it_has_now() -> None:
    with _volume(ttl_s=0) as slow, ThreadPoolExecutor(1) as threads:
        fd = os.open(slow.path / "x", os.O_CREAT | os.O_RDWR)
        (slow.path / "x").rename(slow.path / "renamed")
        slow.hang("renamed")
        answer = threads.submit(os.fstat, fd)
        slow.wait_until_hung()
        slow.go_on()
        answer.result()
        os.close(fd)


def test_abort_ends_what_hangs_and_the_daemon() -> None:
    with _volume() as slow, ThreadPoolExecutor(1) as threads:
        slow.hang("x")
        answer = threads.submit(os.stat, slow.path / "x")
        slow.wait_until_hung()
        daemon = os.pidfd_open(slow.fuse.pid)
        slow.fuse.abort()
        with pytest.raises(ConnectionAbortedError):
            answer.result()
        os.waitid(os.P_PIDFD, daemon, os.WEXITED | os.WNOWAIT)
        os.close(daemon)


def test_end_leaves_neither_mount_nor_process_though_somebody_hangs() -> None:
    with tmpfs_volume() as source:
        with slow_volume(source) as slow:
            slow.hang("x")
            client = subprocess.Popen(["stat", slow.path / "x"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            slow.wait_until_hung()
        assert mount_of(slow.path) is None
        assert not slow.path.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(slow.fuse.pid, 0)
        assert client.wait(10) == 1


def _work(subject: Subject) -> list[str]:
    """What it answers to a bit of everything."""
    tell = Story()
    tell(subject.mkdir, b"d", 0o2755)
    tell(subject.put, b"d/f", b"text" * 50_000)
    tell(subject.mknod, b"d/pipe", 0o010_640)
    tell(subject.symlink, b"f", b"d/link")
    tell(subject.readlink, b"d/link")
    tell(subject.link, b"d/f", b"d/same")
    tell(subject.link, b"d/link", b"d/same link")
    tell(subject.chmod, b"d/f", 0o4711)
    tell(subject.chown, b"d/link", 12001, 12002)
    tell(subject.chown, b"d/f", 12001, 12002)
    tell(subject.utime, b"d/f", 1, 2)
    tell(subject.utime, b"d/link", 3, 4)
    tell(subject.times, b"d/f")
    tell(subject.times, b"d/link")
    tell(subject.truncate, b"d/f", 12_345)
    tell(subject.setxattr, b"d/f", "user.a", b"1")
    tell(subject.setxattr, b"d/f", "user.a", b"2", os.XATTR_CREATE)
    tell(subject.setxattr, b"d/f", "user.b", b"3")
    tell(subject.setxattr, b"d/link", "trusted.c", b"4")
    tell(subject.getxattr, b"d/f", "user.a")
    tell(subject.getxattr, b"d/link", "trusted.c")
    tell(subject.listxattr, b"d/f")
    tell(subject.removexattr, b"d/f", "user.b")
    tell(subject.getxattr, b"d/f", "user.b")
    tell(subject.mkdir, b"e")
    tell(subject.rename, b"d/same", b"e/moved")
    tell(subject.rename, b"e/moved", b"d/f", RENAME_NOREPLACE)
    tell(subject.rename, b"d", b"e", RENAME_EXCHANGE)
    tell(subject.rmdir, b"e")
    tell(subject.unlink, b"e/same link")
    tell(subject.unlink, b"e/missing")
    tell(subject.tree)
    tell(subject.statvfs)
    return tell.told


def test_answers_are_those_of_the_filesystem_below() -> None:
    with tmpfs_volume() as native, _volume() as slow:
        assert _work(Native("slow", slow.path)) == _work(Native("native", native))


def test_removed_file_is_there_for_who_has_it_open() -> None:
    with _volume(ttl_s=0) as slow:
        fd = os.open(slow.path / "x", os.O_CREAT | os.O_RDWR)
        (slow.path / "x").unlink()
        os.write(fd, b"text")
        assert (os.fstat(fd).st_nlink, os.fstat(fd).st_size, os.pread(fd, 9, 0)) == (0, 4, b"text")
        os.close(fd)


def test_listing_is_plain_and_complete_whatever_its_length() -> None:
    with _volume() as slow:
        names = {f"a rather long name of a file, number {number}" for number in range(3000)}
        make_tree(slow.backing / "t", dict.fromkeys(names, ""))
        with os.scandir(slow.path / "t") as entries:
            listed = {entry.name: entry.inode() for entry in entries}
        assert listed == {entry.name: entry.inode() for entry in os.scandir(slow.backing / "t")}
        assert set(listed) == names
        assert slow.n_messages["lookup"] == 1  # of the directory
        fd = os.open(slow.path / "t", os.O_RDONLY)
        assert os.listdir(fd) == os.listdir(fd) == list(listed), "it goes on where one seeks"
        os.close(fd)


def test_no_xattrs_where_there_are_none() -> None:
    with _volume(xattrs=Xattrs.NONE) as slow:
        (slow.path / "x").touch()
        for call in (
            os.listxattr,
            lambda path: os.getxattr(path, "user.a"),
            lambda path: os.setxattr(path, "user.a", b""),
        ):
            with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
                call(slow.path / "x")


def test_xattrs_of_directories_alone() -> None:
    with _volume(xattrs=Xattrs.DIRECTORIES) as slow:
        (slow.path / "x").touch()
        os.setxattr(slow.path, "user.a", b"1")
        assert os.getxattr(slow.path, "user.a") == b"1"
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            os.setxattr(slow.path / "x", "user.a", b"1")


def test_who_knows_of_no_xattrs_is_asked_once() -> None:
    with _volume(xattrs=Xattrs.UNKNOWN) as slow:
        for _ in range(3):
            with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
                os.getxattr(slow.path, "user.a")
        assert slow.n_messages["getxattr"] == 1


def test_xattrs_that_root_alone_is_told_of() -> None:
    def other() -> None:
        with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
            os.getxattr(slow.path, "user.a")

    with _volume(xattrs=Xattrs.ALL | Xattrs.FOR_ROOT) as slow:
        os.setxattr(slow.path, "user.a", b"1")
        assert os.getxattr(slow.path, "user.a") == b"1"
        as_user(1000, other)


def test_user_makes_what_is_his_and_no_more_than_he_may() -> None:
    def work() -> None:
        os.umask(0o027)
        (home / "d").mkdir()
        (home / "f").write_text("1")
        with pytest.raises(PermissionError):
            (home.parent / "foreign").mkdir()

    with _volume() as slow:
        home = slow.path / "home"
        home.mkdir()
        os.chown(home, 12001, 12001)
        as_user(12001, work)
        made = [
            (entry.name, entry.mode & 0o7777, entry.uid, entry.gid) for entry in snapshot(slow.backing / "home")[1:]
        ]
        assert made == [(b"d", 0o750, 12001, 12001), (b"f", 0o640, 12001, 12001)]


def test_write_by_a_user_takes_the_suid_bit_away() -> None:
    def work() -> None:
        with (slow.path / "f").open("r+b", buffering=0) as file:
            file.write(b"1")

    with _volume() as slow:
        (slow.path / "f").touch()
        os.chown(slow.path / "f", 12001, 12001)
        (slow.path / "f").chmod(0o4755)
        as_user(12001, work)
        assert (slow.path / "f").stat().st_mode & 0o7777 == (slow.backing / "f").stat().st_mode & 0o7777 == 0o755
