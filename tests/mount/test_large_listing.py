"""A large directory that is read to and fro by telldir(3) and seekdir(3) while others change it on both sides.

What stands there throughout comes once from one end to the other. And a place in it is one for good: whoever goes back
there finds what came after it; but on an ext4, which loses places that others' names had. A plain directory keeps that
law too: it is the first of the places.

TRASHD_TEST_ENTRIES  that stand there (make soak-mount: a million)
"""

import ctypes
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import pytest

from tests.support.background_processes import workers
from tests.support.foreground_mount import trashd_mount
from tests.support.make_trees import fill
from tests.support.real_filesystems import gives_numbers_again, loop_volume, tmpfs_volume

pytestmark = pytest.mark.needs("root", "fuse", "loop")

N_STANDING = int(os.environ.get("TRASHD_TEST_ENTRIES", "4000"))
LIMIT_S = max(100.0, N_STANDING / 1000)
N_PLACES, N_SEEKS = 100, 300
WHERE = {
    "native": None,
    "exclusive": ["coherence=exclusive"],
    "shared": ["coherence=shared"],
    "slow": ["coherence=exclusive", "backing=slow"],
}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.opendir.restype = _libc.readdir64.restype = ctypes.c_void_p
_libc.telldir.restype = ctypes.c_long
for _name, *_types in (("readdir64",), ("telldir",), ("closedir",), ("seekdir", ctypes.c_long)):
    _libc[_name].argtypes = [ctypes.c_void_p, *_types]
_DIRENT = struct.Struct("=QqHB")


class Listing:
    """A directory, as the C library reads it."""

    def __init__(self, path: Path) -> None:
        self._at = _libc.opendir(os.fsencode(path))
        assert self._at

    def next(self) -> bytes | None:
        """A name that stands there throughout; None at the end."""
        while True:
            found = _libc.readdir64(self._at)
            if not found:
                return None
            name = ctypes.string_at(found + _DIRENT.size)
            if name.startswith(b"f"):
                return name

    def places(self) -> Iterator[tuple[int, bytes]]:
        """Each name, and a place before it."""
        place = 0
        while (name := self.next()) is not None:
            yield place, name
            place = int(_libc.telldir(self._at))

    def seek(self, place: int) -> None:
        _libc.seekdir(self._at, place)

    def close(self) -> None:
        _libc.closedir(self._at)


def change(top: Path, who: str) -> None:
    """Make, rename and remove names, each new."""
    for number in count():
        names = [top / f"{who}-{number}-{i}" for i in range(20)]
        for name in names:
            name.touch()
        names[0].rename(top / f"{who}-{number}-renamed")
        for name in names[1:]:
            name.unlink()
        (top / f"{who}-{number}-renamed").unlink()


@contextmanager
def directory(volume: Path, where: str) -> Iterator[list[Path]]:
    """Where it is read, and where it is changed."""
    source = volume / where
    source.mkdir()
    below = fill(source / "large", N_STANDING)
    options = WHERE[where]
    if options is None:
        yield [below, below]
    else:
        with trashd_mount(source, options=options, limit_s=LIMIT_S) as mounted:
            seen = mounted.path / "large"
            yield [seen, below if where == "shared" else seen]
    shutil.rmtree(source)


@pytest.fixture(scope="module", params=["tmpfs", "ext4", pytest.param("xfs", marks=pytest.mark.needs("xfs"))])
def volume(request: pytest.FixtureRequest) -> Iterator[Path]:
    n = N_STANDING + 1000
    if request.param == "tmpfs":
        made = tmpfs_volume("4g", [f"nr_inodes={n}"])
    else:
        made = loop_volume(request.param, 320 + n // 1000, ["-N", str(n)] if request.param == "ext4" else [])
    with made as path:
        yield path


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("where", WHERE)
def test_who_goes_back_to_a_place_finds_what_came_after_it(volume: Path, where: str) -> None:
    random = Random(where)
    with (
        directory(volume, where) as (seen, changed),
        workers([partial(change, seen, "here"), partial(change, changed, "there")]),
        closing(Listing(seen)) as listing,
    ):
        places = list(listing.places())
        assert len({name for _, name in places}) == len(places) == N_STANDING
        kept = random.sample(places, N_PLACES)
        for _ in range(0 if gives_numbers_again(volume) else N_SEEKS):
            place, name = random.choice(kept)
            listing.seek(place)
            assert listing.next() == name
        listing.seek(0)
        assert sum(1 for _ in iter(listing.next, None)) == N_STANDING
