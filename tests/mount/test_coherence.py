"""What changes behind a shared mount, data too, is seen within its timeout, a second."""

import errno
import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.syscalls import fallocate
from tests.support.background_processes import clients, ends
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, fresh_mount, trashd_mount, until
from tests.support.mount_and_backing import Sides
from tests.support.open_files import opened, waits_in_the_kernel
from tests.support.proc_stat import stop
from tests.support.real_filesystems import ALL_FILESYSTEMS, loop_volume, tmpfs_volume

pytestmark = pytest.mark.needs("root", "fuse", "loop")


LIMIT_S = 30.0


@pytest.fixture(scope="module", params=ALL_FILESYSTEMS)
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    made = tmpfs_volume() if request.param == "tmpfs" else loop_volume(request.param, 64)
    with fresh_mount("coherence=shared", made=made, limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def place(mounted: Mounted, own_name: str) -> Sides:
    """A directory of its own, known to the kernel, with a file and a directory that are known too."""
    place = Sides(mounted.path, mounted.backing).below(own_name)
    (place.mount_path / "inner").mkdir(parents=True)
    (place.mount_path / "file").write_bytes(b"old content")
    for path in ("file", "inner"):
        (place.mount_path / path).stat()
    (place.mount_path / "file").read_bytes()
    return place


def test_who_is_in_a_directory_that_left_and_came_back_has_not_noticed(place: Sides) -> None:
    """A name that means the same as before is no other name: the working directory keeps its path."""
    with subprocess.Popen(
        ["bash", "-c", "read -r; /bin/pwd"],
        cwd=place.mount_path / "inner",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as inside:
        (place.behind / "inner").rename(place.behind / "away")
        (place.behind / "away").rename(place.behind / "inner")
        (place.behind / "told").touch()
        assert until((place.mount_path / "told").exists)
        assert inside.communicate(b"\n", LIMIT_S)[0] == os.fsencode(place.mount_path / "inner") + b"\n"


def test_written_content_is_seen_by_who_has_it_open_and_mapped(place: Sides) -> None:
    with (place.mount_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:3] == b"old"
        with (place.behind / "file").open("r+b") as other:
            other.write(b"new")
        assert until(lambda: os.pread(file.fileno(), 3, 0) == b"new")
        assert until(lambda: mapped[:3] == b"new")


@pytest.mark.takes_engine  # which passes it through; else the kernel has no reason to doubt its pages
def test_content_is_seen_though_size_and_time_are_as_before(place: Sides) -> None:
    before = (place.behind / "file").stat()
    with (place.mount_path / "file").open("rb") as file, (place.behind / "file").open("r+b", buffering=0) as other:
        file.read()
        other.write(b"new")
        os.utime(other.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
        assert until(lambda: os.pread(file.fileno(), 3, 0) == b"new")


N_ROUNDS = 30


class File(NamedTuple):
    """One, on both sides."""

    data_mounted: Mounted
    seen: Path
    behind: Path


@pytest.fixture(scope="module", params=["auto", "off"])
def data_mounted(volume: Path, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    options = ["coherence=shared", f"passthrough={request.param}"]
    with trashd_mount(volume / request.param, options=options, limit_s=SHARED_LIMIT_S) as data_mounted:
        yield data_mounted


@pytest.fixture
def file(data_mounted: Mounted, request: pytest.FixtureRequest) -> File:
    name = request.node.name
    (data_mounted.backing / name).touch()
    return File(data_mounted, data_mounted.path / name, data_mounted.backing / name)


def be_told(fd: int, size: int) -> None:
    """How long a file is. Raises  OSError: it is not"""
    if os.fstat(fd).st_size != size:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.needs("passthrough")
@pytest.mark.takes_engine
def test_who_was_told_how_long_a_file_is_copies_to_its_end(volume: Path) -> None:
    """That is not asked for when something is copied: the kernel takes what it has, and it has what it was told."""
    with trashd_mount(volume / "source", options=["coherence=shared"]) as data_mounted:
        (data_mounted.backing / "file").touch()
        with (
            opened(data_mounted.path / "file", os.O_RDWR) as fd,
            opened(data_mounted.backing / "file", os.O_RDWR) as behind,
        ):
            for _ in range(N_ROUNDS):
                os.ftruncate(fd, 100)
                assert os.fstat(fd).st_size == 100
                stop(data_mounted.pid)
                fallocate(behind, 0, 0, 5000)
                with clients([partial(be_told, fd, 5000)]) as (pid,):
                    assert until(lambda: waits_in_the_kernel(pid))
                    os.kill(data_mounted.pid, signal.SIGCONT)
                    assert ends(pid) == 0
                assert os.copy_file_range(fd, fd, 4000, 1000, 6000) == 4000
                assert os.fstat(fd).st_size == os.fstat(behind).st_size == 10_000


def copy_all(fd: int, to: int, size: int) -> int:
    return os.copy_file_range(fd, to, size, 0, 0)


def send_all(fd: int, to: int, size: int) -> int:
    return os.sendfile(to, fd, 0, size)


def read_all(fd: int, _to: int, size: int) -> int:
    return len(os.pread(fd, size, 0))


@pytest.mark.parametrize("act", [copy_all, send_all, read_all])
def test_what_was_added_behind_is_there_for_who_has_seen_how_long_it_is(
    file: File, act: Callable[[int, int, int], int]
) -> None:
    with opened(file.seen, os.O_RDWR) as fd, opened(file.behind, os.O_RDWR) as behind:
        os.pwrite(fd, b"begun", 0)
        to = os.open(file.seen.with_name("copy"), os.O_RDWR | os.O_CREAT)
        os.pwrite(behind, b"and added", 5)
        is_there = until(lambda: os.fstat(fd).st_size == 14 and act(fd, to, 100) == 14)
        os.close(to)
        assert is_there
