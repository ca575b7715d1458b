"""Readers that seekdir find each entry where it was told to be, and read on from there."""

import os
import random
from collections.abc import Iterator

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.getdents import Dirents
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount
from tests.support.real_filesystems import loop_volume, tmpfs_volume

N_NAMES = 2000
ROOM, A_NAME = 32 << 10, 280
"""What libc has room for; and who wants to have one entry."""


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """With a directory whose listing was not read to its end: the kernel keeps none of it."""
    with tmpfs_volume() if request.param == "tmpfs" else loop_volume("ext4", 64) as volume:
        top = volume / "source" / "d"
        top.mkdir(parents=True)
        for number in range(N_NAMES):
            (top / f"{number}-{'x' * (number % 60)}").touch()
        with trashd_mount(volume / "source", options=("coherence=exclusive",), limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted


class Below:
    """The backing directory's entries, and the offset that each stands at."""

    def __init__(self, mount: Mounted) -> None:
        with Fd(os.open(mount.backing / "d", os.O_RDONLY)) as fd:
            self.entries = [(name, offset) for name, _ino, offset, _kind in Dirents(fd).read_from(0)]
        self.offsets = [0, *(offset for _name, offset in self.entries[:-1])]


@pytest.mark.needs("root", "fuse", "loop")
@pytest.mark.parametrize("room", [A_NAME, ROOM])
def test_every_entry_is_found_where_it_was_told_to_be_in_any_order(mount: Mounted, room: int) -> None:
    below = Below(mount)
    numbers = [*range(0, N_NAMES, 7), *random.Random(1).choices(range(N_NAMES), k=300)]
    with Fd(os.open(mount.path / "d", os.O_RDONLY)) as fd:
        for number in numbers:
            name, *_ = Dirents(fd).block(below.offsets[number], room)[0]
            assert name == below.entries[number][0]


@pytest.mark.needs("root", "fuse", "loop")
def test_who_reads_all_after_a_jump_gets_all_in_few_messages(mount: Mounted) -> None:
    below = Below(mount)
    mount.forget_all()
    before = mount.stats().operations["readdir"].n()
    with Fd(os.open(mount.path / "d", os.O_RDONLY)) as fd:
        entries = Dirents(fd)
        names = [name for name, *_ in entries.read_from(below.offsets[100])]
    n = mount.stats().operations["readdir"].n() - before
    assert names == [name for name, _offset in below.entries[100:]]
    assert n < N_NAMES / 20
