"""Blocks, holes and copies of parts of files, as on the native filesystem: fallocate, lseek, copy_file_range."""

import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from fusefs.linux.disk_usage import shared_bytes
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import RENAME_EXCHANGE, fallocate
from tests.support.foreground_mount import Mounted, fresh_mount, trashd_mount
from tests.support.open_files import errno_of, opened
from tests.support.oracle import ALL_DIRECT, Oracle, agreed
from tests.support.oracle_subjects import Handle, Story, Subject
from tests.support.real_filesystems import loop_volume, sync

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), pytest.mark.takes_engine]

KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE, INSERT_RANGE = 1, 2, 8, 16, 32
MODES = (0, KEEP_SIZE, PUNCH_HOLE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE, 1 << 20)
KIB, MIB = 1 << 10, 1 << 20
LARGE = bytes(range(1, 256)) * 1024
CHUNK = 64 * KIB
LIMIT_S = 100.0
_NUMBERS = count()


def allocate(handle: Handle, mode: int, offset: int, size: int) -> None:
    fallocate(handle.number, mode, offset, size)


def seek(handle: Handle, offset: int, whence: int) -> int:
    return os.lseek(handle.number, offset, whence)


def copy(source: Handle, to: Handle, size: int, offset: int, to_offset: int) -> int:
    return os.copy_file_range(source.number, to.number, size, offset, to_offset)


# As below.


@ALL_DIRECT
@pytest.mark.parametrize("mode", MODES)
def test_blocks_and_holes_are_made_as_below(oracle: Oracle, mode: int) -> None:
    def act(s: Subject, tell: Story) -> None:
        for number, (offset, size) in enumerate([(0, 1), (0, 4096), (5000, 30_000), (0, 300 * KIB), (400 * KIB, 5)]):
            name = b"file%d" % number
            s.put(name, LARGE)
            h = s.open(name, os.O_RDWR)
            s.fsync(h)
            tell(allocate, h, mode, offset, size)
            tell(s.fstat, h)
            tell(s.stat, name)
            tell(s.get, name)
            tell(s.pwrite, h, b"x" * 99, offset + size // 2)
            s.fsync(h)
            tell(s.fstat, h)
            s.close(h)

    oracle.agree(act)


@ALL_DIRECT
@agreed
def test_what_is_refused_is_refused_as_below(s: Subject, tell: Story) -> None:
    s.put(b"file", b"content")
    h = s.open(b"file", os.O_RDWR)
    for mode in (0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE):
        for offset, size in ((0, 0), (-1, 5), (5, -1), (1 << 62, 1 << 62), (0, (1 << 63) - 1)):
            if mode & PUNCH_HOLE and size > 1 << 40:
                continue
            tell(allocate, h, mode, offset, size)
        tell(s.fstat, h)
        tell(allocate, h, mode, 0, 1 << 40)
        s.truncate(b"file", 7)  # ext4 may have allocated what was free at that moment, which is not always the same
    tell(s.fstat, h)
    s.close(h)
    h = s.open(b"file")
    tell(allocate, h, 0, 0, 4096)
    tell(copy, h, h, 4, 0, 100)
    s.close(h)


@ALL_DIRECT
@agreed
def test_data_and_holes_are_found_as_below(s: Subject, tell: Story) -> None:
    s.put(b"empty")
    s.put(b"sparse")
    s.truncate(b"sparse", 10 * CHUNK)
    h = s.open(b"sparse", os.O_WRONLY)
    for number in (1, 4, 5, 8):
        s.pwrite(h, b"x" * CHUNK, number * CHUNK)
    tell(allocate, h, PUNCH_HOLE | KEEP_SIZE, 4 * CHUNK, CHUNK)
    s.fsync(h)
    s.close(h)
    for name in (b"empty", b"sparse"):
        h = s.open(name)
        for whence in (os.SEEK_DATA, os.SEEK_HOLE):
            for offset in (-1, 0, 1, CHUNK, 2 * CHUNK, 4 * CHUNK, 9 * CHUNK, 10 * CHUNK - 1, 10 * CHUNK, 1 << 62):
                tell(seek, h, offset, whence)
        tell(seek, h, 5, os.SEEK_SET)
        tell(os.read, h.number, 5) if not s.fstat(h).size_bytes else None
        s.close(h)


@ALL_DIRECT
@agreed
def test_parts_are_copied_as_below(s: Subject, tell: Story) -> None:
    s.put(b"source", LARGE)
    s.put(b"to", b"0123456789")
    source, to = s.open(b"source", os.O_RDWR), s.open(b"to", os.O_RDWR)
    for offset, to_offset, size in (
        (0, 0, 5), (3, 8, 5000), (100, 70_000, len(LARGE)), (len(LARGE), 0, 5), (len(LARGE) - 3, 2, 5),
        (1 << 40, 0, 5), (0, 0, 0), (0, 1 << 20, len(LARGE)),
    ):  # fmt: skip
        tell(copy, source, to, size, offset, to_offset)
        tell(s.fstat, to)
        tell(s.pread, to, 9000, max(to_offset - 10, 0))
    tell(copy, source, source, 1000, 0, 500)  # EINVAL: they overlap
    tell(copy, source, source, 1000, 0, len(LARGE))
    s.close(to)
    to = s.open(b"to", os.O_WRONLY | os.O_APPEND)
    tell(copy, source, to, 5, 0, 0)
    for h in (source, to):
        s.close(h)
    tell(s.get, b"source")
    tell(s.get, b"to")


@ALL_DIRECT
@agreed
def test_what_has_no_name_or_another_place_by_now_is_worked_on_as_below(s: Subject, tell: Story) -> None:
    """By whoever had it open when its directory was exchanged for another, or it was unlinked."""
    for name in (b"d", b"fresh"):
        s.mkdir(name)
    s.put(b"d/file", LARGE)
    s.put(b"d/gone", LARGE)
    s.put(b"fresh/file", b"fresh")
    file, gone = s.open(b"d/file", os.O_RDWR), s.open(b"d/gone", os.O_RDWR)
    s.rename(b"fresh", b"d", RENAME_EXCHANGE)
    s.unlink(b"fresh/gone")
    for h in (file, gone):
        tell(allocate, h, 0, 0, MIB)
        tell(allocate, h, PUNCH_HOLE | KEEP_SIZE, 4096, 8192)
        tell(s.fstat, h)
    tell(copy, gone, file, 5000, 100, 9000)
    tell(copy, file, gone, 5000, 100, 9000)
    tell(s.pread, gone, 30_000, 0)
    for h in (file, gone):
        s.close(h)
    tell(s.get, b"d/file")


def test_what_the_kernel_has_no_message_for_is_refused_and_changes_nothing(file: Path) -> None:
    with opened(file, os.O_RDWR) as fd:
        for mode in (COLLAPSE_RANGE, INSERT_RANGE):
            assert errno_of(partial(fallocate, fd, mode, 4096, 4096)) == errno.EOPNOTSUPP
        fallocate(fd, 0, 0, 1)
    assert file.read_bytes() == LARGE


# At once.


@pytest.fixture
def file(mounted: Mounted) -> Iterator[Path]:
    path = mounted.path / f"file{next(_NUMBERS)}"
    path.write_bytes(LARGE)
    yield path
    path.unlink()


def told(path: Path) -> tuple[int, ...]:
    st = path.stat()
    return st.st_size, st.st_blocks, st.st_mode, st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns


def settle(path: Path) -> None:
    """Have blocks that are promised given, as happens whenever somebody syncs: some more may be needed to find them."""
    with opened(path, os.O_RDONLY) as fd:
        os.fsync(fd)


def acts_on(fd: int, source: int) -> list[Callable[[], object]]:
    return [
        partial(fallocate, fd, 0, 0, 2 * MIB),
        partial(fallocate, fd, KEEP_SIZE, 3 * MIB, MIB),
        partial(fallocate, fd, PUNCH_HOLE | KEEP_SIZE, 0, CHUNK),
        partial(os.copy_file_range, source, fd, 5000, 0, 4 * MIB),
        partial(os.copy_file_range, source, fd, 5000, 0, 0),
    ]


@pytest.mark.parametrize("is_open", [True, False])
def test_sizes_and_times_are_told_at_once(mounted: Mounted, file: Path, is_open: bool) -> None:
    source, below = file.with_name("source"), mounted.backing
    (below / "source").write_bytes(LARGE)
    for number in range(5):
        with opened(file, os.O_RDWR) as fd, opened(source, os.O_RDONLY) as source_fd:
            told(file), told(source)
            acts_on(fd, source_fd)[number]()
            settle(below / file.name)
            if is_open:
                assert told(file) == told(below / file.name)
        assert told(file) == told(below / file.name)
        assert told(source) == told(below / "source")
    source.unlink()


def test_a_mapping_and_another_handle_see_it(file: Path) -> None:
    with opened(file, os.O_RDWR) as fd, opened(file, os.O_RDWR) as other, mmap.mmap(other, len(LARGE)) as mapped:
        assert mapped[:9] == LARGE[:9]
        fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 0, 2 * CHUNK)
        assert mapped[: 2 * CHUNK + 9] == os.pread(other, 2 * CHUNK + 9, 0)
        assert mapped[: 2 * CHUNK] == bytes(2 * CHUNK)
        os.copy_file_range(fd, fd, 5000, 2 * CHUNK, 10)
        assert mapped[10:5010] == os.pread(other, 5000, 10) == LARGE[2 * CHUNK :][:5000]
        fallocate(fd, 0, 0, MIB)
        assert os.fstat(other).st_size == MIB
        assert os.lseek(other, 0, os.SEEK_END) == MIB


def test_what_is_written_to_memory_is_copied_and_outlives_a_hole_beside_it(file: Path) -> None:
    with opened(file, os.O_RDWR) as fd, opened(file, os.O_RDWR) as other, mmap.mmap(other, len(LARGE)) as mapped:
        mapped[CHUNK : CHUNK + 3] = b"new"
        assert os.copy_file_range(fd, fd, 3, CHUNK, 5 * MIB) == 3
        assert os.pread(fd, 3, 5 * MIB) == b"new"
        mapped[2 * CHUNK - 3 : 2 * CHUNK] = b"end"
        fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 2 * CHUNK, CHUNK)
        assert os.pread(fd, 5, 2 * CHUNK - 3) == mapped[2 * CHUNK - 3 : 2 * CHUNK + 2] == b"end\0\0"


def test_what_is_written_to_memory_is_never_called_a_hole(file: Path) -> None:
    """The kernel asks before it has written it back; who copies would leave it out."""
    with opened(file, os.O_RDWR) as fd, opened(file, os.O_RDONLY) as reader:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, 10 * CHUNK)
        with mmap.mmap(fd, 10 * CHUNK) as mapped:
            mapped[5 * CHUNK] = 1
            assert os.lseek(reader, 0, os.SEEK_DATA) <= 5 * CHUNK
            assert os.lseek(reader, 5 * CHUNK, os.SEEK_DATA) == 5 * CHUNK
            assert os.lseek(reader, 5 * CHUNK, os.SEEK_HOLE) > 5 * CHUNK
            assert errno_of(lambda: os.lseek(reader, 10 * CHUNK, os.SEEK_DATA)) == errno.ENXIO
    with opened(file, os.O_RDONLY) as reader:
        assert os.lseek(reader, 0, os.SEEK_DATA) == 5 * CHUNK


# Programs, and other filesystems.


def test_a_sparse_file_is_copied_sparse(mounted: Mounted) -> None:
    source, to = mounted.path / "sparse", mounted.path / "copy"
    with source.open("wb") as out:
        out.truncate(100 * MIB)
        os.pwrite(out.fileno(), b"data", 70 * MIB)
    done = subprocess.run(["cp", "--sparse=auto", source, to], check=False)
    assert done.returncode == 0
    assert (to.stat().st_size, to.stat().st_blocks) == (100 * MIB, source.stat().st_blocks)
    assert to.stat().st_blocks * 512 < MIB
    with to.open("rb") as file:
        assert os.pread(file.fileno(), 6, 70 * MIB - 1) == b"\0data\0"
    for path in (source, to):
        path.unlink()


def test_what_is_copied_to_another_filesystem_below_the_mount_is_whole() -> None:
    with loop_volume("ext4", 64) as volume:
        inner = volume / "source/inner"
        inner.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "inner", inner], check=True)
        try:
            with trashd_mount(volume / "source", options=["coherence=shared"], limit_s=LIMIT_S) as mounted:
                here, there = mounted.path / "file", mounted.path / "inner/file"
                here.write_bytes(LARGE)
                for one, other in ((here, there), (there, here.with_name("back"))):
                    with opened(one, os.O_RDONLY) as fd, opened(other, os.O_RDWR | os.O_CREAT) as to:
                        n = 0
                        while done := os.copy_file_range(fd, to, len(LARGE), n, n):
                            n += done
                    assert other.read_bytes() == LARGE
        finally:
            subprocess.run(["umount", inner], check=True)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.needs(kind)) for kind in ("xfs", "btrfs")])
@pytest.mark.parametrize("option", ["passthrough=auto", "passthrough=off"])
def test_a_copy_shares_its_blocks_where_the_filesystem_can(kind: str, option: str) -> None:
    with fresh_mount("coherence=exclusive", option, made=loop_volume(kind, 320), limit_s=LIMIT_S) as mounted:
        file = mounted.path / "file"
        file.write_bytes(LARGE * 16)
        sync(mounted.backing)
        shutil.copyfile(file, mounted.path / "plain")
        subprocess.run(["cp", "--reflink=auto", file, mounted.path / "copy"], check=True)
        assert (mounted.path / "copy").read_bytes() == LARGE * 16
        assert (mounted.path / "copy").stat().st_size == (mounted.backing / "copy").stat().st_size
        with Fd(os.open(mounted.backing / "copy", os.O_RDONLY)) as fd:
            os.fsync(fd)
            assert shared_bytes(Kernel(), fd) >= len(LARGE) * 15


# Without us.


def test_where_nobody_answers_the_kernel_does_without() -> None:
    with fresh_mount("coherence=exclusive", "engine=plain", limit_s=LIMIT_S) as mounted:
        file = mounted.path / "file"
        file.write_bytes(LARGE)
        for _again in range(2):
            with opened(file, os.O_RDWR) as fd:
                assert errno_of(partial(fallocate, fd, 0, 0, MIB)) == errno.EOPNOTSUPP
                assert os.lseek(fd, 0, os.SEEK_DATA) == 0
                assert os.lseek(fd, 0, os.SEEK_HOLE) == len(LARGE)
                assert os.copy_file_range(fd, fd, 100, 0, 1000) == 100
        subprocess.run(["stat", file], stdout=subprocess.DEVNULL, check=True)
