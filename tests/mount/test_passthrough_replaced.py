"""The daemon is killed, and another takes its place: clients with open files go on, and nothing is lost or kept."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.background_mounts import backing_of, daemon_of, kill_daemon, mount, our_mount, workbench
from tests.support.background_processes import workers
from tests.support.foreground_mount import n_fds_beside_rings, until
from tests.support.open_files import opened
from tests.support.passthrough_files import CONTENT, SIZE, free_bytes, put, space_comes_back, works_on
from tests.support.trashd_command import done_well

pytestmark = [pytest.mark.needs("root", "fuse", "passthrough"), pytest.mark.takes_engine]

LIMIT_S = 100.0


class Place(NamedTuple):
    """A mount of the background, and what is told to `trashd mount` for it."""

    words: tuple[Path, ...]

    @property
    def path(self) -> Path:
        return self.words[-1]

    def mount(self) -> None:
        mount(*self.words, "--coherence", "exclusive", "--passthrough", "on")

    def kill(self) -> None:
        kill_daemon(self.path)

    def replace(self) -> None:
        mount("--replace", *self.words, "--coherence", "exclusive", "--passthrough", "on")

    def n_fds(self) -> int:
        return n_fds_beside_rings(daemon_of(self.path))


@pytest.fixture(params=["beside", "over itself"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with workbench(LIMIT_S) as bench:
        source = bench / "source"
        place = Place((source,) if request.param == "over itself" else (source, bench / "target"))
        place.mount()
        yield place


def test_who_had_a_file_open_reads_and_writes_on(place: Place) -> None:
    with opened(put(place.path / "file"), os.O_RDWR) as fd, mmap.mmap(fd, SIZE) as mapped:
        for act in (place.kill, place.replace):
            act()
            assert os.pread(fd, SIZE, 0) == CONTENT
            assert os.pwrite(fd, b"written", 0) == 7
            assert mapped[:7] == b"written"
            mapped[:7] = CONTENT[:7]
            assert os.pread(fd, 7, 0) == CONTENT[:7]


def test_old_and_new_handles_are_of_one_file(place: Place) -> None:
    with opened(put(place.path / "file"), os.O_RDWR) as old:
        place.kill()
        place.replace()
        with opened(place.path / "file", os.O_RDWR) as new, mmap.mmap(new, SIZE) as mapped:
            os.pwrite(old, b"old", 0)
            assert mapped[:3] == os.pread(new, 3, 0) == b"old"
            os.pwrite(new, b"new", SIZE)
            assert os.pread(old, 3, SIZE) == b"new"


def test_no_line_is_lost_of_who_appends_all_the_while(place: Place) -> None:
    log = place.path / "log"
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.close(os.dup(fd))  # from the first close on the kernel sends no message for one

    def append() -> None:
        number = 0
        while True:
            assert os.write(fd, b"%08d\n" % number) == 9
            number += 1

    def grows() -> bool:
        before = os.fstat(beside).st_size
        return until(lambda: os.fstat(beside).st_size > before + 9_000)

    with opened(backing_of(place.path) / "log", os.O_RDONLY) as beside:
        with workers([append]):
            assert grows()
            place.kill()
            assert grows()
            place.replace()
            assert grows()
        lines = log.read_bytes().split()
        assert lines == [b"%08d" % number for number in range(len(lines))]
        assert len(lines) * 9 == os.fstat(beside).st_size
    os.close(fd)


def test_the_new_daemon_keeps_nothing_of_what_is_opened_beside_old_handles(place: Place) -> None:
    def use(n: int) -> int:
        for _ in range(n):
            with opened(place.path / "file", os.O_RDWR) as fd:
                works_on(fd)
        return place.n_fds()

    with space_comes_back(place.path), opened(put(place.path / "file"), os.O_RDWR):
        place.kill()
        place.replace()
        n_fds = use(1)
        use(30)
        assert until(lambda: place.n_fds() <= n_fds)
        (place.path / "file").unlink()


def test_what_is_unlinked_in_the_new_mount_goes_with_the_old_handle(place: Place) -> None:
    with space_comes_back(place.path):
        with opened(put(place.path / "file"), os.O_RDWR) as fd:
            place.kill()
            place.replace()
            (place.path / "file").unlink()
            taken = free_bytes(place.path)
            assert os.pread(fd, SIZE, 0) == CONTENT
        assert until(lambda: free_bytes(place.path) > taken + SIZE // 2)


def test_the_new_mount_is_unmounted_though_old_handles_are_open(place: Place) -> None:
    with opened(put(place.path / "file"), os.O_RDWR) as fd:
        place.kill()
        place.replace()
        done_well("umount", place.path)
        assert our_mount(place.path) is None
        assert os.pread(fd, SIZE, 0) == CONTENT
        os.pwrite(fd, b"still", 0)
    assert (place.words[0] / "file").read_bytes()[:5] == b"still"


def test_what_is_written_by_an_old_handle_is_told_in_the_new_mount_though_it_believes_itself_alone(
    place: Place,
) -> None:
    with opened(put(place.path / "file"), os.O_RDWR) as old:
        place.kill()
        place.replace()
        with opened(place.path / "file", os.O_RDONLY) as new:
            assert os.fstat(new).st_size == SIZE
            os.pwrite(old, b"end", SIZE)
            assert until(lambda: os.fstat(new).st_size == SIZE + 3)
            assert (place.path / "file").stat().st_size == SIZE + 3
