"""What can't be written past the daemon fails as on the filesystem below, and ends as there."""

import mmap
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import real_filesystems
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount
from tests.support.open_files import errno_of, opened
from tests.support.oracle_subjects import outcome
from tests.support.other_users import as_user
from tests.support.passthrough_files import n_messages, space_comes_back
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, tmpfs_volume
from tests.support.write_errors_disk import SIZE, FaultyDisk, faulty_disk

pytestmark = [pytest.mark.needs("root", "fuse", "loop", "passthrough"), pytest.mark.takes_engine]

LIMIT_S = 100.0
USER = 4711
MIB = 1 << 20
KIB_64 = bytes(64 << 10)

Tale = list[tuple[str, int]]
"""What happened, each with its errno (0: it was done), to be held against another."""


# A disk that fails later than at the write.


class Disk(NamedTuple):
    """One that fails when it is told to, and a mount of a part of it."""

    faulty: FaultyDisk
    mounted: Mounted


@pytest.fixture(scope="module")
def disk() -> Iterator[Disk]:
    with faulty_disk() as faulty, trashd_mount(faulty.path / "source", limit_s=SHARED_LIMIT_S) as mounted:
        yield Disk(faulty, mounted)


def write(fd: int) -> int:
    return errno_of(lambda: os.pwrite(fd, b"new" * 1000, 0))


def sync(fd: int) -> int:
    return errno_of(lambda: os.fsync(fd))


def write_back(faulty: FaultyDisk) -> None:
    """As the kernel does sooner or later; asked for here it is told what fails, and of no file."""
    with suppress(OSError):
        real_filesystems.sync(faulty.path)


def synced(file: Path, faulty: FaultyDisk) -> Iterator[tuple[str, int]]:
    with opened(file, os.O_RDWR) as fd, opened(file, os.O_RDWR) as other:
        with faulty.fails(file):
            yield "write", write(fd)
            yield "it is told", sync(fd)
            yield "once", sync(fd)
            yield "to each who has it open", errno_of(lambda: os.fdatasync(other))
        yield "write again", write(fd)
        yield "sync again", sync(fd)
        yield "the other", sync(other)
    with opened(file, os.O_RDWR) as later:
        yield "later", sync(later)


def written_back_before_anybody_syncs(file: Path, faulty: FaultyDisk) -> Iterator[tuple[str, int]]:
    with ExitStack() as stack:
        fd = stack.enter_context(opened(file, os.O_RDWR))
        with faulty.fails(file):
            yield "write", write(fd)
            write_back(faulty)
            later = stack.enter_context(opened(file, os.O_RDWR))
            yield "who opened it before anybody was told", sync(later)
            latest = stack.enter_context(opened(file, os.O_RDWR))
            yield "who opened it then", sync(latest)
            yield "who wrote", sync(fd)


def closed_unheard(file: Path, faulty: FaultyDisk) -> Iterator[tuple[str, int]]:
    with faulty.fails(file):
        fd = os.open(file, os.O_RDWR)
        yield "write", write(fd)
        write_back(faulty)
        yield "close", errno_of(lambda: os.close(fd))
        with opened(file, os.O_RDWR) as later:
            yield "who opens it next", sync(later)


def directly(file: Path, faulty: FaultyDisk) -> Iterator[tuple[str, int]]:
    with opened(file, os.O_RDWR | os.O_DIRECT) as fd, mmap.mmap(-1, 4096) as aligned:
        with faulty.fails(file):
            yield "write", errno_of(lambda: os.pwritev(fd, [aligned], 4096))
            yield "sync", sync(fd)
        yield "write again", errno_of(lambda: os.pwritev(fd, [aligned], 4096))


def mapped(file: Path, faulty: FaultyDisk) -> Iterator[tuple[str, int]]:
    with opened(file, os.O_RDWR) as fd, mmap.mmap(fd, SIZE) as memory:
        with faulty.fails(file):
            memory[0] ^= 1
            yield "msync", errno_of(memory.flush)
            yield "once", errno_of(memory.flush)
        memory[0] ^= 1
        yield "msync again", errno_of(memory.flush)


def with_flag(flag: int, file: Path, faulty: FaultyDisk) -> Iterator[tuple[str, int]]:
    with opened(file, os.O_RDWR | flag) as fd:
        with faulty.fails(file):
            yield "write", write(fd)
            yield "the next", write(fd)
        yield "write again", write(fd)


ACTS = {
    "synced": synced,
    "written back before anybody syncs": written_back_before_anybody_syncs,
    "closed unheard": closed_unheard,
    "directly": directly,
    "mapped": mapped,
    "O_SYNC": partial(with_flag, os.O_SYNC),
    "O_DSYNC": partial(with_flag, os.O_DSYNC),
}
Act = Callable[[Path, FaultyDisk], Iterator[tuple[str, int]]]


def tales(disk: Disk, act: Act) -> tuple[Tale, Tale]:
    """How it goes below, and through the mount, whose daemon sees none of it."""
    below, seen = disk.faulty.path / "file", disk.mounted.path / "file"
    for path in (below, disk.mounted.backing / "file"):
        disk.faulty.put(path)
    right = list(act(below, disk.faulty))
    before = n_messages(disk.mounted)
    told = list(act(seen, disk.faulty))
    assert n_messages(disk.mounted) == before
    for path in (below, seen):
        path.unlink()
    return right, told


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_failing_disk_is_told_of_as_below(disk: Disk, act: Act) -> None:
    with space_comes_back(disk.faulty.path):
        right, told = tales(disk, act)
    assert told == right
    assert any(number for _what, number in right)


@pytest.mark.parametrize("name", ["mapped", "O_SYNC", "O_DSYNC"])
def test_who_was_told_by_a_write_or_msync_is_told_once_more_by_fsync(disk: Disk, name: str) -> None:
    """The kernel and the daemon have the file open, each for itself: never less than below."""

    def act(file: Path, faulty: FaultyDisk) -> Iterator[tuple[str, int]]:
        with opened(file, os.O_RDWR | getattr(os, name, 0)) as fd:
            with faulty.fails(file), mmap.mmap(fd, SIZE) as memory:
                if name == "mapped":
                    memory[0] ^= 1
                    yield "msync", errno_of(memory.flush)
                else:
                    yield "write", write(fd)
                yield "fsync", sync(fd)
                yield "once", sync(fd)
            yield "write again", write(fd)
            yield "sync again", sync(fd)

    right, told = tales(disk, act)
    assert right[1] == ("fsync", 0)
    assert told == [right[0], ("fsync", right[0][1]), *right[2:]]


# No room, and limits: told at the write.


@contextmanager
def small_ext4() -> Iterator[Path]:
    with loop_volume("ext4", 32) as volume:
        (volume / "source").mkdir()
        yield volume / "source"


@contextmanager
def small_tmpfs() -> Iterator[Path]:
    with tmpfs_volume("16m") as volume:
        (volume / "source").mkdir()
        yield volume / "source"


@contextmanager
def limited_subvolume() -> Iterator[Path]:
    with loop_volume("btrfs", 256) as volume:
        yield btrfs_subvolume(volume, "source", limit_bytes=16 * MIB)


def fill(file: Path, ballast: Path, volume: Path) -> tuple[int, bool, int, bool]:
    """What ends it; that all until then is there; whether there is room again when other things are gone."""
    ballast.write_bytes(os.urandom(MIB))
    real_filesystems.sync(volume)
    n_written = 0

    def write_on() -> None:
        nonlocal n_written
        while True:
            n_written += os.write(fd, os.urandom(64 << 10))

    with opened(file, os.O_RDWR | os.O_CREAT | os.O_APPEND) as fd:
        ends_it = errno_of(write_on)
        is_all_there = os.fstat(fd).st_size == n_written > MIB
        ballast.unlink()
        real_filesystems.sync(volume)
        goes_on = errno_of(lambda: os.write(fd, b"more"))
        return ends_it, is_all_there, goes_on, os.fstat(fd).st_size == n_written + 4


@pytest.mark.parametrize(
    "volume", [small_ext4, small_tmpfs, pytest.param(limited_subvolume, marks=pytest.mark.needs("btrfs"))]
)
def test_who_has_no_room_goes_on_by_the_same_handle_when_there_is_some(
    volume: Callable[[], AbstractContextManager[Path]],
) -> None:
    with volume() as source:
        right = fill(source / "below", source / "ballast", source)
        (source / "below").unlink()
        assert right[1:] == (True, 0, True)
        with trashd_mount(source, limit_s=LIMIT_S) as mounted:
            for _ in range(2):  # a file that is kept keeps its room from the next
                real_filesystems.sync(source)
                assert fill(mounted.path / "file", mounted.path / "ballast", source) == right
                (mounted.path / "file").unlink()
            assert n_messages(mounted) == 0


def beyond_all_limits(file: Path) -> list[object]:
    """At the limits of the filesystem, and at the writer's own."""
    told: list[object] = []

    def tell(act: Callable[..., int | None], *args: object) -> None:
        told.append((outcome(act, fd, *args), os.fstat(fd).st_size))

    signal.signal(signal.SIGXFSZ, lambda number, _frame: told.append(signal.Signals(number).name))
    with opened(file, os.O_RDWR | os.O_CREAT) as fd:
        for offset in (1 << 44, (1 << 63) - 4096, (1 << 63) - 1):
            tell(os.pwrite, b"x", offset)
            tell(os.ftruncate, offset)
            os.ftruncate(fd, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for offset in (0, 64 << 10, 99_999, 100_000, 100_001):
            tell(os.pwrite, KIB_64, offset)
        tell(os.ftruncate, 100_001)
        tell(os.pwrite, b"still", 1000)
    return told


def test_beyond_the_largest_file_a_write_is_refused_as_below() -> None:
    with small_ext4() as source, trashd_mount(source, limit_s=LIMIT_S) as mounted:
        for directory in (source, mounted.path):
            directory.chmod(0o777)
        right = as_user(USER, lambda: beyond_all_limits(source / "below"))
        assert as_user(USER, lambda: beyond_all_limits(mounted.path / "file")) == right
        assert "SIGXFSZ" in right
        assert n_messages(mounted) == 0
