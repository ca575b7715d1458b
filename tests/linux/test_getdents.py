"""Entries as getdents(2) has them: any name, the offset to go on at, and the kind where it is known."""

import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.getdents import Dirents
from tests.support.real_filesystems import loop_volume, tmpfs_volume

pytestmark = pytest.mark.needs("root")

N = 3000
"""More than one system call tells."""


@pytest.fixture
def top() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


@pytest.fixture
def entries(top: Path) -> Iterator[Dirents]:
    with Fd(os.open(top, os.O_RDONLY)) as fd:
        yield Dirents(fd)


def test_names_are_any_bytes_of_any_length(top: Path, entries: Dirents) -> None:
    names = [b"\xff" * length for length in range(1, 256)]
    for name in names:
        os.close(os.open(os.fsencode(top) + b"/" + name, os.O_CREAT | os.O_WRONLY))
    assert sorted(name for name, *_ in entries.read_from(0)) == sorted([b".", b"..", *names])


def test_each_entry_has_its_inode_number_and_kind(top: Path, entries: Dirents) -> None:
    (top / "file").touch()
    (top / "directory").mkdir()
    (top / "link").symlink_to("file")
    os.mkfifo(top / "fifo")
    os.mknod(top / "device", stat.S_IFCHR, os.makedev(1, 3))
    seen = {name: (ino, kind) for name, ino, _, kind in entries.read_from(0) if name not in (b".", b"..")}
    stats = {os.fsencode(path.name): path.lstat() for path in top.iterdir()}
    assert seen == {name: (st.st_ino, st.st_mode >> 12) for name, st in stats.items()}


@pytest.mark.parametrize("n", [1, 7, 1000])
def test_who_goes_on_at_an_offset_gets_each_entry_once(top: Path, entries: Dirents, n: int) -> None:
    for number in range(N):
        (top / f"{number}").touch()
    found, offset = [], 0
    while taken := list(islice(entries.read_from(offset), n)):
        found += [name for name, *_ in taken]
        offset = taken[-1][2]
    assert sorted(found) == sorted(os.fsencode(name) for name in (".", "..", *map(str, range(N))))


def test_a_block_may_begin_at_any_offset(top: Path, entries: Dirents) -> None:
    for number in range(N):
        (top / f"{number}").touch()
    everything = list(entries.read_from(0))
    for index in (N, 5, 1500):
        assert entries.block(everything[index - 1][2])[:3] == everything[index : index + 3]


def test_what_is_made_later_comes_when_it_is_read_again(top: Path, entries: Dirents) -> None:
    n_empty = len(list(entries.read_from(0)))
    (top / "new").touch()
    assert len(list(entries.read_from(0))) == len(entries.block(0)) == n_empty + 1


@pytest.mark.needs("loop")
@pytest.mark.parametrize("filesystem", ["ext4", "xfs"])
def test_who_goes_on_in_a_directory_that_was_removed_meanwhile_is_told_so(filesystem: str) -> None:
    """ext4 takes none of its offsets for one then, and says EINVAL, which looks like a fault of the reader's."""
    with loop_volume(filesystem, 300) as volume:
        directory = volume / "directory"
        directory.mkdir()
        with Fd(os.open(directory, os.O_RDONLY)) as fd:
            offsets = [following for _, _, following, _ in Dirents(fd).block(0)]
            directory.rmdir()
            for offset in (0, *offsets):
                with pytest.raises(FileNotFoundError):
                    Dirents(fd).block(offset)
