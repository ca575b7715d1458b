"""What changes behind a shared mount is seen within its timeout, a second."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, fresh_mount, until
from tests.support.mount_and_backing import Sides
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
    (place.seen / "inner").mkdir(parents=True)
    (place.seen / "file").write_bytes(b"old content")
    for path in ("file", "inner"):
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
