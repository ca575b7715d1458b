"""A filesystem mounted inside SRC that never answers keeps waiting its own callers, and no others."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.background_processes import LIMIT_S, clients, ends, in_time, is_ended
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.fuse_silent import silent_fuse
from tests.support.open_files import waits_in_the_kernel
from tests.support.real_filesystems import bind_mount, overlay_volume, tmpfs_volume
from tests.support.trashd_command import trashd

pytestmark = pytest.mark.needs("root", "fuse")

HOW = {
    "shared": ["coherence=shared"],
    "exclusive": ["coherence=exclusive"],
}
GONE = {*DAEMON_GONE, errno.EIO, errno.EINTR, errno.ESTALE, errno.ENOENT}
N_FILES = 5
N_MANY = 300


class Place(NamedTuple):
    """A mount, and where in it a filesystem may be mounted."""

    mounted: Mounted
    inner: Path

    @property
    def top(self) -> Path:
        return self.mounted.path


@contextmanager
def source_directory() -> Iterator[Path]:
    with tmpfs_volume() as volume:
        (volume / "source" / "inner").mkdir(parents=True)
        for i in range(N_FILES):
            (volume / "source" / f"file-{i}").write_bytes(b"content")
        yield volume / "source"


@contextmanager
def served(how: str = "shared", *, expect_end: bool = False) -> Iterator[Place]:
    with (
        source_directory() as source,
        trashd_mount(source, options=[*HOW[how], "backing=local"], limit_s=90, expect_end=expect_end) as mounted,
    ):
        yield Place(mounted, source / "inner")


STUCK: dict[str, Callable[[Path], object]] = {
    "stat": os.stat,
    "list": os.listdir,
    "look for a name": lambda inner: (inner / "name").lstat(),
    "create": lambda inner: (inner / "new").touch(),
    "remove": lambda inner: (inner / "name").unlink(),
    "move there": lambda inner: (inner.parent / "file-4").rename(inner / "moved"),
    "chmod": lambda inner: inner.chmod(0o700),
    "xattr": lambda inner: os.getxattr(inner, "user.x"),
    "sync": lambda inner: os.fsync(os.open(inner, os.O_RDONLY | os.O_DIRECTORY)),
}


def others_work(top: Path) -> None:
    """All that does not ask the filesystem in there: in the very directory that it is mounted in, too."""
    (top / "file-0").stat()
    for name in os.listdir(top):
        if name != "inner":
            (top / name).lstat()
    (top / "made").write_bytes(b"made")
    (top / "made").rename(top / "renamed")
    (top / "renamed").unlink()
    assert (top / "file-1").read_bytes() == b"content"
    with pytest.raises(FileNotFoundError):
        (top / "missing").lstat()


def asking(act: Callable[[Path], object], inner: Path) -> Callable[[], object]:
    """What a client does. It must not have what serves the filesystem in there: that ends when the test lets it go."""

    def ask() -> None:
        os.closerange(3, 1 << 12)
        act(inner)

    return ask


@contextmanager
def stuck(place: Place, act: Callable[[Path], object]) -> Iterator[int]:
    """A client that asks it, and waits."""
    with clients([asking(act, place.top / "inner")]) as (client,):
        assert until(lambda: waits_in_the_kernel(client), LIMIT_S)
        yield client


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("act", STUCK)
def test_who_asks_it_waits_alone(how: str, act: str) -> None:
    with served(how) as place:
        with silent_fuse(place.inner, 0), stuck(place, STUCK[act]) as client:
            for _ in range(2):
                in_time(partial(others_work, place.top))
                assert not is_ended(client)
                place.mounted.forget_all()
        in_time(partial(others_work, place.top))


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("how", HOW)
def test_it_may_be_there_before(how: str) -> None:
    """And though nothing was looked at yet."""
    with (
        source_directory() as source,
        silent_fuse(source / "inner", 0),
        trashd_mount(source, options=HOW[how], limit_s=90, expect_end=True) as mounted,
        stuck(Place(mounted, source / "inner"), os.stat) as client,
    ):
        in_time(partial(others_work, mounted.path))
        assert trashd("umount", "--force", mounted.path).code == 0
        assert ends(client) in GONE


def test_a_directory_that_is_covered_while_it_is_known_waits_too() -> None:
    with served() as place:
        (place.top / "inner").stat()
        os.listdir(place.top / "inner")
        place.mounted.forget_all()
        with silent_fuse(place.inner, 0), stuck(place, os.listdir):
            in_time(partial(others_work, place.top))


@pytest.mark.takes_engine
def test_many_who_ask_it_leave_room_for_others() -> None:
    """The name stays in the kernel's cache while it is held: otherwise all who ask for it wait for one request. For a
    second the kernel answers from that cache.
    """

    def ask(inner: Path) -> None:
        while True:
            inner.stat()
            time.sleep(0.1)

    with (
        served() as place,
        Fd(os.open(place.top / "inner", os.O_PATH)),
        silent_fuse(place.inner, 0),
        clients([asking(ask, place.top / "inner")] * N_MANY),
    ):
        assert until(lambda: place.mounted.fuse.n_waiting() > N_MANY / 3, LIMIT_S)
        in_time(partial(others_work, place.top))


def test_what_is_mounted_there_and_answers_is_used_as_ever() -> None:
    with served() as place, tmpfs_volume() as other, trashd_mount(other, place.inner):
        inner = place.top / "inner"
        (inner / "made").write_bytes(b"made")
        (inner / "made").rename(inner / "renamed")
        assert (other / "renamed").read_bytes() == b"made"
        (inner / "directory").mkdir()
        assert set(os.listdir(inner)) >= {"renamed", "directory"}
        (inner / "renamed").chmod(0o600)
        assert (inner / "renamed").stat().st_mode & 0o777 == 0o600
        os.truncate(inner / "renamed", 1)
        with pytest.raises(OSError, match="cross-device"):
            (inner / "renamed").rename(place.top / "file-9")
        (inner / "renamed").unlink()


@pytest.mark.parametrize("how", HOW)
def test_a_name_that_a_mount_point_has_too_is_made_once(how: str) -> None:
    """An overlayfs may wait for others, and of its mount point not even the name is asked for at once."""
    with served(how) as place, overlay_volume() as overlay, bind_mount(overlay.path, place.inner):
        top = place.top
        assert set(os.listdir(top)) == {"inner", *(f"file-{i}" for i in range(N_FILES))}
        (top / "inner" / "made").write_bytes(b"in there")
        assert os.listdir(top / "inner") == ["made"]
        (top / "other").mkdir()
        (top / "other" / "inner").mkdir()
        (top / "other" / "inner").rmdir()
        (top / "other" / "inner").write_bytes(b"file")
        (top / "other" / "inner").chmod(0o600)
        os.truncate(top / "other" / "inner", 1)
        os.link(top / "file-0", top / "other" / "linked")
        (top / "other" / "inner").unlink()
        (top / "other" / "linked").rename(top / "other" / "inner")
        assert (top / "other" / "inner").read_bytes() == b"content"
        os.symlink("x", top / "other" / "link")
        with pytest.raises(FileExistsError):
            (top / "other" / "inner").mkdir()
