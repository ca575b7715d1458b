"""A thread that waits for the backing filesystem, for anything, keeps no request waiting: another one serves.

What waits here is told when to go on: one name of a filesystem that answers at once otherwise, or a frozen disk.
"""

import errno
import fcntl
import mmap
import os
import select
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.background_processes import LIMIT_S, clients, ends, in_time, is_ended
from tests.support.busy_clients import work
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.fsfreeze import frozen
from tests.support.hanging_mounts import N_FILES, HangingMount, hanging_mount
from tests.support.make_trees import snapshot
from tests.support.open_files import is_broken_into, waits_in_the_kernel, write_lease
from tests.support.real_filesystems import loop_volume, mount_of, tmpfs_over
from tests.support.transports import RING, VARIABLE
from tests.support.trashd_command import trashd

pytestmark = [pytest.mark.needs("root", "fuse"), pytest.mark.takes_engine]

N_MANY = 160
N_OF_ONE = 120
N_RING_THREADS = 16 * (os.cpu_count() or 1) if os.environ.get(VARIABLE) == RING else 0
"""Each has room for one request that waits; the calls below are the pool's."""
ANOTHER = 4711
FS_IOC_GETFLAGS = 0x80086601
GONE = {*DAEMON_GONE, errno.EIO, errno.EINTR, errno.ENOENT}


@pytest.fixture(scope="module")
def served_for_all(request: pytest.FixtureRequest) -> Iterator[HangingMount]:
    with hanging_mount(getattr(request, "param", "local"), limit_s=SHARED_LIMIT_S) as place:
        yield place


@pytest.fixture
def place(served_for_all: HangingMount, own_name: str) -> HangingMount:
    return served_for_all.own_directory(own_name)


def assert_same(top: Path, behind: Path) -> None:
    for name in os.listdir(top):
        assert [name, *snapshot(top / name)[1:]] == [name, *snapshot(behind / name)[1:]]


def look(number: int, top: Path) -> None:
    os.lstat(top / f"stuck/stuck-absent-{number}")


def written(top: Path) -> None:
    with (top / "stuck/stuck-5").open("r+b", buffering=0) as file:
        file.write(b"written")


STUCK: dict[str, Callable[[Path], object]] = {
    "stat": lambda top: os.lstat(top / "stuck/stuck-0"),
    "look for a name": lambda top: look(0, top),
    "list": lambda top: os.listdir(top / "stuck"),
    "list and stat": lambda top: [entry.stat(follow_symlinks=False) for entry in os.scandir(top / "stuck")],
    "open": lambda top: (top / "stuck/stuck-1").read_bytes(),
    "read a link": lambda top: os.readlink(top / "stuck/stuck-link"),
    "write": written,
    "truncate": lambda top: os.truncate(top / "stuck/stuck-6", 3),
    "create": lambda top: (top / "stuck/stuck-new").write_bytes(b"new"),
    "unlink": lambda top: (top / "stuck/stuck-2").unlink(),
    "mkdir": lambda top: (top / "stuck/stuck-directory").mkdir(),
    "mkfifo": lambda top: os.mkfifo(top / "stuck/stuck-fifo"),
    "symlink": lambda top: (top / "stuck/stuck-symlink").symlink_to("x"),
    "link": lambda top: os.link(top / "stuck/stuck-7", top / "stuck/stuck-another"),
    "rename": lambda top: (top / "stuck/stuck-3").rename(top / "stuck/stuck-moved"),
    "chmod": lambda top: (top / "stuck/stuck-4").chmod(0o600),
    "xattr": lambda top: os.setxattr(top / "stuck/stuck-4", "user.x", b"1"),
}


STUCK_ON = [
    (backing, stuck) for stuck in STUCK for backing in ("local", "slow") if (backing, stuck) != ("slow", "stat")
]
"""Of a slow filesystem the daemon remembers what a stat tells."""


@pytest.mark.parametrize("is_known", [False, True], ids=["never looked at", "known"])
@pytest.mark.parametrize(("served_for_all", "stuck"), STUCK_ON, indirect=["served_for_all"], scope="module")
def test_who_waits_keeps_nobody_else_waiting(place: HangingMount, stuck: str, *, is_known: bool) -> None:
    if is_known:
        work(place.top / "stuck")
    with place.hanging(STUCK[stuck]) as (client,):
        for name in ("free", "also"):
            in_time(partial(work, place.top / name))
            place.mounted.forget_all()
        assert not is_ended(client)
        place.volume.go_on()
        assert ends(client) == (errno.ENOENT if stuck == "look for a name" else 0)
    in_time(partial(work, place.top / "stuck"))
    assert_same(place.top, place.behind)


@pytest.mark.parametrize("coherence", ["exclusive", "shared"])
def test_who_all_wait_at_a_time_keep_nobody_else_waiting(coherence: str) -> None:
    """Each stands in for the one before, until it waits itself."""
    with hanging_mount("local", coherence=coherence) as place:
        with place.hanging(*STUCK.values()) as pids:
            for _ in range(3):
                in_time(partial(work, place.top / "free"))
                place.mounted.forget_all()
            assert not any(map(is_ended, pids))
            place.volume.go_on()
            assert {ends(pid) for pid in pids} == {0, errno.ENOENT}
        in_time(partial(work, place.top / "stuck"))
        assert_same(place.top, place.behind)


def waits(pid: int) -> bool:
    """Whether a client waits for an answer, or for another one who does."""
    return waits_in_the_kernel(pid) or Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("D")


def another_looks(top: Path) -> None:
    """Another user, who sees the same as below."""
    os.setgid(ANOTHER)
    os.setuid(ANOTHER)
    assert (top / "free/free-0").read_bytes() == b"content"
    assert len(os.listdir(top / "also")) > N_FILES


def n_threads(place: HangingMount) -> int:
    return len(os.listdir(f"/proc/{place.mounted.pid}/task"))


def are_asking(place: HangingMount, n: int) -> bool:
    """Whether so many wait for the daemon."""
    return until(lambda: place.mounted.fuse.n_waiting() >= n, LIMIT_S)


@pytest.mark.long
@pytest.mark.takes_engine
def test_many_who_wait_take_no_more_than_their_share_and_are_all_served_in_the_end() -> None:
    with hanging_mount("local") as place:
        (place.top / "stuck").lstat()
        before = n_threads(place)
        with place.hanging(*(partial(look, n) for n in range(N_MANY))) as pids:
            assert are_asking(place, N_MANY)
            in_time(partial(another_looks, place.top))
            assert n_threads(place) - before < N_OF_ONE + 20 + N_RING_THREADS
            place.volume.go_on()
            assert {ends(pid) for pid in pids} == {errno.ENOENT}
        in_time(partial(work, place.top / "stuck"))


@pytest.mark.long
@pytest.mark.takes_engine
def test_who_is_killed_while_he_waits_for_his_turn_ends_at_once() -> None:
    """Who is in a call below ends with that, as natively."""
    with hanging_mount("local") as place:
        (place.top / "stuck").lstat()
        with place.hanging(*(partial(look, n) for n in range(N_MANY))) as pids:
            assert are_asking(place, N_MANY)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert until(lambda: sum(map(is_ended, pids)) >= N_MANY - N_OF_ONE - 20, LIMIT_S)
            in_time(partial(another_looks, place.top))
            place.volume.go_on()
            assert {ends(pid) for pid in pids} == {-signal.SIGKILL}
        in_time(partial(work, place.top / "stuck"))


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("backing", ["local", "slow"])
def test_umount_force_lets_who_waits_go(backing: str) -> None:
    with hanging_mount(backing, expect_end=True) as place, place.hanging(*STUCK.values()) as pids:
        for pid in pids:
            assert until(partial(waits, pid), LIMIT_S)
        done = trashd("umount", "--force", place.top)
        assert done.code == 0, done.err
        assert {ends(pid) for pid in pids} <= GONE


def test_a_program_that_is_served_while_others_wait_may_map_and_lock_and_poll(place: HangingMount) -> None:
    """What the kernel asks of no daemon, and what none answers."""

    def act(top: Path) -> None:
        with (top / "free/free-0").open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            fcntl.lockf(file, fcntl.LOCK_EX)
            assert select.select([file], [], [], 0)[0]
            with pytest.raises(OSError, match=r"Inappropriate|not supported|not implemented"):
                fcntl.ioctl(file, FS_IOC_GETFLAGS, bytes(8))
            with mmap.mmap(file.fileno(), 0) as mapped:
                assert mapped[:] == b"content"

    with place.hanging(STUCK["create"]):
        in_time(partial(act, place.top))


def test_the_service_manager_hears_that_it_lives_while_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would kill the daemon, and with it all who are served."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{directory}/notify")
        manager.settimeout(LIMIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", f"{directory}/notify")
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        with hanging_mount("local") as place, place.hanging(STUCK["create"]):
            in_time(partial(work, place.top / "free"))
            words = (manager.recv(100) for _ in range(10))
            assert sum(word == b"WATCHDOG=1" for word in words) >= 3


# A frozen disk: changes wait, as natively, and nothing else.


class Disk(NamedTuple):
    """A directory of a disk, its mount, and another filesystem in that."""

    mounted: Mounted
    source: Path
    top: Path
    inner: Path


@contextmanager
def disk(fs_type: str, *, expect_end: bool = False, limit_s: float = 100) -> Iterator[Disk]:
    with loop_volume(fs_type, 64) as volume:
        source = volume / "source"
        fill_disk(source)
        (source / "inner").mkdir()
        with (
            tmpfs_over(source / "inner") as inner,
            trashd_mount(source, expect_end=expect_end, limit_s=limit_s) as mounted,
        ):
            for number in range(2):
                (inner / f"inner-{number}").write_bytes(b"content")
            yield Disk(mounted, source, mounted.path, mounted.path / "inner")


def fill_disk(top: Path) -> None:
    (top / "d").mkdir(parents=True)
    for name in ("file", "other", "d/removed", "d/opened"):
        (top / name).write_bytes(b"content")


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def disk_for_all(request: pytest.FixtureRequest) -> Iterator[Disk]:
    with disk(request.param, limit_s=SHARED_LIMIT_S) as place:
        yield place


@pytest.fixture
def on_disk(disk_for_all: Disk, own_name: str) -> Disk:
    fill_disk(disk_for_all.source / own_name)
    return disk_for_all._replace(source=disk_for_all.source / own_name, top=disk_for_all.top / own_name)


def looks(place: Disk) -> None:
    """What a frozen filesystem answers natively, and what is done on another one."""
    top = place.top
    for name in ("file", "other"):
        assert (top / name).stat().st_size == len(b"content")
        assert (top / name).read_bytes() == b"content"
    assert {"file", "other", "d"} <= set(os.listdir(top))
    assert os.statvfs(top).f_bsize
    with pytest.raises(FileNotFoundError):
        (top / "missing").lstat()
    work(place.inner)


FROZEN: dict[str, Callable[[Path], object]] = {
    "create": lambda top: (top / "d/new").touch(),
    "write": lambda top: (top / "d/opened").write_bytes(b"written"),
    "truncate": lambda top: os.truncate(top / "file", 3),
    "unlink": lambda top: (top / "d/removed").unlink(),
    "rename": lambda top: (top / "d/removed").rename(top / "d/moved"),
    "mkdir": lambda top: (top / "d/directory").mkdir(),
    "chmod": lambda top: (top / "d").chmod(0o700),
    "xattr": lambda top: os.setxattr(top / "d", "user.x", b"1"),
    "allocate": lambda top: os.posix_fallocate(os.open(top / "d/opened", os.O_WRONLY), 0, 1 << 16),
}


@pytest.mark.needs("loop")
@pytest.mark.parametrize("act", FROZEN)
def test_who_changes_a_frozen_disk_waits_alone(on_disk: Disk, act: str) -> None:
    with frozen(on_disk.source) as thaw, clients([partial(FROZEN[act], on_disk.top)]) as (client,):
        assert until(lambda: waits(client), LIMIT_S)
        for _ in range(2):
            in_time(partial(looks, on_disk))
            on_disk.mounted.forget_all()
        assert not is_ended(client)
        thaw()
        assert ends(client) == 0
    in_time(partial(work, on_disk.inner))
    assert_same(on_disk.top, on_disk.source)


@pytest.mark.needs("loop")
def test_who_all_change_a_frozen_disk_wait_alone(on_disk: Disk) -> None:
    acts = [partial(act, on_disk.top) for act in FROZEN.values()]
    with frozen(on_disk.source) as thaw, clients(acts) as pids:
        for pid in pids:
            assert until(partial(waits, pid), LIMIT_S)
        in_time(partial(looks, on_disk))
        assert not any(map(is_ended, pids))
        thaw()
        assert {ends(pid) for pid in pids} <= {0, errno.ENOENT}
    assert_same(on_disk.top, on_disk.source)


@pytest.mark.needs("loop")
def test_what_ends_while_somebody_else_waits_is_answered_at_once() -> None:
    """A lease is given up, and what was written is on the disk, though the daemon's own thread is not there."""
    with (
        disk("ext4") as place,
        write_lease(place.source / "other") as give_up,
        clients([(place.top / "other").read_bytes]) as (reader,),
    ):
        assert until(lambda: is_broken_into((place.source / "other").stat()), LIMIT_S)
        with frozen(place.source), clients([partial(FROZEN["create"], place.top)]) as (client,):
            assert until(lambda: waits(client), LIMIT_S)
            give_up()
            assert ends(reader) == 0
            in_time(partial(work, place.inner))  # fsync is among it
            assert not is_ended(client)


@pytest.mark.usefixtures("short_patience")
@pytest.mark.needs("loop")
def test_a_frozen_disk_may_be_unmounted_by_force_and_those_who_wait_are_let_go() -> None:
    with (
        disk("ext4", expect_end=True) as place,
        frozen(place.source),
        clients([partial(act, place.top) for act in FROZEN.values()]) as pids,
    ):
        for pid in pids:
            assert until(partial(waits, pid), LIMIT_S)
        done = trashd("umount", "--force", place.top)
        assert done.code == 0, done.err
        assert mount_of(place.top) is None
        assert {ends(pid) for pid in pids} <= GONE
