"""When a file was made is told through the mount, and what else is told with it is as lasting as ever."""

import ctypes
import os
import socket
import struct
import subprocess
from itertools import count
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.open_files import opened
from tests.support.trashd_command import done_well

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), pytest.mark.takes_engine]

BASIC, BTIME = 0x7FF, 0x800
_NUMBERS = count()
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def place(mounted: Mounted) -> Path:
    path = mounted.path / f"place{next(_NUMBERS)}"
    path.mkdir()
    return path


def statx(path: Path | int) -> tuple[int, ...]:
    """What is told of all that: mask, mode, size, times, and the birth (0, 0: not told)."""
    buffer = ctypes.create_string_buffer(256)
    fd, name, flags = (path, b"", 0x1000) if isinstance(path, int) else (-100, os.fsencode(path), 0x100)
    assert _libc.statx(fd, name, flags, BASIC | BTIME, buffer) == 0
    mask, mode, size, *times = struct.unpack_from("=I24xH10xQ16xqI4xqI4xqI4xqI", buffer)
    birth = times[2:4] if mask & BTIME else [0, 0]
    return mask & (BASIC | BTIME), mode, size, *times[:2], *times[4:], *birth


def make_younger(path: Path, born: tuple[int, ...]) -> None:
    """Make a file that was born later; of two that are made in one tick of the clock neither was."""

    def is_younger() -> bool:
        path.unlink(missing_ok=True)
        path.touch()
        return statx(path)[-2:] > born

    assert until(is_younger)


def make_all(place: Path) -> list[Path]:
    """One of each kind."""
    (place / "file").write_bytes(b"content")
    (place / "directory").mkdir()
    (place / "link").symlink_to("file")
    os.mkfifo(place / "fifo")
    os.mknod(place / "device", 0o20600, os.makedev(4000, 1 << 18))
    with socket.socket(socket.AF_UNIX) as end, opened(place, os.O_PATH) as fd:
        end.bind(f"/proc/self/fd/{fd}/socket")
    return sorted(place.iterdir())


def test_all_that_is_told_with_a_birth_is_as_below(mounted: Mounted, place: Path) -> None:
    below = mounted.backing / place.name
    assert statx(below)[0] & BTIME
    for path in (*make_all(place), place, mounted.path):
        same = mounted.backing / path.relative_to(mounted.path)
        assert statx(path) == statx(same)
        assert path.lstat().st_rdev == same.lstat().st_rdev
        assert path.lstat()[6:] == same.lstat()[6:]


def test_a_birth_stays_whatever_happens_to_the_file(place: Path) -> None:
    file, moved = place / "file", place / "moved"
    file.write_bytes(b"content")
    born = statx(file)[-2:]
    os.utime(file, (0, 0))
    file.chmod(0o4755)
    file.rename(moved)
    assert statx(moved)[-2:] == born
    with opened(moved, os.O_RDWR) as fd:
        moved.unlink()
        os.write(fd, b"new")
        assert statx(fd)[-2:] == born
    make_younger(file, born)


def test_a_birth_is_asked_for_once_and_nothing_else_costs_more(mounted: Mounted, place: Path) -> None:
    """Of what a process holds, so that the kernel forgets nothing of it; by no path, whose directories it asks for."""
    file = place / "file"
    os.mknod(file, 0o600)
    with opened(file, os.O_PATH) as fd:
        os.fstat(fd)
        before = mounted.n_requests_for("statx", "getattr")
        births = {statx(fd) for _ in range(20)}
        for _ in range(20):
            os.fstat(fd)
        assert len(births) == 1
        assert mounted.n_requests_for("statx", "getattr") == before + 1


def test_listing_with_attributes_asks_for_no_birth(mounted: Mounted, place: Path) -> None:
    for number in range(20):
        (place / str(number)).touch()
    mounted.forget_all()
    before = mounted.n_requests_for("statx")
    subprocess.run(["ls", "-l", place], stdout=subprocess.DEVNULL, check=True)
    assert mounted.n_requests_for("statx") == before


def test_attributes_told_with_a_birth_are_asked_for_again_when_they_change(mounted: Mounted, place: Path) -> None:
    file, below = place / "file", mounted.backing / place.name / "file"
    file.write_bytes(b"content")
    for act in (
        lambda: file.chmod(0o600),
        lambda: file.write_bytes(b"longer content"),
        lambda: os.truncate(file, 3),
        lambda: os.link(file, place / f"other{next(_NUMBERS)}"),
        lambda: os.utime(file, (5, 5)),
    ):
        statx(file)
        act()
        assert statx(file) == statx(below)
        assert statx(place) == statx(below.parent)
        assert file.stat()[3:] == below.stat()[3:]


def test_what_is_deleted_and_in_use_has_been_born(place: Path) -> None:
    directory = place / "directory"
    directory.mkdir()
    with opened(directory, os.O_PATH) as fd:
        directory.rmdir()
        mask, *_ = statx(fd)
        assert mask == BASIC | BTIME
        assert os.fstat(fd).st_nlink == 0


def test_a_change_behind_the_mount_is_seen_as_by_stat(volume: Path) -> None:
    source = volume / "shared"
    with trashd_mount(source, options=["coherence=shared", "timeout=0.1"], limit_s=SHARED_LIMIT_S) as mount:
        (source / "file").touch()
        statx(mount.path / "file")
        os.truncate(source / "file", 99)
        assert until(lambda: statx(mount.path / "file") == statx(source / "file"))
        assert (mount.path / "file").stat().st_size == 99


def test_who_asks_nobody_is_told_what_the_kernel_knows(mounted: Mounted, place: Path) -> None:
    file, kernel = place / "file", Kernel()
    file.touch()
    mounted.forget_all()
    with opened(file, os.O_PATH) as fd, opened(mounted.backing / place.name / "file", os.O_PATH) as below:
        assert kernel.statx(fd).btime_ns == 0
        born_ns = kernel.statx(fd, asks_server=True).btime_ns
        assert born_ns == kernel.statx(fd).btime_ns == kernel.statx(below).btime_ns


def test_a_sweep_by_birth_chooses_as_below(mounted: Mounted, place: Path) -> None:
    old = place / "old"
    old.touch()
    make_younger(place / "young", statx(old)[-2:])
    mounted.forget_all()
    for top in (place, mounted.backing / place.name):
        chosen = done_well("sweep", top, "--by", "btime", "--newer", top / "old", "--print").out
        assert chosen.split() == [str(top / "young")]
