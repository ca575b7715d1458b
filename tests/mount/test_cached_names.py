"""A name that was not there is remembered as missing, until it comes: however, by whomever, that is seen at once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.nodeids import NodeId
from fusefs.linux.syscalls import AT_FDCWD, renameat2
from fusefs.mount.places.counters import Counters
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.tables_lock import TablesLock
from tests.support.foreground_mount import Mounted
from tests.support.mount_and_backing import Sides, sides_on
from tests.support.trashd_command import done_well, swapped
from tests.support.vfs_without_mount import vfs_at

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


def is_there(path: Path) -> bool:
    return os.path.lexists(path) and path.name in os.listdir(path.parent)


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


def test_a_look_believes_no_name_that_was_changed_meanwhile(tmp_path: Path) -> None:
    with vfs_at(tmp_path, is_slow=True) as vfs:
        cache = DaemonCache(TablesLock(is_slow=True), vfs.nodes, Counters.in_memory(), 1 << 20, 60.0)
        look = cache.looking_ahead()
        root = vfs.nodes.get(NodeId(1))
        assert root is not None
        with cache.changes(names=[(root, b"changed")]):
            pass
        assert look.left_s(None, named=(root, b"changed")) == 0
        assert look.left_s(None, named=(root, b"other")) > 0
