"""O_APPEND writes at the end, wherever that is by then; other writes go where they say.

Whether it appends the kernel tells with each write: fcntl(2) may have changed it since the file was opened, and
memory that is mapped never does. Files that are passed through it writes itself.
"""

import fcntl
import mmap
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.background_processes import clients, ends
from tests.support.foreground_mount import trashd_mount
from tests.support.open_files import opened
from tests.support.oracle import SLOW
from tests.support.passthrough_files import LIMIT_S

pytestmark = pytest.mark.needs("root", "fuse")

SIZE = 8192
BEGUN = b"0" * SIZE
APPENDS = os.O_RDWR | os.O_APPEND
SHARED = ("coherence=shared", "passthrough=off")
N_RECORDS = int(os.environ.get("TRASHD_TEST_RECORDS", "1000"))
"""Of each who appends; `make soak-mount` asks for more."""


class File(NamedTuple):
    """One, not passed through."""

    seen: Path
    below: Path


@pytest.fixture(
    params=[
        ("coherence=exclusive",),
        ("coherence=exclusive", "backing=slow"),
        pytest.param(("coherence=shared",), marks=pytest.mark.takes_engine),
        pytest.param(("coherence=shared", "backing=slow"), marks=SLOW),
    ],
    ids=["exclusive", "slow", "shared", "shared-slow"],
)
def file(source: Path, request: pytest.FixtureRequest) -> Iterator[File]:
    (source / "file").write_bytes(BEGUN)
    with trashd_mount(source, options=(*request.param, "passthrough=off"), limit_s=LIMIT_S) as mounted:
        yield File(mounted.path / "file", source / "file")


def test_what_is_mapped_is_written_where_it_belongs(file: File) -> None:
    with opened(file.seen, APPENDS) as fd, mmap.mmap(fd, SIZE) as mapped:
        mapped[:3] = b"new"
        mapped.flush()
        os.write(fd, b"line")
        mapped[-3:] = b"end"
        mapped.flush()
    assert file.below.read_bytes() == b"new" + BEGUN[6:] + b"end" + b"line"


def test_who_no_longer_appends_writes_where_he_says(file: File) -> None:
    with opened(file.seen, APPENDS) as fd:
        os.write(fd, b"line")
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        os.pwrite(fd, b"new", 0)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        os.pwrite(fd, b"again", 0)
    assert file.below.read_bytes() == b"new" + BEGUN[3:] + b"lineagain"


def test_who_makes_a_file_to_append_to_it_does(file: File) -> None:
    log = file.seen.with_name("log")
    with opened(log, APPENDS | os.O_CREAT) as one, opened(log, APPENDS) as other:
        for n in range(3):
            os.pwrite(one, b"one%d" % n, 0)
            os.pwrite(other, b"two%d" % n, 0)
    assert file.below.with_name("log").read_bytes() == b"one0two0one1two1one2two2"


def test_what_may_only_grow_grows(file: File) -> None:
    subprocess.run(["chattr", "+a", file.below], check=True)
    try:
        with pytest.raises(PermissionError), opened(file.seen, os.O_WRONLY):
            pass
        with opened(file.seen, os.O_WRONLY | os.O_APPEND) as fd:
            os.write(fd, b"line")
    finally:
        subprocess.run(["chattr", "-a", file.below], check=True)
    assert file.below.read_bytes() == BEGUN + b"line"


def test_lines_of_both_sides_come_one_after_the_other(source: Path) -> None:
    """The kernel does not know of those behind the mount when it says where the end is."""
    with trashd_mount(source, options=SHARED, limit_s=LIMIT_S) as mounted:
        log, below = mounted.path / "log", source / "log"
        with opened(log, APPENDS | os.O_CREAT) as one, opened(below, APPENDS) as other:
            for n in range(20):
                os.write(one, b"in%02d" % n)
                os.write(other, b"by%02d" % n)
    assert below.read_bytes() == b"".join(b"in%02dby%02d" % (n, n) for n in range(20))


def test_nothing_is_lost_of_what_both_sides_append_at_a_time(source: Path) -> None:
    """A record may have another one in its middle: the kernel writes by the page of the end that it knows."""
    with trashd_mount(source, options=SHARED, limit_s=LIMIT_S) as mounted:
        (source / "log").touch()
        places = {b"1": mounted.path / "log", b"2": mounted.path / "log", b"3": source / "log"}

        def append(byte: bytes) -> None:
            with opened(places[byte], os.O_WRONLY | os.O_APPEND) as fd:
                for _ in range(N_RECORDS):
                    assert os.write(fd, byte * 100) == 100

        with clients([partial(append, byte) for byte in places]) as pids:
            assert [ends(pid) for pid in pids] == [0] * len(places)
        content = (source / "log").read_bytes()
    assert [content.count(byte) for byte in places] == [N_RECORDS * 100] * len(places)
    assert len(content) == N_RECORDS * 100 * len(places)


def test_what_is_appended_is_seen_by_who_has_it_mapped(file: File) -> None:
    with opened(file.seen, APPENDS) as fd, opened(file.seen) as other:
        os.write(fd, b"line")
        with mmap.mmap(fd, SIZE + 4) as mapped, mmap.mmap(other, SIZE + 4) as mapping:
            assert mapped[SIZE:] == mapping[SIZE:] == b"line"
            mapped[:3] = b"new"
            os.write(fd, b"more")
            assert os.pread(fd, 3, 0) == os.pread(other, 3, 0) == mapping[:3] == b"new"
            os.pwrite(other, b"by", SIZE)
            assert mapped[SIZE:] == b"byne"
    assert file.below.read_bytes() == b"new" + BEGUN[3:] + b"bynemore"
