"""Links that the kernel keeps, depth that costs nothing, and blocks that stay reserved for root."""

import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.syscalls import fallocate
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, fresh_mount, trashd_mount, until
from tests.support.make_trees import make_chain, walk_chain
from tests.support.open_files import errno_of, held, opened
from tests.support.other_users import as_user
from tests.support.passthrough_files import free_bytes
from tests.support.real_filesystems import loop_volume, volume_of
from tests.support.transports import by_ring

pytestmark = pytest.mark.needs("root", "fuse", "loop")


ALICE, BOB = 4711, 4712
LONG = "d/" * 500 + "end"
_NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=["exclusive", "shared"])
def mount(volume: Path, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    options = (f"coherence={request.param}",)
    with trashd_mount(volume / request.param, options=options, limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def link(mount: Mounted) -> Path:
    """A link to `first`, whose target the kernel keeps."""
    path = mount.path / f"link{next(_NUMBERS)}"
    path.symlink_to("first")
    assert os.readlink(path) == "first"
    return path


@pytest.mark.takes_engine
def test_a_link_is_asked_for_once(mount: Mounted, link: Path) -> None:
    with held(link):
        assert os.readlink(link) == "first"
        n = mount.n_requests_for("readlink")
        assert [os.readlink(link) for _ in range(9)] == ["first"] * 9
        assert mount.n_requests_for("readlink") == n


def by_unlinking(link: Path) -> None:
    link.unlink()
    link.symlink_to("second")


def by_renaming(link: Path) -> None:
    other = link.with_name("other")
    other.symlink_to("second")
    other.rename(link)


def by_moving_aside(link: Path) -> None:
    aside = link.with_name("aside")
    link.rename(aside)
    link.symlink_to("second")
    aside.unlink()


REPLACINGS = pytest.mark.parametrize("replace", [by_unlinking, by_renaming, by_moving_aside])


@REPLACINGS
def test_a_link_that_is_replaced_leads_elsewhere_at_once(link: Path, replace: Callable[[Path], None]) -> None:
    for _ in range(5):  # with the inode number of the first, and of the one before
        replace(link)
        assert os.readlink(link) == "second"
        link.unlink()
        link.symlink_to(LONG)
        assert os.readlink(link) == LONG


@REPLACINGS
@pytest.mark.parametrize("mount", ["shared"], indirect=True)
def test_a_link_that_is_replaced_behind_the_mount_leads_elsewhere(
    mount: Mounted, link: Path, replace: Callable[[Path], None]
) -> None:
    replace(mount.backing / link.name)
    assert until(lambda: os.readlink(link) == "second")


@pytest.mark.takes_engine
def test_a_link_that_somebody_holds_stays_what_it_was(link: Path) -> None:
    fd = os.open(link, os.O_PATH | os.O_NOFOLLOW)
    try:
        by_renaming(link)
        assert os.readlink("", dir_fd=fd) == "first"
        assert os.readlink(link) == "second"
    finally:
        os.close(fd)


def test_another_mount_knows_nothing_of_the_last_one(volume: Path) -> None:
    source = volume / f"again{next(_NUMBERS)}"
    source.mkdir()
    for target in ("first", "second", LONG):
        (source / "link").unlink(missing_ok=True)
        (source / "link").symlink_to(target)
        with trashd_mount(source) as mounted:
            assert os.readlink(mounted.path / "link") == target


def test_the_drop_link_follows_its_users_folder(mount: Mounted) -> None:
    drop, store = mount.path / ".trashd/drop", mount.backing / ".trashd"
    assert as_user(ALICE, lambda: os.readlink(drop)) == f"u/{ALICE}/drop"
    (store / "u" / str(ALICE)).chmod(0o750)
    as_user(BOB, lambda: os.makedirs(store / "new" / str(ALICE) / "drop"))
    target = as_user(ALICE, lambda: os.readlink(drop))
    assert target.startswith(f"u/{ALICE}.")
    assert as_user(ALICE, lambda: os.stat(drop).st_uid) == ALICE
    shutil.rmtree(store / "u" / str(ALICE))
    shutil.rmtree(store / target.rpartition("/")[0])
    assert as_user(ALICE, lambda: os.readlink(drop)) == f"u/{ALICE}/drop"


N_FDS = 256
N_LEVELS, N_LEVELS_BESIDE = 600, 60


@pytest.fixture(params=["tmpfs", "ext4"])
def deep_mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """With fewer fds than the tree has levels."""
    with fresh_mount(made=volume_of(request.param), n_fds_max=N_FDS) as mounted:
        yield mounted


def n_messages(deep_mount: Mounted, act: Callable[[], object]) -> int:
    before = deep_mount.n_requests()
    act()
    return deep_mount.n_requests() - before


def test_a_tree_deeper_than_the_daemon_has_fds_is_made_walked_moved_and_removed(deep_mount: Mounted) -> None:
    a, b = deep_mount.path / "a", deep_mount.path / "b"
    make_chain(a, N_LEVELS)
    a.rename(b)
    assert walk_chain(b) == N_LEVELS
    deep_mount.forget_all()
    assert walk_chain(b) == N_LEVELS
    subprocess.run(["rm", "-rf", b], check=True)
    assert os.listdir(deep_mount.path) == []


def test_a_deep_tree_takes_no_more_messages_a_level(deep_mount: Mounted) -> None:
    """What is made, what is found, and what is removed."""

    def of(n: int) -> list[float]:
        top = deep_mount.path / f"{n}"
        acts = (
            lambda: make_chain(top, n),
            lambda: walk_chain(top),
            lambda: subprocess.run(["rm", "-rf", top], check=True),
        )
        return [n_messages(deep_mount, act) / n for act in acts]

    for deep, shallow in zip(of(N_LEVELS), of(N_LEVELS_BESIDE), strict=True):
        assert deep < 1.5 * shallow


CAROL = 70_001
KIB, MIB = 1 << 10, 1 << 20
SIZE_MIB, PERCENT = 32, 20
RESERVED = SIZE_MIB * MIB * PERCENT // 100
NEARLY = 256 * KIB
"""What the filesystem may take for itself."""
N_FILES = 200
LIMIT_S = 60.0
OPTIONS = {
    "auto": ["passthrough=auto"],
    "off": ["passthrough=off"],
    "slow": ["passthrough=off", "backing=slow"],
    "by the core": ["passthrough=auto", "uring=on"],
}


@pytest.fixture(params=["auto", "off"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """Of an ext4 with such blocks: the kernel writes, or the daemon, or threads of the daemon's."""
    made = loop_volume("ext4", SIZE_MIB, ("-m", str(PERCENT)))
    with fresh_mount("coherence=exclusive", *OPTIONS[request.param], made=made, limit_s=LIMIT_S) as mounted:
        mounted.path.chmod(0o777)
        yield mounted


def add(path: Path, most: int = 2 * SIZE_MIB * MIB) -> int:
    """How many bytes a file takes, a new one if need be, until there are no more blocks for the writer."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as fd:
        return add_to(fd, most)


def add_to(fd: int, most: int = 2 * SIZE_MIB * MIB) -> int:
    """How many bytes an open file takes until there are no more blocks for its writer."""
    n = 0
    for piece in (64 * KIB, KIB):
        try:
            while n < most:
                n += os.write(fd, bytes(piece))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return n


@pytest.mark.parametrize("mounted", ["auto", "off", "slow"], indirect=True)
def test_a_user_has_as_much_room_through_the_mount_as_below(mounted: Mounted) -> None:
    assert as_user(CAROL, lambda: add(mounted.path / "file")) > MIB
    assert as_user(CAROL, lambda: add(mounted.backing / "below")) < NEARLY
    (mounted.path / "file").unlink()
    assert until(lambda: free_bytes(mounted.backing) > 2 * MIB)  # when the daemon has closed it
    assert as_user(CAROL, lambda: add(mounted.backing / "below")) > MIB
    assert as_user(CAROL, lambda: add(mounted.path / "again")) < NEARLY


def test_root_has_the_reserve_still_when_users_have_all_else(mounted: Mounted) -> None:
    as_user(CAROL, lambda: add(mounted.path / "file"))
    assert RESERVED - MIB < add(mounted.path / "roots") < RESERVED + MIB


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_TRUNC, os.O_RDWR])
def test_however_a_user_opens_his_file_nothing_of_the_reserve_is_his(mounted: Mounted, flags: int) -> None:
    file = mounted.path / "file"
    as_user(CAROL, lambda: file.write_bytes(b"his"))

    def fill() -> int:
        add(mounted.backing / "below")
        with opened(file, flags) as fd:
            return add_to(fd)

    assert as_user(CAROL, fill) < NEARLY


def test_whoever_has_a_users_file_open_already_nothing_of_the_reserve_is_his(mounted: Mounted) -> None:
    file = mounted.path / "file"
    as_user(CAROL, lambda: file.write_bytes(b"his"))
    with opened(file, os.O_RDONLY):
        as_user(CAROL, lambda: add(mounted.backing / "below"))
        assert as_user(CAROL, lambda: add(file)) < NEARLY


@pytest.mark.parametrize("mounted", ["auto", "off", by_ring("by the core")], indirect=True)
@pytest.mark.parametrize("is_new", [True, False])
def test_a_file_of_roots_that_others_may_write_has_nothing_of_the_reserve(mounted: Mounted, is_new: bool) -> None:
    file = mounted.path / "shared"
    (mounted.path if is_new else mounted.backing).joinpath("shared").touch()
    file.chmod(0o666)
    with opened(file, os.O_RDONLY):
        as_user(CAROL, lambda: add(mounted.backing / "below"))
        assert as_user(CAROL, lambda: add(file)) < NEARLY


@pytest.mark.takes_engine
@pytest.mark.parametrize("mounted", ["auto", "off", "slow"], indirect=True)
def test_blocks_that_are_allocated_or_copied_are_nothing_of_the_reserve(mounted: Mounted) -> None:
    file, source = mounted.path / "file", mounted.path / "source"
    as_user(CAROL, lambda: source.write_bytes(bytes(range(256)) * (NEARLY // 256)))

    def fill() -> list[int]:
        add(mounted.backing / "below")
        with opened(file, os.O_RDWR | os.O_CREAT) as fd, opened(source, os.O_RDONLY) as source_fd:
            copying = (partial(os.copy_file_range, source_fd, fd, NEARLY, 0, NEARLY * n) for n in range(3))
            return [errno_of(partial(fallocate, fd, 0, MIB, MIB)), *map(errno_of, copying)]

    assert as_user(CAROL, fill)[-1] == errno.ENOSPC
    assert file.stat().st_blocks * 512 < NEARLY


def test_extended_attributes_take_nothing_of_the_reserve(mounted: Mounted) -> None:
    files = [mounted.path / str(i) for i in range(N_FILES)]

    def fill() -> int:
        for file in files:
            file.touch()
        add(mounted.backing / "below")
        return sum(errno_of(partial(os.setxattr, file, "user.name", os.urandom(KIB // 2))) == 0 for file in files)

    assert as_user(CAROL, fill) < N_FILES / 4


@pytest.mark.parametrize("mounted", ["auto", "off", "slow"], indirect=True)
def test_a_write_that_was_refused_leaves_the_daemon_what_it_was(mounted: Mounted) -> None:
    as_user(CAROL, lambda: add(mounted.path / "file"))
    assert errno_of(lambda: os.mkdir(mounted.path / "roots")) == 0
    assert (mounted.path / "roots").stat().st_uid == 0
