"""What changes behind a shared mount is seen within its timeout, a second; it keeps no client and no end waiting."""

from __future__ import annotations

import itertools
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, fresh_mount, until
from tests.support.mount_and_backing import Sides
from tests.support.real_filesystems import ALL_FILESYSTEMS, loop_volume, tmpfs_volume

pytestmark = pytest.mark.needs("root", "fuse", "loop")

SHARED = ("coherence=shared",)
N_CLIENTS = 4
LIMIT_S = 30.0
_NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=ALL_FILESYSTEMS)
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    made = tmpfs_volume() if request.param == "tmpfs" else loop_volume(request.param, 64)
    with fresh_mount(*SHARED, made=made, limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def place(mounted: Mounted) -> Sides:
    """A directory of its own, known to the kernel, with a file and a directory that are known too."""
    return known_place(mounted)


def known_place(mounted: Mounted) -> Sides:
    name = f"place{next(_NUMBERS)}"
    place = Sides(mounted.path / name, mounted.backing / name)
    place.seen.mkdir()
    (place.seen / "file").write_bytes(b"old content")
    (place.seen / "inner").mkdir()
    (place.seen / "fresh").mkdir()
    (place.seen / "inner" / "child").write_bytes(b"child")
    for path in ("file", "inner", "inner/child"):
        (place.seen / path).stat()
    (place.seen / "file").read_bytes()
    return place


def test_who_is_in_a_directory_that_left_and_came_back_has_not_noticed(place: Sides) -> None:
    """A name that means the same as before is no other name: the working directory keeps its path."""
    with subprocess.Popen(
        ["bash", "-c", "read -r; /bin/pwd"], cwd=place.seen / "inner", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as inside:
        (place.behind / "inner").rename(place.behind / "away")
        (place.behind / "away").rename(place.behind / "inner")
        (place.behind / "told").touch()
        assert until((place.seen / "told").exists)
        assert inside.communicate(b"\n", LIMIT_S)[0] == os.fsencode(place.seen / "inner") + b"\n"


def test_written_content_is_seen_by_who_has_it_open_and_mapped(place: Sides) -> None:
    with (place.seen / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:3] == b"old"
        with (place.behind / "file").open("r+b") as other:
            other.write(b"new")
        assert until(lambda: os.pread(file.fileno(), 3, 0) == b"new")
        assert until(lambda: mapped[:3] == b"new")


@pytest.mark.takes_engine  # which passes it through; else the kernel has no reason to doubt its pages
def test_content_is_seen_though_size_and_time_are_as_before(place: Sides) -> None:
    before = (place.behind / "file").stat()
    with (place.seen / "file").open("rb") as file, (place.behind / "file").open("r+b", buffering=0) as other:
        file.read()
        other.write(b"new")
        os.utime(other.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
        assert until(lambda: os.pread(file.fileno(), 3, 0) == b"new")


# Clients on both sides.


_CLIENT = """
import errno, os, sys
top, number = os.fsencode(sys.argv[1]), int(sys.argv[2])
wanted = {errno.ENOENT, errno.EEXIST, errno.ESTALE}
print("begun", flush=True)
for i in range(10**9):
    name = b"%s/name%d-%d" % (top, i % 5, number)
    try:
        if number % 2:
            os.listdir(top)
            os.stat(name)
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        os.rename(name, name + b"-renamed")
        os.unlink(name + b"-renamed")
    except OSError as error:
        if error.errno not in wanted:
            sys.exit(error.errno)
    if i % 10 == 0:
        print(i, flush=True)
"""


@contextmanager
def clients(*tops: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Busy in directories, with the same names, until an unexpected error: their exit code."""
    started = [
        subprocess.Popen([sys.executable, "-c", _CLIENT, top, str(i)], stdout=subprocess.PIPE)
        for i, top in enumerate(tops)
    ]
    try:
        yield started
    finally:
        for client in started:
            client.kill()
        for client in started:
            client.communicate()


def goes_on(client: subprocess.Popen[bytes], n: int = 5) -> bool:
    """Whether a client comes further, and further."""
    assert client.stdout is not None
    for _ in range(n):
        if not select.select([client.stdout], [], [], LIMIT_S)[0] or not os.read(client.stdout.fileno(), 1000):
            return False
    return True


def both_sides(mounted: Mounted) -> list[Path]:
    """A directory: through the mount for all clients but one, and behind it."""
    place = known_place(mounted)
    return [place.seen] * N_CLIENTS + [place.behind]


def test_clients_go_on_in_a_directory_that_changes_behind_them() -> None:
    with fresh_mount(*SHARED) as mounted, clients(*both_sides(mounted)) as started:
        for client in started * 2:
            assert goes_on(client), client.poll()


def test_an_unmount_is_not_held_up_by_changes_that_pour_in() -> None:
    with fresh_mount(*SHARED, expect_end=True) as mounted:
        place = known_place(mounted)
        with clients(place.behind) as (behind,):
            assert goes_on(behind)
            os.listdir(place.seen)
            pid_fd = os.pidfd_open(mounted.pid)
            subprocess.run(["umount", mounted.path], check=True)
            assert select.select([pid_fd], [], [], LIMIT_S)[0]
            os.close(pid_fd)
            assert goes_on(behind)
