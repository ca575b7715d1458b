"""inotify as the service uses it: told of names, of the end of what is watched, and holding nothing busy."""

import errno
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.inotify import InotifyEvent, InotifyMask, add_watch, open_inotify, read_events, remove_watch
from tests.support.real_filesystems import tmpfs_volume, unmount

WANTED = InotifyMask.MOVED_TO | InotifyMask.MOVED_FROM | InotifyMask.CREATE | InotifyMask.DELETE


@contextmanager
def opened(path: Path) -> Iterator[Fd]:
    """A directory, as the service opens it."""
    with Fd(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        yield fd


@pytest.fixture
def inotify() -> Iterator[Fd]:
    """An instance."""
    with open_inotify() as fd:
        yield fd


def events(inotify: Fd) -> list[InotifyEvent]:
    """What has come; something has."""
    assert select.select([inotify], [], [], 10)[0]
    return read_events(inotify)


def watched(inotify: Fd, path: Path, wanted: InotifyMask = WANTED) -> int:
    """The number of a watch on a directory that is not open any more."""
    with opened(path) as fd:
        return add_watch(inotify, fd, wanted)


def test_names_that_come_and_go_are_told(inotify: Fd, tmp_path: Path) -> None:
    number = watched(inotify, tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "b").rmdir()
    assert events(inotify) == [
        InotifyEvent(number, InotifyMask.CREATE, b"a"),
        InotifyEvent(number, InotifyMask.MOVED_FROM, b"a"),
        InotifyEvent(number, InotifyMask.MOVED_TO, b"b"),
        InotifyEvent(number, InotifyMask.DELETE, b"b"),
    ]


@pytest.mark.parametrize("name", [b"x", b"x" * 255, b"\xff\xfe", b" \n", b"1234567890123456"])
def test_name_is_told_as_the_kernel_has_it(inotify: Fd, tmp_path: Path, name: bytes) -> None:
    watched(inotify, tmp_path)
    os.mkdir(os.path.join(os.fsencode(tmp_path), name))
    (event,) = events(inotify)
    assert event.name == name


def test_end_of_a_directory_is_the_end_of_its_watch(inotify: Fd, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    number = watched(inotify, tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert [event.kinds for event in events(inotify)] == [InotifyMask.DELETE_SELF, InotifyMask.IGNORED]
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        remove_watch(inotify, number)


def test_unwatched_directory_tells_nothing_but_the_end_of_its_watch(inotify: Fd, tmp_path: Path) -> None:
    number = watched(inotify, tmp_path)
    remove_watch(inotify, number)
    (tmp_path / "a").mkdir()
    assert events(inotify) == [InotifyEvent(number, InotifyMask.IGNORED, b"")]


@pytest.mark.needs("root")
def test_watch_keeps_no_filesystem_busy_and_ends_with_it(inotify: Fd) -> None:
    with tmpfs_volume() as volume:
        (volume / "sub").mkdir()
        number = watched(inotify, volume / "sub")
        assert not unmount(volume), "it was busy"
        told = events(inotify)
    assert {event.watch for event in told} == {number}
    assert InotifyMask.IGNORED in told[-1].kinds
    assert any(event.kinds & InotifyMask.UNMOUNT for event in told)


def test_only_directories_are_watched(inotify: Fd, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Fd(os.open(tmp_path / "file", os.O_PATH | os.O_CLOEXEC)) as fd, pytest.raises(NotADirectoryError):
        add_watch(inotify, fd, WANTED)


def test_lost_events_are_told_as_lost(inotify: Fd, tmp_path: Path) -> None:
    watched(inotify, tmp_path)
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    here, there = str(tmp_path / "a"), str(tmp_path / "b")
    os.mkdir(here)
    for _ in range(most // 4 + 1):
        os.rename(here, there)
        os.rename(there, here)
    told: list[InotifyEvent] = []
    while more := read_events(inotify):
        told += more
    assert told[-1] == InotifyEvent(-1, InotifyMask.OVERFLOW, b"")
