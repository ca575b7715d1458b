"""Listings under change: no entry twice, none lost that stood there throughout."""

import os
from collections import Counter
from pathlib import Path

import pytest

from fusefs.linux.getdents import read_more
from tests.support.background_processes import workers
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.open_files import read_entries
from tests.support.oracle import Oracle
from tests.support.oracle_subjects import Native

pytestmark = pytest.mark.needs("root", "fuse", "loop")

N_STANDING = 1500


def standing() -> list[bytes]:
    return [b"standing-%d" % i for i in range(N_STANDING)]


def fill(s: Native) -> None:
    s.mkdir(b"d")
    for name in standing():
        os.close(os.open(s.top + b"/d/" + name, os.O_CREAT | os.O_WRONLY))


def assert_whole(names: list[bytes]) -> None:
    count = Counter(names)
    assert not [name for name, n in count.items() if n > 1]
    assert not [name for name in standing() if name not in count]


def test_half_read_listing_goes_on_after_what_it_read_was_removed(oracle: Oracle) -> None:
    """What rm -r does: read some, remove them, read on."""
    for s in (oracle.native, oracle.mounted):
        fill(s)
        fd = os.open(s.top + b"/d", os.O_RDONLY | os.O_DIRECTORY)
        try:
            names: list[bytes] = []
            while some := read_entries(fd, 1024):
                for name, _ in some:
                    names.append(name)
                    if name not in (b".", b".."):
                        os.unlink(name, dir_fd=fd)
                os.close(os.open(b"made-%d" % len(names), os.O_CREAT | os.O_WRONLY, dir_fd=fd))
            assert_whole(names)
        finally:
            os.close(fd)


def test_offset_stays_valid_when_names_before_and_after_it_change(oracle: Oracle) -> None:
    """telldir(3) and seekdir(3)."""
    s = oracle.mounted
    fill(s)
    fd = os.open(s.top + b"/d", os.O_RDONLY | os.O_DIRECTORY)
    try:
        first = [entry for _ in range(20) for entry in read_entries(fd, 1024)]
        offset = first[-1][1]
        rest = [name for some in iter(lambda: read_entries(fd, 1024), []) for name, _ in some]
        for name, _ in first[5:]:
            if name not in (b".", b".."):
                s.unlink(b"d/" + name)
        s.put(b"d/made")
        oracle.mount.forget_all()
        os.lseek(fd, offset, os.SEEK_SET)
        again = [name for some in iter(lambda: read_entries(fd, 1024), []) for name, _ in some]
        assert [name for name in again if name != b"made"] == rest
        os.lseek(fd, 0, os.SEEK_SET)
        rewound = [name for some in iter(lambda: read_entries(fd, 1024), []) for name, _ in some]
        assert sorted(rewound) == sorted(
            [b".", b"..", b"made", *(name for name, _ in first[:5] if name > b".."), *rest]
        )
    finally:
        os.close(fd)


def test_half_read_listing_of_a_directory_that_was_removed_behind_the_mount_ends(volume: Path) -> None:
    """A restore does that to an empty directory that is being listed."""
    (volume / "removed/d").mkdir(parents=True)
    with trashd_mount(volume / "removed") as mount:
        fd = os.open(mount.backing / "d", os.O_RDONLY | os.O_DIRECTORY)
        offsets = [offset for _, offset in read_entries(fd, 1024)]
        os.close(fd)
        fd = os.open(mount.path / "d", os.O_RDONLY | os.O_DIRECTORY)
        try:
            (mount.backing / "d").rmdir()
            for offset in offsets:
                os.lseek(fd, offset, os.SEEK_SET)
                with pytest.raises(FileNotFoundError):  # which libc takes for the end
                    read_more(fd)
        finally:
            os.close(fd)


def read(path: bytes) -> bytes:
    return Path(os.fsdecode(path)).read_bytes()


def test_rename_race(oracle: Oracle) -> None:
    """While two subtrees change places, a path means one or the other, whole: never nothing, never a mixture."""
    s = oracle.mounted
    for name in (b"a", b"b"):
        s.mkdir(name)
        s.mkdir(name + b"/x")
        s.put(name + b"/x/who", name * 5000)
        s.put(name + b"/x/size", name)
    a, b = s.top + b"/a", s.top + b"/b"

    def exchange() -> None:
        while True:
            s.rename(b"a", b"b", 2)
            s.rename(b"a/x", b"b/x", 2)

    with workers([exchange]):
        for i in range(600):
            fd = os.open((a if i % 2 else b) + b"/x", os.O_RDONLY | os.O_DIRECTORY)
            try:
                who = read(b"/proc/self/fd/%d/who" % fd)
                assert who == who[:1] * 5000
                assert read(b"/proc/self/fd/%d/size" % fd) == who[:1]
            finally:
                os.close(fd)
            if i % 50 == 0:
                oracle.mount.forget_all()
            assert read(a + b"/x/who")[:1] in b"ab"


def test_forget_race(oracle: Oracle) -> None:
    """Names looked up while they are being forgotten mean what they meant."""
    s = oracle.mounted
    for i in range(200):
        s.put(b"%d" % i, b"%d" % i)

    def look(step: int) -> None:
        while True:
            for i in range(0, 200, step):
                assert read(b"%s/%d" % (s.top, i)) == b"%d" % i

    def replace() -> None:
        while True:
            for i in range(200):
                s.put(b"new", b"%d" % i)
                s.rename(b"new", b"%d" % i)

    with workers([lambda: look(1), lambda: look(3), replace]):
        forget_often(oracle.mount)


def forget_often(mount: Mounted) -> None:
    for _ in range(300):
        mount.forget_all()
