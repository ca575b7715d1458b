"""What a copy holds is what the original holds, by whatever way it came."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fusefs.linux.copy_contents import copy_contents, is_same_content
from fusefs.linux.copy_inode import make_copy, open_original, verify
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.private_directory import PrivateDirectory
from fusefs.linux.shared_extents import has_same_blocks, shared_bytes
from tests.support.copy_file import PREFIX, copy, opened, yes
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import loop_volume, sync
from tests.support.store_calls import Counting

pytestmark = pytest.mark.needs("root", "loop")

ALICE, MALLORY = 12001, 12666
MIB = 1 << 20


def test_holes_stay_holes(source: Path, target: Path) -> None:
    file = source / "file"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
        for at in (0, 5 * MIB + 3, 1 << 39):
            os.pwrite(sparse.fileno(), os.urandom(10_000), at)
    copy(file, target)
    got = target / "file"
    assert got.stat().st_size == 1 << 40
    assert got.stat().st_blocks <= file.stat().st_blocks + 64
    with file.open("rb") as a, got.open("rb") as b:
        assert is_same_content(Kernel(), Fd(a.fileno()), Fd(b.fileno()), 1 << 40, yes)
        assert os.pread(a.fileno(), 10_000, 1 << 39) == os.pread(b.fileno(), 10_000, 1 << 39)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, MIB, 3 * MIB + 17])
def test_every_size_is_copied(source: Path, target: Path, size: int) -> None:
    (source / "file").write_bytes(os.urandom(size))
    copy(source / "file", target)
    assert (target / "file").read_bytes() == (source / "file").read_bytes()


@pytest.mark.parametrize("refused_calls", [("copy_file_range",), ("ficlone", "copy_file_range")])
def test_where_the_kernel_can_not_copy_it_is_read_and_written(
    source: Path, target: Path, refused_calls: tuple[str, ...]
) -> None:
    def hook(call: str) -> None:
        if call in refused_calls:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (source / "file").write_bytes(os.urandom(2 * MIB + 5))
    copy(source / "file", target, Kernel(hook))
    assert (target / "file").read_bytes() == (source / "file").read_bytes()


@pytest.mark.needs("btrfs", "xfs")
@pytest.mark.parametrize("fs_type", ["btrfs", "xfs"])
def test_blocks_are_shared_where_they_can_be(fs_type: str) -> None:
    with loop_volume(fs_type) as path:
        make_tree(path / "target", {})
        (path / "file").write_bytes(os.urandom(MIB))
        sync(path)
        hook = Counting()
        copy(path / "file", path / "target", Kernel(hook))
        with Fd(os.open(path / "target/file", os.O_PATH)) as fd:
            assert shared_bytes(Kernel(), fd) == MIB
        assert "read" not in hook.calls
        assert (path / "target/file").read_bytes() == (path / "file").read_bytes()


@pytest.mark.needs("xfs")
def test_a_clone_that_somebody_has_written_to_has_other_blocks() -> None:
    with loop_volume("xfs") as path, (path / "a").open("wb+") as a, (path / "b").open("wb+") as b:
        a.write(os.urandom(MIB))
        a.flush()
        one, two, kernel = Fd(a.fileno()), Fd(b.fileno()), Kernel()
        assert copy_contents(kernel, one, two, MIB, yes)
        assert has_same_blocks(kernel, one, two)
        os.pwrite(two, b"x", MIB // 2)
        os.fsync(two)
        assert not has_same_blocks(kernel, one, two)
        os.ftruncate(two, 0)
        assert not has_same_blocks(kernel, one, two)


def test_content_differs_in_a_byte_or_in_a_hole(source: Path) -> None:
    kernel, size = Kernel(), 3 * MIB
    with (source / "a").open("wb+") as a, (source / "b").open("wb+") as b:
        a.truncate(size)
        b.truncate(size)
        one, two = Fd(a.fileno()), Fd(b.fileno())
        assert is_same_content(kernel, one, two, size, yes)
        os.pwrite(b.fileno(), b"\0", MIB)
        assert is_same_content(kernel, one, two, size, yes)
        os.pwrite(b.fileno(), b"x", size - 1)
        assert not is_same_content(kernel, one, two, size, yes)
        assert not is_same_content(kernel, two, one, size, yes)


def test_a_copy_that_is_none_is_refused(source: Path, target: Path) -> None:
    file = source / "file"
    file.write_bytes(b"a" * 5000)
    with opened(source) as above, opened(target) as place, PrivateDirectory(Kernel(), place, PREFIX) as private:
        original = open_original(Kernel(), above, b"file")
        made = make_copy(Kernel(), original, place, private, yes)
        with original.fd, made.fd:
            os.pwrite(made.fd, b"b", 4999)
            os.utime(made.fd, ns=(original.seen.st_atime_ns, original.seen.st_mtime_ns))
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                verify(Kernel(), original, made, yes)


def test_a_long_copy_ends_when_it_is_not_to_go_on(source: Path, target: Path) -> None:
    (source / "file").write_bytes(os.urandom(MIB))
    with pytest.raises(OSError, match=os.strerror(errno.ECANCELED)):
        copy(source / "file", target, goes_on=lambda: False)
    assert os.listdir(target) == []
