"""Blocks that are reserved for root stay root's, though root's daemon writes, or the kernel with the rights it has."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.syscalls import fallocate
from tests.support.foreground_mount import Mounted, fresh_mount, until
from tests.support.open_files import errno_of, opened
from tests.support.other_users import as_user
from tests.support.passthrough_files import free_bytes
from tests.support.real_filesystems import loop_volume
from tests.support.transports import by_ring

pytestmark = pytest.mark.needs("root", "fuse", "loop")

ALICE = 70_001
KIB, MIB = 1 << 10, 1 << 20
SIZE_MIB, PERCENT = 32, 20
RESERVED = SIZE_MIB * MIB * PERCENT // 100
NEARLY = 256 * KIB
"""What the filesystem may take for itself."""
N_FILES = 200
LIMIT_S = 60.0


OPTIONS = {
    "auto": ["passthrough=auto"],
    "off": ["passthrough=off"],
    "slow": ["passthrough=off", "backing=slow"],
    "by the core": ["passthrough=auto", "uring=on"],
}


@pytest.fixture(params=["auto", "off"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """Of an ext4 with such blocks: the kernel writes, or the daemon, or threads of the daemon's."""
    made = loop_volume("ext4", SIZE_MIB, ("-m", str(PERCENT)))
    with fresh_mount("coherence=exclusive", *OPTIONS[request.param], made=made, limit_s=LIMIT_S) as mounted:
        mounted.path.chmod(0o777)
        yield mounted


def add(path: Path, most: int = 2 * SIZE_MIB * MIB) -> int:
    """How many bytes a file takes, a new one if need be, until there are no more blocks for the writer."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as fd:
        return add_to(fd, most)


def add_to(fd: int, most: int = 2 * SIZE_MIB * MIB) -> int:
    """How many bytes an open file takes until there are no more blocks for its writer."""
    n = 0
    for piece in (64 * KIB, KIB):
        try:
            while n < most:
                n += os.write(fd, bytes(piece))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return n


@pytest.mark.parametrize("mounted", ["auto", "off", "slow"], indirect=True)
def test_a_user_has_as_much_room_through_the_mount_as_below(mounted: Mounted) -> None:
    assert as_user(ALICE, lambda: add(mounted.path / "file")) > MIB
    assert as_user(ALICE, lambda: add(mounted.backing / "below")) < NEARLY
    (mounted.path / "file").unlink()
    assert until(lambda: free_bytes(mounted.backing) > 2 * MIB)  # when the daemon has closed it
    assert as_user(ALICE, lambda: add(mounted.backing / "below")) > MIB
    assert as_user(ALICE, lambda: add(mounted.path / "again")) < NEARLY


def test_root_has_the_reserve_still_when_users_have_all_else(mounted: Mounted) -> None:
    as_user(ALICE, lambda: add(mounted.path / "file"))
    assert RESERVED - MIB < add(mounted.path / "roots") < RESERVED + MIB


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_TRUNC, os.O_RDWR])
def test_however_a_user_opens_his_file_nothing_of_the_reserve_is_his(mounted: Mounted, flags: int) -> None:
    file = mounted.path / "file"
    as_user(ALICE, lambda: file.write_bytes(b"his"))

    def fill() -> int:
        add(mounted.backing / "below")
        with opened(file, flags) as fd:
            return add_to(fd)

    assert as_user(ALICE, fill) < NEARLY


def test_whoever_has_a_users_file_open_already_nothing_of_the_reserve_is_his(mounted: Mounted) -> None:
    file = mounted.path / "file"
    as_user(ALICE, lambda: file.write_bytes(b"his"))
    with opened(file, os.O_RDONLY):
        as_user(ALICE, lambda: add(mounted.backing / "below"))
        assert as_user(ALICE, lambda: add(file)) < NEARLY


@pytest.mark.parametrize("mounted", ["auto", "off", by_ring("by the core")], indirect=True)
@pytest.mark.parametrize("is_new", [True, False])
def test_a_file_of_roots_that_others_may_write_has_nothing_of_the_reserve(mounted: Mounted, is_new: bool) -> None:
    file = mounted.path / "shared"
    (mounted.path if is_new else mounted.backing).joinpath("shared").touch()
    file.chmod(0o666)
    with opened(file, os.O_RDONLY):
        as_user(ALICE, lambda: add(mounted.backing / "below"))
        assert as_user(ALICE, lambda: add(file)) < NEARLY


@pytest.mark.takes_engine
@pytest.mark.parametrize("mounted", ["auto", "off", "slow"], indirect=True)
def test_blocks_that_are_allocated_or_copied_are_nothing_of_the_reserve(mounted: Mounted) -> None:
    file, source = mounted.path / "file", mounted.path / "source"
    as_user(ALICE, lambda: source.write_bytes(bytes(range(256)) * (NEARLY // 256)))

    def fill() -> list[int]:
        add(mounted.backing / "below")
        with opened(file, os.O_RDWR | os.O_CREAT) as fd, opened(source, os.O_RDONLY) as source_fd:
            copying = (partial(os.copy_file_range, source_fd, fd, NEARLY, 0, NEARLY * n) for n in range(3))
            return [errno_of(partial(fallocate, fd, 0, MIB, MIB)), *map(errno_of, copying)]

    assert as_user(ALICE, fill)[-1] == errno.ENOSPC
    assert file.stat().st_blocks * 512 < NEARLY


def test_extended_attributes_take_nothing_of_the_reserve(mounted: Mounted) -> None:
    files = [mounted.path / str(i) for i in range(N_FILES)]

    def fill() -> int:
        for file in files:
            file.touch()
        add(mounted.backing / "below")
        return sum(errno_of(partial(os.setxattr, file, "user.name", os.urandom(KIB // 2))) == 0 for file in files)

    assert as_user(ALICE, fill) < N_FILES / 4


@pytest.mark.parametrize("mounted", ["auto", "off", "slow"], indirect=True)
def test_a_write_that_was_refused_leaves_the_daemon_what_it_was(mounted: Mounted) -> None:
    as_user(ALICE, lambda: add(mounted.path / "file"))
    assert errno_of(lambda: os.mkdir(mounted.path / "roots")) == 0
    assert (mounted.path / "roots").stat().st_uid == 0
