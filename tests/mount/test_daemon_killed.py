"""The daemon killed, aborted and stopped at any time while eight clients work: none hangs, and nothing is left of it.

TRASHD_TEST_ENDS  how often (make soak-mount: 300 times)
"""

import errno
import mmap
import os
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from fusefs.linux.mountinfo import DAEMON_GONE
from fusefs.mount.places.find_mounts import mounts_of, read_counters
from tests.support.background_mounts import abort, daemon_of, ended, kill_daemon, mount, our_mount, workbench
from tests.support.background_processes import in_time, workers
from tests.support.foreground_mount import forget_all, has_begun, links, n_fds_beside_rings, until
from tests.support.fuse_watchdog import mount_fusectl
from tests.support.proc_stat import stop
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import assert_silent, init, recover_all
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = [pytest.mark.needs("root", "fuse"), pytest.mark.usefixtures("short_patience")]

N_ENDS = int(os.environ.get("TRASHD_TEST_ENDS", "4"))
LIMIT_S = 60.0
_LONGEST_S = 0.3
"""Between two ends."""
_LOST = {*DAEMON_GONE, errno.EIO}
"""What a client gets from a mount whose daemon is gone."""
_RIVALS = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ESTALE}
"""What a client gets beside another one, or where nothing is mounted at the moment."""
_CELL = struct.Struct("=Q")


class Place(NamedTuple):
    """A volume with a store, what is mounted of it, and where clients work."""

    volume: Path
    target: Path

    @property
    def work(self) -> Path:
        return self.target / "work"


class Progress:
    """How often each client has done what it does."""

    def __init__(self, n_clients: int) -> None:
        self._cells = mmap.mmap(-1, _CELL.size * n_clients)
        self._n_clients = n_clients

    def add(self, number: int) -> None:
        at = _CELL.size * number
        _CELL.pack_into(self._cells, at, self.counts()[number] + 1)

    def counts(self) -> tuple[int, ...]:
        return tuple(_CELL.unpack_from(self._cells, _CELL.size * number)[0] for number in range(self._n_clients))

    def assert_goes_on(self) -> None:
        """Every client does something from now on."""
        before = self.counts()

        def has_gone_on() -> bool:
            return all(now > then for now, then in zip(self.counts(), before, strict=True))

        assert until(has_gone_on, LIMIT_S), f"clients hang: {before}, {self.counts()} {LIMIT_S} s later"


def create(work: Path, n: int) -> None:
    path = work / f"created-{n % 100}"
    path.write_bytes(b"content")
    assert path.read_bytes() == b"content"
    path.unlink()


def rename(work: Path, n: int) -> None:
    old, new = work / "renamed" / f"old-{n}", work / f"new-{n}"
    old.touch()
    old.rename(new)
    new.unlink()


def walk(work: Path, _n: int) -> None:
    for directory, _names, files in os.walk(work, onerror=_fail):
        for name in files:
            os.lstat(os.path.join(directory, name))


def _fail(error: OSError) -> None:
    raise error


def append(work: Path, _n: int) -> None:
    with (work / "log").open("ab", buffering=0) as file:
        for _ in range(20):
            file.write(b"line\n")
        os.fsync(file.fileno())


def hold(work: Path, n: int) -> None:
    """Work in a directory by its fd, whatever has become of the mount."""
    fd = os.open(work / "held", os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(50):
            name = f"held-{n}-{number}"
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=fd))
            os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)


def change(work: Path, n: int) -> None:
    path = work / "standing"
    path.chmod(0o600 + n % 8)
    os.setxattr(path, "user.x", b"%d" % n)
    os.utime(path)
    assert path.read_bytes() == b"standing content"


def swap_and_restore(work: Path, _n: int, *, name: str) -> None:
    """By commands, as people do it; these tell of the mount's end in their own way."""
    done = trashd("swap", "--json", work / name)
    assert "Traceback" not in done.err, done
    if done.code:
        raise OSError(errno.EIO, "it was not swapped")
    identifier = done.objects()[0]["id"]
    done = trashd("restore", identifier, "--volume", work.parent)
    assert "Traceback" not in done.err, done
    if done.code:
        raise OSError(errno.EIO, "it was not restored")


CLIENTS: tuple[Callable[[Path, int], None], ...] = (
    create, rename, walk, append, hold, change,
    partial(swap_and_restore, name="victim-0"), partial(swap_and_restore, name="victim-1"),
)  # fmt: skip


def work_for_ever(act: Callable[[Path, int], None], number: int, work: Path, progress: Progress) -> None:
    """Raises  OSError that no end of a daemon explains"""
    for n in count():
        try:
            act(work, n)
            progress.add(number)
        except OSError as error:
            if error.errno not in _LOST | _RIVALS:
                raise
            time.sleep(0.002)


# How the daemon ends.


def stop_and_continue(place: Place) -> None:
    pid = daemon_of(place.target)
    stop(pid)
    time.sleep(_LONGEST_S)
    os.kill(pid, signal.SIGCONT)


def stop_and_unmount(place: Place) -> None:
    pid_fd = os.pidfd_open(pid := daemon_of(place.target))
    stop(pid)
    done_well("umount", "--force", place.target)
    ended(pid_fd)
    assert our_mount(place.target) is None


def mount_again(place: Place) -> None:
    mount("--replace", "-o", "coherence=exclusive", place.volume, place.target)


class Held(NamedTuple):
    """What a volume and its mount hold when nobody uses them."""

    free_blocks: int
    free_inodes: int
    n_nodes: int


def held(place: Place) -> Held:
    forget_all(place.target)
    with suppress(FileNotFoundError):
        os.lstat(place.target / "missing")  # gauges are kept as long as somebody asks for something
    free = os.statvfs(place.volume)
    gauges = read_counters(mounts_of(os.fsencode(place.target))[0]).stats.gauges
    return Held(free.f_bfree, free.f_ffree, gauges["n_nodes"])


@pytest.fixture
def place() -> Iterator[Place]:
    mount_fusectl()
    with workbench(limit_s=300 + 20 * N_ENDS) as bench, tmpfs_volume("256m") as volume:
        init(volume)
        place = Place(volume, bench / "target")
        mount_again(place)
        yield place
        done_well("umount", "--force", place.target)


def fill(work: Path) -> None:
    for name in ("renamed", "held", "victim-0/deep", "victim-1/deep"):
        (work / name).mkdir(parents=True)
    (work / "standing").write_bytes(b"standing content")
    (work / "victim-0/deep/file").write_bytes(b"x" * 10_000)
    (work / "victim-1/deep/file").write_bytes(b"x" * 10_000)


def delete_all(place: Place) -> None:
    """By the mount, with all that the store has."""
    done_well("reap", "--now", swapped(place.work)["id"])
    place.work.rmdir()
    recover_all(place.volume)
    done_well("reap", "--now", "--all", "--yes", "--volume", place.target)


@pytest.mark.long
@pytest.mark.timeout(400 + 20 * N_ENDS)
def test_daemon_ends_at_any_time_and_no_client_hangs_and_nothing_is_left(place: Place) -> None:
    dice = Random("ends")
    ways: dict[str, Callable[[Place], object]] = {
        "kill": lambda place: kill_daemon(place.target), "abort": lambda place: abort(place.target),
        "stop": stop_and_continue, "unmount": stop_and_unmount,
    }  # fmt: skip
    fill(place.work)
    delete_all(place)
    assert until(lambda: held(place).n_nodes == 1, LIMIT_S), "the kernel forgets all but the root"
    before = held(place)
    fill(place.work)
    progress, n_ends = Progress(len(CLIENTS)), Counter[str]()
    acts = [partial(work_for_ever, act, number, place.work, progress) for number, act in enumerate(CLIENTS)]
    with workers(acts):
        progress.assert_goes_on()
        while n_ends.total() < N_ENDS:
            time.sleep(dice.random() * _LONGEST_S)
            way = [*ways][n_ends.total() % len(ways)]
            in_time(partial(ways[way], place))
            n_ends[way] += 1
            if way != "stop":
                in_time(partial(mount_again, place))
            progress.assert_goes_on()
    print(f"ends {dict(n_ends)}; what the clients did: {progress.counts()}")
    kill_daemon(place.target)
    mount_again(place)
    assert until(lambda: has_begun(place.target), LIMIT_S)
    pid = daemon_of(place.target)
    n_fds, fds = n_fds_beside_rings(pid), Counter(target for _fd, target in links(f"/proc/{pid}/fd"))
    assert (place.work / "standing").read_bytes() == b"standing content"
    delete_all(place)
    assert_silent(place.volume)
    assert until(lambda: held(place) == before, LIMIT_S), (held(place), before)
    has_fds_back = until(lambda: n_fds_beside_rings(pid) <= n_fds, LIMIT_S)
    assert has_fds_back, Counter(target for _fd, target in links(f"/proc/{pid}/fd")) - fds
