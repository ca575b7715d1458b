"""Reads and writes go past the daemon, and all that is told of a file stays true (docs/internals/decisions/0064)."""

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, fresh_mount, until
from tests.support.open_files import opened
from tests.support.passthrough_files import all_closed, n_messages, why_off
from tests.support.real_filesystems import loop_volume, tmpfs_volume

pytestmark = [pytest.mark.needs("root", "fuse", "loop", "passthrough"), pytest.mark.takes_engine]

KINDS = [pytest.param(kind, marks=pytest.mark.needs(kind)) for kind in ("xfs", "btrfs")]
"""On which a file has other blocks when it is closed, or written back, than when it was written."""
QUICK = ["tmpfs", "ext4", "ext4 shared", *KINDS]
_STATX_SIZE, _STATX_MTIME = 0x200, 0x40
_libc = ctypes.CDLL(None, use_errno=True)


class File(NamedTuple):
    """One, seen through the mount and below it."""

    mounted: Mounted
    seen: Path
    below: Path

    def agrees(self) -> bool:
        """Return whether a stat reports the same on both sides.

        What is to be written back is written before: xfs counts blocks twice for a moment while it allocates them.
        Source: xfs_bmap_alloc_account in fs/xfs/libxfs/xfs_bmap.c; xfs_vn_getattr adds i_nblocks and i_delayed_blks
        """
        with opened(self.below, os.O_RDONLY) as fd:
            os.fsync(fd)
        return told(self.seen.stat()) == told(self.below.stat())

    def agrees_without_access_time(self) -> bool:
        """Whether `ls -l` does: the kernel asks anew for what it knows to be old of what is asked, and no more."""
        return some_times(self.seen) == some_times(self.below)


def told(st: os.stat_result) -> tuple[int, ...]:
    return st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_blocks, st.st_mode


def some_times(path: Path) -> tuple[int, ...]:
    """Size and time of change, and nothing else asked for."""
    buffer = ctypes.create_string_buffer(256)
    assert _libc.statx(-100, os.fsencode(path), 0, _STATX_SIZE | _STATX_MTIME, buffer) == 0
    return struct.unpack_from("=Q", buffer, 40) + struct.unpack_from("=qI", buffer, 112)


@pytest.fixture(scope="module", params=[*QUICK, "tmpfs slow"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """One whose kernel believes attributes for an hour, or for a second, or whose daemon remembers them, too."""
    kind, *more = request.param.split()
    made = tmpfs_volume("256m") if kind == "tmpfs" else loop_volume(kind, 320)
    options = ["coherence=shared" if "shared" in more else "coherence=exclusive", *["backing=slow"] * ("slow" in more)]
    with fresh_mount(*options, made=made, limit_s=SHARED_LIMIT_S) as mounted:
        assert why_off(mounted) is None
        yield mounted


@pytest.fixture
def file(mount: Mounted) -> Iterator[File]:
    """A file of 8 KiB, looked at just now."""
    seen, below = mount.path / "file", mount.backing / "file"
    seen.write_bytes(b"a" * 8192)
    yield File(mount, seen, below)
    for path in mount.path.iterdir():
        path.unlink()


# Past the daemon.


@pytest.mark.parametrize("size_bytes", [5, 500_000])
def test_reading_a_file_again_comes_to_the_daemon_no_more_than_the_first_time(mount: Mounted, size_bytes: int) -> None:
    file = mount.backing / "file"
    file.write_bytes(b"a" * size_bytes)
    before = n_messages(mount)
    for _ in range(4):
        assert len((mount.path / "file").read_bytes()) == size_bytes
        assert all_closed(mount)
    assert n_messages(mount) == before
    file.unlink()


def test_neither_read_nor_write_nor_mapping_comes_to_the_daemon(file: File) -> None:
    before = n_messages(file.mounted)
    with opened(file.seen, os.O_RDWR) as fd:
        os.pwrite(fd, b"b" * 100, 4000)
        assert os.pread(fd, 100, 4000) == b"b" * 100
        with mmap.mmap(fd, 8192) as mapped:
            mapped[8000:8003] = b"map"
        assert os.pread(fd, 3, 8000) == b"map"
    with opened(file.seen.with_name("new"), os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        os.write(fd, b"made and written")
        assert os.pread(fd, 100, 0) == b"made and written"
    assert n_messages(file.mounted) == before


def test_what_is_written_on_one_side_is_read_on_the_other_at_once(file: File) -> None:
    with opened(file.seen, os.O_RDWR) as seen, opened(file.below, os.O_RDWR) as below:
        for number in range(50):
            os.pwrite(seen, b"%04d" % number, 0)
            assert os.pread(below, 4, 0) == b"%04d" % number
            os.pwrite(below, b"%04d" % (number + 1), 0)
            assert os.pread(seen, 4, 0) == b"%04d" % (number + 1)


def test_direct_writing_and_reading_is_direct_below(file: File) -> None:
    with opened(file.seen, os.O_RDWR | os.O_DIRECT) as fd, mmap.mmap(-1, 4096) as aligned:
        aligned[:] = b"d" * 4096
        assert os.pwritev(fd, [aligned], 4096) == 4096
        assert os.preadv(fd, [aligned], 0) == 4096
        assert aligned[:] == b"a" * 4096
    assert file.below.read_bytes() == b"a" * 4096 + b"d" * 4096
    assert file.agrees()


# What is told of it.


def truncated(file: File) -> None:
    file.seen.open("wb").close()


def appended(file: File) -> None:
    with opened(file.seen, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"b" * 10_000)


def rewritten(file: File) -> None:
    file.seen.write_bytes(b"c" * 100)


def copied(file: File) -> None:
    copy = File(file.mounted, file.seen.with_name("copy"), file.below.with_name("copy"))
    with opened(file.seen, os.O_RDONLY) as source, opened(copy.seen, os.O_WRONLY | os.O_CREAT) as to:
        os.copy_file_range(source, to, 8192)
    assert copy.agrees()


def cut_open(file: File) -> None:
    with opened(file.seen, os.O_RDWR) as fd:
        os.ftruncate(fd, 100_000)
        assert os.fstat(fd).st_size == 100_000
        os.pwrite(fd, b"end", 99_997)


def is_believed(file: File) -> bool:
    """Whether a second stat costs no message."""
    os.stat(file.seen)
    before = file.mounted.stats().operations["getattr"].n()
    os.stat(file.seen)
    return file.mounted.stats().operations["getattr"].n() == before


def mapped(file: File) -> None:
    with opened(file.seen, os.O_RDWR) as fd, mmap.mmap(fd, 8192) as memory:
        memory[0] = 1


@pytest.mark.parametrize("act", [truncated, appended, rewritten, copied, cut_open, mapped])
def test_what_was_done_is_told_at_once(file: File, act: Callable[[File], None]) -> None:
    assert file.agrees()
    act(file)
    assert file.agrees_without_access_time()
    assert file.agrees()


def test_each_write_is_told_while_the_file_is_open(file: File) -> None:
    with opened(file.seen, os.O_WRONLY | os.O_APPEND) as fd, opened(file.seen, os.O_RDONLY) as reader:
        for number in range(20):
            os.write(fd, b"e" * 1000)
            assert file.agrees_without_access_time()
            assert os.fstat(fd).st_size == os.fstat(reader).st_size == 8192 + 1000 * (number + 1)
            assert os.lseek(reader, 0, os.SEEK_END) == 8192 + 1000 * (number + 1)
            assert file.agrees()


def test_what_is_written_to_memory_is_told(file: File) -> None:
    with opened(file.seen, os.O_RDWR) as fd:
        memory = mmap.mmap(fd, 8192)
        assert file.agrees()
        memory[0] = 1
        assert file.agrees_without_access_time()
        os.utime(file.below, ns=(0, 0))
        memory.flush()
        memory[0] = 2
        assert file.agrees_without_access_time()
    assert file.agrees()
    memory[4096] = 1  # it is not open any more
    assert file.agrees_without_access_time()
    memory.flush()
    memory.close()
    assert file.agrees()
    with os.scandir(file.seen.parent) as entries:
        assert [told(entry.stat()) for entry in entries] == [told(file.below.stat())]


def test_a_listing_of_what_is_being_written_is_told_at_once(file: File) -> None:
    with opened(file.seen, os.O_WRONLY | os.O_APPEND) as fd:
        for number in range(5):
            os.write(fd, b"e" * 1000)
            file.mounted.forget_all()
            with os.scandir(file.seen.parent) as entries:
                assert [entry.stat().st_size for entry in entries] == [8192 + 1000 * (number + 1)]


@pytest.mark.parametrize("mount", QUICK, indirect=True)
def test_attributes_of_what_nobody_writes_any_more_are_believed(file: File) -> None:
    appended(file)
    assert until(lambda: is_believed(file))
    assert file.agrees()


@pytest.mark.parametrize("mount", ["tmpfs", "ext4"], indirect=True)
def test_attributes_of_what_may_be_mapped_are_asked_for_until_the_kernel_forgets_the_file(file: File) -> None:
    mapped(file)
    assert all_closed(file.mounted)
    assert not is_believed(file)
    assert until(lambda: file.mounted.stats().gauges["n_nodes"] == 2)
    file.mounted.forget_all()
    assert until(lambda: file.mounted.stats().gauges["n_nodes"] == 1)
    assert until(lambda: is_believed(file))
    assert file.agrees()


@pytest.mark.parametrize("mount", ["tmpfs slow"], indirect=True)
def test_of_what_is_read_on_slow_backing_the_time_of_access_is_right(file: File) -> None:
    os.utime(file.seen, ns=(10**18, 10**18))
    file.mounted.forget_all()
    assert file.seen.stat().st_atime_ns == 10**18
    with opened(file.seen, os.O_RDONLY) as fd:
        os.pread(fd, 100, 0)
        assert file.seen.stat().st_atime_ns == file.below.stat().st_atime_ns > 10**18
    file.mounted.forget_all()
    assert file.seen.stat().st_atime_ns == file.below.stat().st_atime_ns
