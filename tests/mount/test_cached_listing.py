"""A listing is remembered whole or not at all: what came while it was read is in the next one, what went is not."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.foreground_mount import Mounted
from tests.support.mount_and_backing import Sides, sides_on
from tests.support.open_files import read_entries

pytestmark = pytest.mark.needs("root", "fuse", "loop")

HOUR, SLOW = "timeout=3600", "backing=slow"
MOUNTS = {
    "exclusive": ["coherence=exclusive"],
    "shared": ["coherence=shared", HOUR],
    "in threads": ["coherence=exclusive", SLOW],
    "in threads, tiny": ["coherence=exclusive", SLOW, "cache_size=4K"],
    "in threads, shared": ["coherence=shared", HOUR, SLOW],
}
N_STANDING = 300  # several replies, and some 10 KiB of names
_NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=MOUNTS)
def mount(request: pytest.FixtureRequest) -> Iterator[tuple[Mounted, Sides]]:
    with sides_on("ext4", MOUNTS[request.param]) as both:
        yield both


@pytest.fixture
def place(mount: tuple[Mounted, Sides]) -> Sides:
    """A directory of some size, and one beside it."""
    below = mount[1].below(f"place{next(_NUMBERS)}")
    for name in ("d", "beside"):
        (below.behind / name).mkdir(parents=True)  # which is not known yet
    (below.behind / "beside/new").touch()
    for i in range(N_STANDING):
        (below.behind / f"d/standing-{i:020}").touch()
    return below


def names(fd: int, size: int = 2048) -> list[str]:
    return [os.fsdecode(name) for name, _offset in read_entries(fd, size)]


def rest(fd: int) -> list[str]:
    """What is left to be read."""
    return [name for some in iter(lambda: names(fd, 32768), []) for name in some if name not in (".", "..")]


def assert_right(mounted: Mounted, place: Sides) -> None:
    """The listing is what is there: as it is remembered, and when the kernel has forgotten it."""
    for _ in range(3):
        right = sorted(os.listdir(place.behind / "d"))
        for _ in range(2):
            assert sorted(os.listdir(place.seen / "d")) == right
        with os.scandir(place.seen / "d") as entries:
            assert sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False)) == right
        mounted.forget_all()


FIRST, LAST = f"d/standing-{0:020}", f"d/standing-{N_STANDING - 1:020}"
CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda top: (top / "d/made").touch(),
    "unlink": lambda top: (top / FIRST).unlink(),
    "unlink another": lambda top: (top / LAST).unlink(),
    "rename": lambda top: (top / FIRST).rename(top / "d/renamed"),
    "rename over": lambda top: (top / FIRST).rename(top / LAST),
    "rename out": lambda top: (top / LAST).rename(top / "out"),
    "rename in": lambda top: (top / "beside/new").rename(top / "d/in"),
    "link": lambda top: os.link(top / FIRST, top / "d/link"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_while_a_listing_is_read_is_in_the_next(
    mount: tuple[Mounted, Sides], place: Sides, change: str
) -> None:
    for is_known in (False, True):
        if is_known:
            os.listdir(place.seen / "d")
        fd = os.open(place.seen / "d", os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert names(fd)
            CHANGES[change](place.seen)
            rest(fd)
        finally:
            os.close(fd)
        assert_right(mount[0], place)
        if not is_known:
            for undo in (place.seen / "d").iterdir():
                if not undo.name.startswith("standing"):
                    undo.unlink()
            for name in (FIRST, LAST, "beside/new"):
                (place.seen / name).touch()


def test_listings_read_by_halves_make_no_whole(mount: tuple[Mounted, Sides], place: Sides) -> None:
    """One reads the beginning, another the end; one seeks over the middle."""
    one, two, three = (os.open(place.seen / "d", os.O_RDONLY | os.O_DIRECTORY) for _ in range(3))
    try:
        beginning = names(one)
        (place.seen / "d" / beginning[-1]).unlink()
        names(two)
        (place.seen / "d/made").touch()
        names(three)
        middle = os.lseek(three, 0, os.SEEK_CUR)
        rest(two)
        (place.seen / "d/made").unlink()
        os.lseek(one, middle, os.SEEK_SET)
        rest(one)
        rest(three)
    finally:
        for fd in (one, two, three):
            os.close(fd)
    assert_right(mount[0], place)


def test_a_rewound_listing_is_a_new_one(mount: tuple[Mounted, Sides], place: Sides) -> None:
    fd = os.open(place.seen / "d", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert len(rest(fd)) == N_STANDING
        for i in range(3):
            (place.seen / f"d/made-{i}").touch()
            if i == 1:
                mount[0].forget_all()
            os.lseek(fd, 0, os.SEEK_SET)
            assert len(rest(fd)) == N_STANDING + i + 1
    finally:
        os.close(fd)
    assert_right(mount[0], place)


def test_a_listing_left_in_the_middle_is_none(mount: tuple[Mounted, Sides], place: Sides) -> None:
    for _ in range(5):
        fd = os.open(place.seen / "d", os.O_RDONLY | os.O_DIRECTORY)
        assert names(fd, 300)
        os.close(fd)
    assert_right(mount[0], place)


def test_a_removed_directory_lists_nothing(mount: tuple[Mounted, Sides], place: Sides) -> None:
    fd = os.open(place.seen / "beside", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.listdir(fd) == ["new"]
        (place.seen / "beside/new").unlink()
        (place.seen / "beside").rmdir()
        os.lseek(fd, 0, os.SEEK_SET)
        assert os.listdir(fd) == []
        (place.seen / "beside").mkdir()
        (place.seen / "beside/other").touch()
        assert os.listdir(place.seen / "beside") == ["other"]
        mount[0].forget_all()
        assert os.listdir(place.seen / "beside") == ["other"]
    finally:
        os.close(fd)
