"""What goes wrong below is told as it is, and ends when it ends; a lease is waited for, and nobody else waits."""

import ctypes
import errno
import fcntl
import os
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.metadata_cache import ROOT
from fusefs.linux.inotify import open_inotify, read_events
from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.background_mounts import backing_of
from tests.support.background_processes import LIMIT_S, clients, ends, in_time, is_ended
from tests.support.busy_clients import work
from tests.support.fake_dev_fuse import Files, Names, Somebody, vfs_at
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, fresh_mount, trashd_mount, until
from tests.support.fuse_eio import broken_volume
from tests.support.open_files import errno_of, is_broken_into, write_lease
from tests.support.real_filesystems import full, loop_volume
from tests.support.transports import cases
from tests.support.trashd_command import trashd

pytestmark = pytest.mark.needs("root", "fuse", "loop")


_EXT4_IOC_SHUTDOWN = 0x8004587D
_WITHOUT_LOG = struct.pack("=I", 2)
MIB = 1 << 20


def write_until_refused(path: Path) -> tuple[int, int]:
    """The errno that ends it, and how long the file is then."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while not (number := errno_of(lambda: os.write(fd, bytes(MIB)))):
            pass
        return number, os.fstat(fd).st_size
    finally:
        os.close(fd)


def changes(top: Path) -> dict[str, Callable[[], object]]:
    """One of each kind of change."""
    return {
        "open": (top / "new").touch,
        "mkdir": (top / "directory").mkdir,
        "symlink": lambda: (top / "link").symlink_to("x" * 200),
        "mkfifo": lambda: os.mkfifo(top / "fifo"),
        "rename": lambda: (top / "old").rename(top / "renamed"),
        "setxattr": lambda: os.setxattr(top / "old", "user.a", bytes(2000)),
        "unlink": (top / "old").unlink,
    }


def test_full_volume_refuses_what_it_refuses_below_and_takes_more_when_there_is_room() -> None:
    with loop_volume("ext4", 32) as volume:
        for name in ("source", "twin"):
            (volume / name).mkdir()
            (volume / name / "old").touch()
        with trashd_mount(volume / "source") as mounted:
            with full(volume):
                here, there = changes(mounted.path), changes(volume / "twin")
                answers = {name: errno_of(here[name]) for name in here}
                assert answers == {name: errno_of(there[name]) for name in there}
                assert answers["mkdir"] == errno.ENOSPC
                assert errno_of(lambda: (mounted.path / "big").write_bytes(bytes(MIB))) == errno.ENOSPC
            number, size = write_until_refused(mounted.path / "log")
            assert number == errno.ENOSPC
            assert (mounted.backing / "log").stat().st_size == size > MIB
            (mounted.path / "log").unlink()
            # The last handle's release, and the blocks with it, may come after the unlink.
            assert until(lambda: errno_of(lambda: (mounted.path / "log").write_bytes(bytes(MIB))) == 0)


def test_io_error_in_the_middle_is_told_and_the_rest_goes_on() -> None:
    with broken_volume() as broken:
        for name in ("unlink-a", "file"):
            (broken.backing / name).touch()
        for name in ("rmdir-a", "opendir-a", "readdir-a"):
            (broken.backing / name).mkdir()
        for number in range(50):
            (broken.backing / "readdir-a" / f"{number}").touch()
        with trashd_mount(broken.path, broken.path.parent / "shown") as mounted:
            for act in (
                (mounted.path / "unlink-a").unlink,
                (mounted.path / "rmdir-a").rmdir,
                lambda: os.listdir(mounted.path / "opendir-a"),
                lambda: os.listdir(mounted.path / "readdir-a"),
            ):
                assert errno_of(act) == errno.EIO
            (mounted.path / "file").unlink()
            assert not (broken.backing / "file").exists()


def test_filesystem_that_is_shut_down_gives_its_errors_and_the_daemon_stays() -> None:
    with fresh_mount(made=loop_volume("ext4", 32)) as mounted:
        (mounted.backing / "old").write_text("content")
        with (mounted.path / "old").open("rb+", buffering=0) as old:
            root = os.open(mounted.backing, os.O_RDONLY)
            fcntl.ioctl(root, _EXT4_IOC_SHUTDOWN, _WITHOUT_LOG)
            os.close(root)
            assert errno_of(lambda: old.write(b"new")) == errno.EIO
            assert errno_of(lambda: os.fsync(old.fileno())) == errno.EIO
        for name, act in changes(mounted.path).items():
            assert errno_of(act) in (errno.EIO, errno.EROFS), name
        assert Path(f"/proc/{mounted.pid}").exists()


def test_backing_filesystem_unmounted_under_it_lives_as_long_as_the_mount(tmp_path: Path) -> None:
    with loop_volume("ext4", 32) as volume, trashd_mount(volume / "source", tmp_path / "shown") as mounted:
        subprocess.run(["umount", "--lazy", volume], check=True)
        (mounted.path / "file").write_text("content")
        assert (mounted.path / "file").read_text() == "content"
        assert os.listdir(volume) == []


WHERE = {
    "elsewhere": ["coherence=shared"],
    "over itself": ["coherence=exclusive"],
    "over io_uring": ["coherence=exclusive", "uring=on"],
    "plain": ["coherence=exclusive", "engine=plain"],
    "slow": ["coherence=exclusive", "backing=slow"],
}
IN_OPEN = 0x20


class Place(NamedTuple):
    """A mount with a file that is leased, and others."""

    mounted: Mounted
    seen: Path
    behind: Path

    def is_waited_for(self) -> bool:
        return until(lambda: is_broken_into((self.behind / "leased").stat()), LIMIT_S)


@contextmanager
def served(how: str, *, expect_end: bool = False, limit_s: float = 90) -> Iterator[Place]:
    with loop_volume("ext4", 64) as volume:
        source = volume / "source"
        fill(source)
        point = source if how == "over itself" else None
        with trashd_mount(source, point, WHERE[how], limit_s=limit_s, expect_end=expect_end) as mounted:
            behind = backing_of(source) if point else source
            yield Place(mounted, mounted.path, behind)


def fill(directory: Path) -> None:
    directory.mkdir()
    for name in ("leased", f"{directory.name}-0", f"{directory.name}-1"):
        (directory / name).write_bytes(b"content")


@pytest.fixture(scope="module", params=cases(WHERE))
def served_for_all(request: pytest.FixtureRequest) -> Iterator[Place]:
    with served(request.param, limit_s=SHARED_LIMIT_S) as place:
        yield place


@pytest.fixture
def place(served_for_all: Place, own_name: str) -> Place:
    mounted, seen, behind = served_for_all
    fill(behind / own_name)
    return Place(mounted, seen / own_name, behind / own_name)


def cut(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


WAITING: dict[str, Callable[[Path], object]] = {
    "read": Path.read_bytes,
    "append": lambda path: os.close(os.open(path, os.O_WRONLY | os.O_APPEND)),
    "open with truncation": cut,
    "truncate": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("act", WAITING)
def test_who_waits_for_a_lease_keeps_nobody_else_waiting(place: Place, act: str) -> None:
    with (
        write_lease(place.behind / "leased") as give_up,
        clients([lambda: WAITING[act](place.seen / "leased")]) as (client,),
    ):
        assert place.is_waited_for()
        in_time(partial(work, place.seen))
        assert not is_ended(client)
        give_up()
        assert ends(client) == 0
    size = (place.behind / "leased").stat().st_size
    assert size == (0 if "trunc" in act else len(b"content"))


@pytest.mark.parametrize("act", WAITING)
def test_who_is_killed_while_he_waits_ends(place: Place, act: str) -> None:
    """And what it waited for is not kept: the daemon has as many fds as before, says the mount's own end."""
    with (
        write_lease(place.behind / "leased"),
        clients([lambda: WAITING[act](place.seen / "leased")]) as (client,),
    ):
        assert place.is_waited_for()
        os.kill(client, signal.SIGKILL)
        assert ends(client) == -signal.SIGKILL
        in_time(partial(work, place.seen))
    assert (place.behind / "leased").read_bytes() == b"content"


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("how", cases(WHERE))
def test_umount_force_lets_who_waits_go(how: str) -> None:
    with (
        served(how, expect_end=True) as place,
        write_lease(place.behind / "leased"),
        clients([(place.seen / "leased").read_bytes]) as (client,),
    ):
        assert place.is_waited_for()
        done = trashd("umount", "--force", place.seen)
        assert done.code == 0, done.err
        assert ends(client) in DAEMON_GONE


@pytest.mark.long
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
def test_what_has_the_name_by_now_is_not_opened_unless_it_is_that_file(
    tmp_path: Path, flags: int, is_shared: bool
) -> None:
    """Its open might do something, or wait: users behind the mount may put a FIFO or a device there."""
    file, fifo = tmp_path / "file", tmp_path / "fifo"
    file.touch()
    os.mkfifo(fifo)
    with vfs_at(tmp_path, is_shared=is_shared) as vfs, open_inotify() as opened:
        me = Somebody(0, 0, os.getpid(), 0)
        nodeid = Names(vfs).lookup(ROOT, b"file", me).nodeid
        fifo.rename(file)
        assert ctypes.CDLL(None).inotify_add_watch(int(opened), os.fsencode(file), IN_OPEN) > 0
        with pytest.raises(OSError, match="Stale"):
            Files(vfs).open(nodeid, flags, me)
        assert read_events(opened) == []
