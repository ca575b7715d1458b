"""Listings that the kernel keeps, or is asked for again: what it keeps is right, and opens without us are too."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.metadata_cache import ROOT
from fusefs.linux.fd import Fd
from fusefs.linux.getdents import read_more
from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, renameat2
from fusefs.mount.native._core import Node
from fusefs.mount.tree import mount_state
from fusefs.mount.tree.listings import why_opendir_is_needed
from fusefs.mount.tree.vfs import Vfs
from tests.support.acls import ACCESS, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.fake_dev_fuse import DirectoryRequests, Names, vfs_at
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, fresh_mount, trashd_mount, until
from tests.support.open_files import held
from tests.support.real_filesystems import loop_volume, overlay_volume, tmpfs_volume

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), pytest.mark.takes_engine]


LIMIT_S = 40.0
N_KEPT, N_CHANGES = 100, 50
RACY_S = 0.1
"""A directory that changed less than so long ago may change once more without another time; a tick is 10 ms at most."""


class Listed(NamedTuple):
    """A directory, through the mount and behind it.

    late_s  for how long a listing may be as it was before a change behind the mount; 0: not once
    """

    mounted: Mounted
    seen: Path
    behind: Path
    late_s: float

    def is_right_in_time(self) -> bool:
        """Whether a change behind the mount is listed in time."""
        return until(self.is_right, self.late_s)

    def is_right(self) -> bool:
        """Whether the listing is what is there."""
        return sorted(os.listdir(self.seen)) == sorted(os.listdir(self.behind))

    def costs_a_read(self) -> bool:
        """Whether the daemon was asked for the entries of a listing, which must be right."""
        before = self.mounted.stats().operations["readdir"].n()
        assert self.is_right()
        return self.mounted.stats().operations["readdir"].n() > before


@pytest.fixture(scope="module", params=["local", "slow"])
def shared_mount(request: pytest.FixtureRequest) -> Iterator[tuple[Mounted, float]]:
    """And for how long a listing there may be as it was before a change behind it."""
    options = ["coherence=shared", f"backing={request.param}"]
    with overlay_volume() as overlay, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mount_state, "_RACY_NS", round(RACY_S * 1e9))
        with trashd_mount(overlay.path / "source", options=options, limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted, LIMIT_S if request.param == "slow" else 0


@pytest.fixture
def listed_through(shared_mount: tuple[Mounted, float], own_name: str) -> Listed:
    mounted, late_s = shared_mount
    behind = mounted.backing / own_name
    behind.mkdir()
    for number in range(N_KEPT):
        (behind / f"{number}").touch()
    return Listed(mounted, mounted.path / own_name, behind, late_s)


def test_a_directory_that_has_not_changed_for_a_while_is_read_once(listed_through: Listed) -> None:
    assert listed_through.costs_a_read()
    assert until(
        lambda: not any(listed_through.costs_a_read() for _ in range(3)), LIMIT_S
    )  # but for a kernel short of memory


@pytest.mark.parametrize("is_made", [True, False])
def test_what_is_made_or_removed_behind_is_seen_in_the_next_listing(listed_through: Listed, is_made: bool) -> None:
    assert until(lambda: not listed_through.costs_a_read(), LIMIT_S)
    (listed_through.behind / "new").touch() if is_made else (listed_through.behind / "0").unlink()
    assert listed_through.is_right_in_time()


def test_changes_in_the_same_tick_are_listed_too(listed_through: Listed) -> None:
    for number in range(N_CHANGES):
        (listed_through.behind / f"new-{number}").touch()
        assert listed_through.is_right() or listed_through.late_s
        (listed_through.behind / f"{number}").unlink()
        assert listed_through.is_right() or listed_through.late_s
    assert listed_through.is_right_in_time()
    assert until(lambda: not listed_through.costs_a_read(), LIMIT_S)


def test_a_time_that_is_set_back_hides_no_name(listed_through: Listed) -> None:
    before = listed_through.behind.stat()
    assert until(lambda: not listed_through.costs_a_read(), LIMIT_S)
    (listed_through.behind / "new").touch()
    os.utime(listed_through.behind, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert listed_through.is_right_in_time()


def test_what_is_made_through_the_mount_is_listed_at_once(listed_through: Listed) -> None:
    assert until(lambda: not listed_through.costs_a_read(), LIMIT_S)
    (listed_through.seen / "new").touch()
    (listed_through.seen / "0").unlink()
    assert listed_through.is_right()


N_FILES = 1000
"""More than one answer takes."""
FEW = N_FILES // 20
"""What memory that is short costs meanwhile."""
HOUR_S, SECOND_S = 3600.0, 1.0
ACL = acl((USER_OBJ, 6, NOBODY), (USER, 6, 1000), (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 4, NOBODY))


@pytest.fixture(scope="module", params=["tmpfs", "ext4", "pages"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """pages: the kernel keeps those of files itself."""
    options = ("coherence=exclusive", f"passthrough={'off' if request.param == 'pages' else 'auto'}")
    made = loop_volume("ext4", 256) if request.param == "ext4" else tmpfs_volume()
    with fresh_mount(*options, made=made, limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def directory(mount: Mounted, own_name: str) -> Path:
    """That was listed with all that `ls -l` asks for, and is in use."""
    (mount.backing / own_name).mkdir()
    for number in range(N_FILES):
        (mount.backing / own_name / f"{number}").touch()
    list_long(mount.path / own_name)
    return mount.path / own_name


def list_long(path: Path) -> dict[str, tuple[object, ...]]:
    """What `ls -l` tells."""
    return {entry.name: told_of(path / entry.name, entry.inode()) for entry in os.scandir(path)}


def told_of(path: Path, number: int) -> tuple[object, ...]:
    seen = path.lstat()
    assert seen.st_ino == number
    value = None
    with suppress(OSError):
        value = os.getxattr(path, ACCESS, follow_symlinks=False)
    times = seen.st_mtime_ns, seen.st_ctime_ns
    return seen.st_mode, seen.st_nlink, seen.st_uid, seen.st_gid, seen.st_size, *times, value


def lose_pages(directory: Path) -> None:
    """As if memory was short."""
    with Fd(os.open(directory, os.O_RDONLY)) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def make_one(directory: Path) -> None:
    (directory / "new").touch()


def replace_one(directory: Path) -> None:
    (directory / "1").rename(directory / "2")


@pytest.mark.parametrize("change", [lose_pages, make_one, replace_one])
def test_only_names_are_asked_for_again(mount: Mounted, directory: Path, change: Callable[[Path], None]) -> None:
    with held(directory):
        change(directory)
        before = mount.n_requests_for("getxattr", "getattr", "lookup"), mount.n_requests_for("readdir")
        listed = list_long(directory)
        assert mount.n_requests_for("readdir") > before[1]
        assert mount.n_requests_for("getxattr", "getattr", "lookup") - before[0] < FEW
    assert listed == list_long(mount.backing / directory.name)


def change_all(directory: Path) -> None:
    """Each thing that a listing tells, of some."""
    part = N_FILES // 10
    for number in range(part):
        file = directory / str(number)
        file.chmod(0o600 if number % 2 else 0o4755)
        (directory / str(part + number)).write_text("text")
        os.truncate(directory / str(2 * part + number), number)
        (directory / f"link-{number}").hardlink_to(directory / str(3 * part + number))
        os.setxattr(directory / str(4 * part + number), ACCESS, ACL)
        (directory / str(5 * part + number)).rename(directory / f"moved-{number}")
        (directory / str(6 * part + number)).unlink()
        (directory / str(6 * part + number)).symlink_to("nowhere")
        os.utime(directory / str(7 * part + number), (number, number))
        os.chown(directory / str(8 * part + number), 1000, 1000)


def test_what_has_changed_is_told(mount: Mounted, directory: Path) -> None:
    with held(directory):
        change_all(directory)
        for change in (lose_pages, make_one):
            change(directory)
            assert list_long(directory) == list_long(mount.backing / directory.name)


def test_what_is_written_between_two_listings_has_its_size_in_each(mount: Mounted, directory: Path) -> None:
    with held(directory), Fd(os.open(directory / "7", os.O_RDWR)) as fd:
        for size in range(1, 5):
            os.write(fd, b"x")
            lose_pages(directory)
            assert list_long(directory)["7"][4] == size
    with Fd(os.open(directory / "7", os.O_WRONLY | os.O_APPEND)) as fd:
        os.write(fd, b"x")
    lose_pages(directory)
    assert list_long(directory) == list_long(mount.backing / directory.name)


def test_what_replaces_a_file_behind_the_mount_is_told_when_names_are_read_again(
    mount: Mounted, directory: Path
) -> None:
    """It has another inode number."""
    with held(directory):
        (mount.backing / directory.name / "new").write_text("text")
        (mount.backing / directory.name / "new").rename(mount.backing / directory.name / "5")
        lose_pages(directory)
        assert list_long(directory)["5"][4] == len("text")


def is_listed_in_full(vfs: Vfs) -> bool:
    """Whether a listing of the only file sends more than its name, of which the kernel then has a reference."""
    return any(one.entry.nodeid for one in DirectoryRequests(vfs).entries(ROOT))


@pytest.fixture(params=[HOUR_S, SECOND_S], ids=["hour", "second"])
def listed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Vfs, float]]:
    """A directory without a mount, with one file, that was listed; and for how long the kernel caches what it is."""
    (tmp_path / "file").touch()
    with vfs_at(tmp_path, timeout_s=request.param) as vfs:
        assert is_listed_in_full(vfs)
        yield vfs, request.param


def the_file(vfs: Vfs) -> Node:
    (node,) = (node for node in vfs.nodes if node is not vfs.nodes.root)
    return node


def test_what_the_kernel_has_cached_for_long_comes_once(listed: tuple[Vfs, float]) -> None:
    vfs, cached_s = listed
    assert is_listed_in_full(vfs) == (cached_s == SECOND_S)


def test_what_is_not_cached_for_much_longer_comes_again(listed: tuple[Vfs, float]) -> None:
    vfs, _cached_s = listed
    the_file(vfs).cached_until_s = time.monotonic() + SECOND_S / 2
    assert is_listed_in_full(vfs)


def test_what_is_forgotten_comes_again(listed: tuple[Vfs, float]) -> None:
    vfs, _cached_s = listed
    Names(vfs).forget(the_file(vfs).nodeid, 2)
    assert is_listed_in_full(vfs)


N_NAMES = 3000
"""More than the kernel asks for at a time."""


@pytest.fixture(scope="module", params=["tmpfs exclusive", "ext4 exclusive", "tmpfs shared", "ext4 shared"])
def open_mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    fs_type, coherence = request.param.split()
    made = tmpfs_volume() if fs_type == "tmpfs" else loop_volume("ext4", 256)
    with fresh_mount(f"coherence={coherence}", made=made, limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def large_directory(open_mount: Mounted, own_name: str) -> Path:
    """A directory with more names than one answer takes, that was not listed yet."""
    (open_mount.backing / own_name).mkdir()
    for number in range(N_NAMES):
        (open_mount.backing / own_name / f"{number}").touch()
    return open_mount.path / own_name


def names() -> set[str]:
    return {str(number) for number in range(N_NAMES)}


def names_left(fd: int) -> list[str]:
    found = []
    while (block := read_more(fd)) is not None:
        found += block.names
    return found


def test_a_second_listing_is_the_kernels_own(open_mount: Mounted, large_directory: Path) -> None:
    def asks_nobody() -> bool:
        asked = open_mount.n_requests_for("opendir", "readdir", "releasedir")
        assert set(os.listdir(large_directory)) == names()
        return open_mount.n_requests_for("opendir", "readdir", "releasedir") == asked

    with held(large_directory):
        assert not asks_nobody()
        assert until(asks_nobody)  # at once, unless memory is short just now


def test_no_directory_stays_open(open_mount: Mounted, large_directory: Path) -> None:
    with Fd(os.open(large_directory, os.O_RDONLY)) as fd:
        assert read_more(fd) is not None
        assert open_mount.n_requests_for("opendir") <= 1
        began_ns = time.time_ns()
        os.statvfs(large_directory)  # after each operation there are new numbers
        assert until(lambda: (told := open_mount.stats()).updated_ns > began_ns and not told.gauges["n_handles"])


def test_a_listing_stays_in_the_directory_that_was_opened(large_directory: Path) -> None:
    """A swap, while a process lists: it goes on in what it has opened."""
    fresh = large_directory.with_name(f"{large_directory.name}-fresh")
    fresh.mkdir()
    with Fd(os.open(large_directory, os.O_RDONLY)) as fd:
        first = read_more(fd)
        assert first is not None
        renameat2(AT_FDCWD, bytes(fresh), AT_FDCWD, bytes(large_directory), RENAME_EXCHANGE)
        assert os.listdir(large_directory) == []
        assert {*first.names, *names_left(fd)} == names()
    assert set(os.listdir(fresh)) == names()


def test_a_filesystem_that_has_become_slow_tells_names_alone() -> None:
    with tmpfs_volume() as volume, vfs_at(volume, is_slow=True) as vfs:
        for name in ("a", "b", ".trashd"):
            (volume / name).touch()
        found, at = set(), 0
        while more := DirectoryRequests(vfs).entries(ROOT, at):
            assert not any(one.entry.nodeid for one in more)
            found |= {one.name for one in more}
            at = more[-1].offset
        assert found == {b".", b"..", b"a", b"b"}


def test_it_is_not_done_where_a_listing_may_not_go_on_elsewhere() -> None:
    with Fd(os.open("/proc", os.O_PATH)) as proc, tmpfs_volume() as volume, Fd(os.open(volume, os.O_PATH)) as root:
        assert why_opendir_is_needed(proc, checks_permissions=True)
        assert why_opendir_is_needed(root, checks_permissions=False)
        assert why_opendir_is_needed(root, checks_permissions=True) is None
