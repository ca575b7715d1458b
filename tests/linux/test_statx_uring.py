"""Looks at many names at a time find what one look after the other finds; what hangs keeps no other waiting."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.core.inode_attributes import Attributes
from fusefs.linux.fd import Fd
from fusefs.linux.statx import look_at, peek, peek_closely
from fusefs.linux.statx_uring import DEPTH, Peeked, StatxUring, are_possible
from tests.support.acls import ACCESS, GROUP_OBJ, NOBODY, OTHER, USER_OBJ, acl
from tests.support.fuse_slow import slow_volume
from tests.support.many_files import fill
from tests.support.real_filesystems import tmpfs_volume
from tests.support.seccomp import printed_without_uring

pytestmark = pytest.mark.needs("root", "uring")

N = 500
N_AT_A_TIME = 4
LIMIT_S = 10.0
Found = Peeked | None
ACL = ACCESS.encode()
XATTRS = [ACL, b"user.a", b"user.empty", b"user.missing"]


@pytest.fixture
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


@contextmanager
def peeking(n: int = N_AT_A_TIME, *, has_handles: bool = True) -> Iterator[tuple[StatxUring[bytes], Fd]]:
    with (
        Fd(os.eventfd(0, os.EFD_CLOEXEC)) as bell,
        StatxUring[bytes](bell, n, asked_of, has_handles=has_handles) as peeks,
    ):
        yield peeks, bell


def asked_of(seen: Attributes) -> list[bytes]:
    """A pipe has no user attributes."""
    return [ACL] if stat.S_ISFIFO(seen.mode) else XATTRS


def look(
    peeks: StatxUring[bytes], dir_fd: int, names: Iterable[bytes], *, is_close: bool = False
) -> dict[bytes, Found]:
    """What is found of some names, as many at a time as there is room for."""
    found: dict[bytes, Found] = {}
    left = list(names)
    while left or peeks.n_under_way:
        while left and peeks.has_room():
            name = left.pop()
            peeks.begin(dir_fd, name, name, is_close=is_close)
        found |= peeks.ended(LIMIT_S)
    return found


def make_all_kinds(top: Path) -> None:
    (top / "file").write_bytes(b"content")
    (top / "directory").mkdir()
    (top / "link").symlink_to("file")
    (top / "dangling").symlink_to("nowhere")
    os.mkfifo(top / "fifo")
    os.mknod(top / "device", 0o020600, os.makedev(1, 3))
    (top / ("n" * 255)).touch()
    Path(os.fsdecode(bytes(top) + b"/\xff new\nline")).touch()


def test_all_kinds_are_found_as_by_one_look(volume: Path) -> None:
    make_all_kinds(volume)
    with Fd(os.open(volume, os.O_PATH)) as fd, peeking() as (peeks, _):
        names = os.listdir(bytes(volume))
        assert look(peeks, fd, names) == {name: (*peek(fd, name), {}) for name in names}


@pytest.mark.parametrize("has_handles", [True, False])
def test_xattrs_of_all_kinds_are_found_as_one_by_one(volume: Path, *, has_handles: bool) -> None:
    make_all_kinds(volume)
    for name in ("file", "directory"):
        os.setxattr(volume / name, ACCESS, acl((USER_OBJ, 6, NOBODY), (GROUP_OBJ, 4, NOBODY), (OTHER, 4, NOBODY)))
        os.setxattr(volume / name, "user.a", b"\0value" * 100)
        os.setxattr(volume / name, "user.empty", b"")
    with Fd(os.open(volume, os.O_PATH)) as fd, peeking(has_handles=has_handles) as (peeks, _):
        names = os.listdir(bytes(volume))
        for found_name, found in look(peeks, fd, names, is_close=True).items():
            seen, handle, answers = peek_closely(fd, found_name, asked_of)
            assert found == (seen, handle if has_handles else b"", answers)


def test_an_xattr_that_is_too_long_is_told_to_be(volume: Path) -> None:
    (volume / "file").touch()
    os.setxattr(volume / "file", "user.a", b"x" * 2000)
    with Fd(os.open(volume, os.O_PATH)) as fd, peeking() as (peeks, _):
        found = look(peeks, fd, [b"file"], is_close=True)[b"file"]
        assert found is not None
        assert found[2][b"user.a"] == errno.ERANGE


def test_without_handles_attributes_alone_are_found(volume: Path) -> None:
    make_all_kinds(volume)
    with Fd(os.open(volume, os.O_PATH)) as fd, peeking(has_handles=False) as (peeks, _):
        names = os.listdir(bytes(volume))
        assert look(peeks, fd, names) == {name: (look_at(fd, name), b"", {}) for name in names}


@pytest.mark.parametrize("name", [b"missing", b"n" * 256, b"n" * 10_000, b""], ids=["missing", "256", "10000", "empty"])
@pytest.mark.parametrize("has_handles", [True, False])
def test_what_can_not_be_looked_at_is_told(volume: Path, name: bytes, *, has_handles: bool) -> None:
    with Fd(os.open(volume, os.O_PATH)) as fd, peeking(has_handles=has_handles) as (peeks, _):
        assert look(peeks, fd, [name]) == {name: None}


@pytest.mark.parametrize("is_close", [True, False])
def test_many_more_than_there_are_places_are_found_and_no_fd_stays(volume: Path, *, is_close: bool) -> None:
    fill(volume / "flat", N)
    with Fd(os.open(volume / "flat", os.O_PATH)) as fd, peeking() as (peeks, _):
        before = len(os.listdir("/proc/self/fd"))
        names = os.listdir(bytes(volume / "flat"))
        answers = dict.fromkeys(XATTRS, errno.ENODATA) if is_close else {}
        expected = {name: (*peek(fd, name), answers) for name in names}
        assert look(peeks, fd, names, is_close=is_close) == expected
        assert len(os.listdir("/proc/self/fd")) == before


def test_there_is_room_for_some_more_than_are_at_work(volume: Path) -> None:
    with Fd(os.open(volume, os.O_PATH)) as fd, peeking() as (peeks, _):
        for n in range(DEPTH * N_AT_A_TIME):
            assert peeks.has_room()
            assert peeks.n_under_way == n
            peeks.begin(fd, b"x", b"x")
        assert not peeks.has_room()
        assert look(peeks, fd, []) == {b"x": None}


def test_the_bell_ends_the_wait() -> None:
    with peeking() as (peeks, bell):
        for _ in range(3):
            os.eventfd_write(bell, 1)
            assert peeks.ended() == []


def test_the_wait_ends_with_its_time() -> None:
    with peeking() as (peeks, _):
        assert peeks.ended(0.001) == []


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("ttl_s", [0, 1])
def test_no_more_are_asked_at_a_time_than_may_be(volume: Path, ttl_s: float) -> None:
    """Though the filesystem has to be asked twice where what it tells is not to be believed."""
    fill(volume / "flat", N)
    with slow_volume(volume, ttl_s=ttl_s) as slow, Fd(os.open(slow.path / "flat", os.O_PATH)) as fd:
        slow.forget_max()
        with peeking() as (peeks, _):
            found = look(peeks, fd, os.listdir(bytes(volume / "flat")), is_close=True)
        assert len(found) == N
        assert None not in found.values()
        assert N_AT_A_TIME / 2 <= slow.max_under_way <= N_AT_A_TIME


@pytest.mark.needs("fuse")
def test_what_hangs_keeps_no_other_waiting(volume: Path) -> None:
    fill(volume / "flat", N)
    names = os.listdir(bytes(volume / "flat"))
    with slow_volume(volume, delay_us=0) as slow, Fd(os.open(slow.path / "flat", os.O_PATH)) as fd:
        hung = max(names, key=len)
        slow.hang(os.fsdecode(hung))
        with peeking() as (peeks, _):
            peeks.begin(fd, hung, hung)
            found: dict[bytes, Found] = {}
            for name in names:
                if name != hung:
                    peeks.begin(fd, name, name)
                while not peeks.has_room() or (name == names[-1] and len(found) < N - 1):
                    found |= peeks.ended(LIMIT_S)
            assert found.keys() == set(names) - {hung}
            slow.go_on()
            assert look(peeks, fd, [])[hung] is not None


def test_they_are_possible_here() -> None:
    assert are_possible()


def test_they_are_not_where_io_uring_is_denied() -> None:
    assert printed_without_uring("from fusefs.linux.statx_uring import are_possible\nprint(are_possible())") == "False"
