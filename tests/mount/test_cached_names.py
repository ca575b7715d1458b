"""A name that was not there is remembered as missing, until it comes: however, by whomever, that is seen at once."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, renameat2
from tests.support.both_sides import Sides, sides_on
from tests.support.foreground_mount import Mounted
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount
from tests.support.trashd_command import done_well, swapped

pytestmark = pytest.mark.needs("root", "fuse", "loop")

STRANGER = 4712
HOUR, SLOW = "timeout=3600", "backing=slow"
MOUNTS = {
    "exclusive": ["coherence=exclusive"],
    "shared": ["coherence=shared", HOUR],
    "in threads": ["coherence=exclusive", SLOW],
    "in threads, shared, tiny": ["coherence=shared", HOUR, SLOW, "cache_size=4K"],
}
_NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=MOUNTS)
def mount(request: pytest.FixtureRequest) -> Iterator[tuple[Mounted, Sides]]:
    with sides_on("ext4", MOUNTS[request.param]) as both:
        yield both


@pytest.fixture
def place(mount: tuple[Mounted, Sides]) -> Path:
    """A directory with things in it and beside it that can get the name `new`."""
    top = mount[1].seen / f"place{next(_NUMBERS)}"
    for name in ("d", "other/new", "empty"):
        (top / name).mkdir(parents=True)
    for path in (top, top / "d", top / "other"):
        path.chmod(0o777)
    for name in ("d/file", "other/file", "other/new/inside"):
        (top / name).write_bytes(b"content")
    return top


def rename(top: Path, old: str, new: str, flags: int = 0) -> None:
    renameat2(AT_FDCWD, bytes(top / old), AT_FDCWD, bytes(top / new), flags)


def create_in_open_directory(top: Path) -> None:
    fd = os.open(top / "d", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    finally:
        os.close(fd)


def create_as_another(top: Path) -> None:
    as_user(STRANGER, lambda: (top / "d/new").write_bytes(b"his") and None)


def create_in_another_program(top: Path) -> None:
    subprocess.run([sys.executable, "-c", "open('d/new', 'w')"], cwd=top, check=True)


def create_through_another_mount(top: Path) -> None:
    elsewhere = top / "empty"
    with bind_mount(top / "d", elsewhere):
        (elsewhere / "new").write_bytes(b"")


def rename_the_directory(top: Path) -> None:
    rename(top, "d", "away")
    rename(top, "other", "d")


COMINGS: dict[str, Callable[[Path], object]] = {
    "create": lambda top: (top / "d/new").write_bytes(b"new"),
    "create exclusively": lambda top: os.close(os.open(top / "d/new", os.O_CREAT | os.O_EXCL)),
    "create in an open directory": create_in_open_directory,
    "create as another user": create_as_another,
    "create in another program": create_in_another_program,
    "create through another mount": create_through_another_mount,
    "mkdir": lambda top: (top / "d/new").mkdir(),
    "mknod": lambda top: os.mkfifo(top / "d/new"),
    "symlink": lambda top: (top / "d/new").symlink_to("nowhere"),
    "link": lambda top: os.link(top / "d/file", top / "d/new"),
    "link from elsewhere": lambda top: os.link(top / "other/file", top / "d/new"),
    "rename": lambda top: rename(top, "d/file", "d/new"),
    "rename from elsewhere": lambda top: rename(top, "other/file", "d/new"),
    "rename of a directory": lambda top: rename(top, "other", "d/new"),
    "rename of a directory that has it": rename_the_directory,
    "exchange with a directory that has it": lambda top: rename(top, "d", "other", RENAME_EXCHANGE),
}


def is_there(path: Path) -> bool:
    return os.path.lexists(path) and path.name in os.listdir(path.parent)


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["known to the kernel", "forgotten by the kernel"])
@pytest.mark.parametrize("coming", COMINGS)
def test_a_missing_name_is_there_when_it_comes(
    mount: tuple[Mounted, Sides], place: Path, coming: str, is_forgotten: bool
) -> None:
    mounted, _ = mount
    for _ in range(2):
        assert not is_there(place / "d/new")
    if is_forgotten:
        mounted.forget_all()
    COMINGS[coming](place)
    assert os.path.lexists(place / "d/new")
    assert is_there(place / "d/new")
    mounted.forget_all()
    assert is_there(place / "d/new")


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["known to the kernel", "forgotten by the kernel"])
@pytest.mark.parametrize("name", ["d/file", "other/new", "empty"])
def test_a_name_that_comes_and_goes_is_missing_when_it_has_gone(
    mount: tuple[Mounted, Sides], place: Path, name: str, is_forgotten: bool
) -> None:
    mounted, _ = mount
    path = place / name
    for _ in range(3):
        assert is_there(path)
        rename(place, name, "away")
        if is_forgotten:
            mounted.forget_all()
        assert not is_there(path)
        mounted.forget_all()
        assert not os.path.lexists(path)
        rename(place, "away", name)


def test_what_is_missing_in_a_swapped_directory_is_there_when_it_is_restored(
    mount: tuple[Mounted, Sides], place: Path
) -> None:
    """A swap is an exchange of directories; all names below change what they mean."""
    mounted, both = mount
    victim = place / "other"
    for is_forgotten in (False, True):
        assert is_there(victim / "new/inside")
        assert not os.path.lexists(victim / "absent")
        identifier = str(swapped(victim)["id"])
        if is_forgotten:
            mounted.forget_all()
        assert os.listdir(victim) == []
        for name in ("new", "new/inside", "file"):
            assert not os.path.lexists(victim / name)
        done_well("restore", "--volume", both.seen, identifier)
        if is_forgotten:
            mounted.forget_all()
        assert sorted(os.listdir(victim)) == ["file", "new"]
        assert is_there(victim / "new/inside")


def test_a_name_too_long_is_refused_and_nothing_else(place: Path) -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="too long"):
            os.lstat(place / "d" / ("x" * 256))
        assert not os.path.lexists(place / "d" / ("x" * 255))
        assert is_there(place / "d/file")


def test_below_a_file_is_no_missing_name(place: Path) -> None:
    for _ in range(2):
        with pytest.raises(NotADirectoryError):
            os.lstat(place / "d/file/below")
    (place / "d/file").unlink()
    with pytest.raises(FileNotFoundError):
        os.lstat(place / "d/file/below")
    (place / "d/file").mkdir()
    (place / "d/file/below").touch()
    assert is_there(place / "d/file/below")
