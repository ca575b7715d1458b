"""Readers that seekdir from entry to entry have those looked at that they want, and few more; others get all."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator

import pytest

from fusefs.core.fuse_protocol import Opcode
from fusefs.linux.fd import Fd
from fusefs.linux.getdents import Dirents
from fusefs.mount.tree.readdir import DirectoryReader, ReplySizes
from tests.support.fake_dev_fuse import a_real
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount
from tests.support.real_filesystems import loop_volume, tmpfs_volume

N_NAMES = 2000
ROOM, A_NAME = 32 << 10, 280
"""What libc has room for; and who wants to have one entry."""
A, B = DirectoryReader(7, 100), DirectoryReader(7, 101)


def test_who_reads_from_the_beginning_is_told_as_much_as_there_is_room_for() -> None:
    jumps = ReplySizes()
    for offset in range(0, 1000, 100):
        assert jumps.room(A, offset, ROOM) == ROOM
        jumps.told(A, offset + 100, ROOM)


def test_who_jumps_is_told_little_and_more_if_he_reads_on() -> None:
    jumps = ReplySizes()
    rooms = []
    for offset in range(500, 900, 100):
        rooms.append(jumps.room(A, offset, ROOM))
        jumps.told(A, offset + 100, rooms[-1])
    assert rooms[0] < ROOM / 16
    assert rooms == sorted(rooms)
    assert rooms[-1] == ROOM


def test_who_goes_on_before_the_end_of_what_he_was_told_jumps() -> None:
    jumps = ReplySizes()
    for offset in range(1, 100):
        room = jumps.room(A, offset, ROOM)
        assert room < ROOM / 16
        jumps.told(A, offset + 5, room)


def test_readers_of_one_directory_are_told_apart() -> None:
    jumps = ReplySizes()
    for offset in range(0, 1000, 100):
        for reader in (A, B):
            assert jumps.room(reader, offset, ROOM) == ROOM
            jumps.told(reader, offset + 100, ROOM)


def test_where_many_readers_were_is_not_remembered_for_ever() -> None:
    jumps = ReplySizes()
    for pid in range(100_000):
        jumps.told(DirectoryReader(7, pid), 100, ROOM)
    assert len(vars(jumps)["_told"]) < 5000


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


@pytest.mark.parametrize("is_opened", [True, False], ids=["opened", "not opened"])
def test_who_steps_from_entry_to_entry_has_few_others_looked_at(*, is_opened: bool) -> None:
    """Each step is a message; what is looked at for it the kernel takes a reference of, and we a node."""
    with a_real(opens_directories=is_opened) as (kernel, vfs, path):
        for number in range(N_NAMES):
            (path / f"{number}").touch()
        with Fd(os.open(path, os.O_RDONLY)) as fd:
            offsets = [offset for _name, _ino, offset, _kind in Dirents(fd).read_from(0)]
        fh = struct.unpack_from("=Q", kernel.asked(Opcode.OPENDIR, bytes(8)).body)[0] if is_opened else 0
        for offset in offsets[500:520]:
            told = kernel.asked(Opcode.READDIRPLUS, struct.pack("=QQIIQII", fh, offset, ROOM, 0, 0, 0, 0))
            assert len(told.body) > 100
        assert len(vfs.nodes) < 60
        if is_opened:
            kernel.asked(Opcode.RELEASEDIR, struct.pack("=QIIQ", fh, 0, 0, 0))


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
