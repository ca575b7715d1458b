"""What changes behind a shared mount is seen in time, whatever has remembered it; a listing whole or not at all."""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, renameat2
from tests.support.acls import ACCESS, CAN_BIND, CAPABILITY, DEFAULT, GROUP_OBJ, NOBODY, OTHER, USER_OBJ, acl
from tests.support.covering_sets import Axes
from tests.support.foreground_mount import Mounted, until
from tests.support.mount_and_backing import Sides, sides_on
from tests.support.open_files import read_entries

pytestmark = pytest.mark.needs("root", "fuse", "loop")


TIMEOUT_S = 0.5
TICK_S = 0.05  # the kernel counts in jiffies, and rounds up
LIMIT_S = 60
N_ROUNDS, N_CHANGES, N_NAMES = 4, 100, 7


@dataclass(frozen=True)
class Setup(Axes):
    """Of a mount: its backing filesystem, whether operations go to threads, and one option more."""

    fs_type: str
    backing: str = "local"
    option: str = ""

    def options(self, *others: str) -> list[str]:
        return ["coherence=shared", *others, f"backing={self.backing}", *filter(None, [self.option])]


SETUPS = {
    "tmpfs": Setup("tmpfs"),
    "ext4": Setup("ext4"),
    "overlay": Setup("overlay"),
    "ext4 in threads": Setup("ext4", "slow"),
    "overlay in threads": Setup("overlay", "slow"),
    "overlay in threads, tiny": Setup("overlay", "slow", "cache_size=4K"),
    "overlay in threads, without a cache": Setup("overlay", "slow", "cache_size=0"),
}
REMEMBERED_NOWHERE = {name: setup for name, setup in SETUPS.items() if "cache_size" not in setup.option}
"""Where nothing may be believed, caches of different sizes are alike."""
PATHS = (
    ".", "file", "hard", "link", "new", "inner", "inner/child", "inner/new", "inner/kid", "other", "other/kid",
    "other/child", "replaced", "replaced/child",
)  # fmt: skip
PLAIN = acl((USER_OBJ, 7, NOBODY), (GROUP_OBJ, 4, NOBODY), (OTHER, 0, NOBODY))
_NUMBERS = itertools.count()


def make(top: Path) -> None:
    for name in ("inner", "other"):
        (top / name).mkdir(parents=True)
    for name in ("file", "inner/child", "other/kid", "replaced"):
        (top / name).write_bytes(b"content of " + name.encode())
    os.link(top / "file", top / "hard")
    (top / "link").symlink_to("file")


def exchange(top: Path, one: str, two: str) -> None:
    renameat2(AT_FDCWD, bytes(top / one), AT_FDCWD, bytes(top / two), RENAME_EXCHANGE)


def replace_link(top: Path) -> None:
    (top / "to come").symlink_to("inner/child")
    (top / "to come").rename(top / "link")


def replace_by_directory(top: Path) -> None:
    (top / "replaced").unlink()
    (top / "replaced").mkdir()
    (top / "replaced/child").touch()


CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda top: (top / "new").write_bytes(b"new"),
    "create below": lambda top: (top / "inner/new").mkdir(),
    "link": lambda top: os.link(top / "file", top / "inner/new"),
    "unlink": lambda top: (top / "inner/child").unlink(),
    "unlink one of two names": lambda top: (top / "file").unlink(),
    "rename": lambda top: (top / "file").rename(top / "inner/new"),
    "rename over": lambda top: (top / "other/kid").rename(top / "inner/child"),
    "rename a directory": lambda top: (top / "inner").rename(top / "new"),
    "exchange directories": lambda top: exchange(top, "inner", "other"),
    "exchange a link and a directory": lambda top: exchange(top, "link", "inner"),
    "another link": replace_link,
    "a directory for a file": replace_by_directory,
    "write": lambda top: (top / "hard").write_bytes(b"longer content than there was"),
    "cut": lambda top: os.truncate(top / "hard", 3),
    "chmod": lambda top: (top / "hard").chmod(0o604),
    "chmod of a directory": lambda top: (top / "inner").chmod(0o1711),
    "chown of a link": lambda top: os.lchown(top / "link", 12, 34),
    "utime": lambda top: os.utime(top / "hard", ns=(10**18, 10**18 + 1)),
    "xattr": lambda top: os.setxattr(top / "hard", "user.first", b"1"),
    "an ACL": lambda top: os.setxattr(top / "hard", ACCESS, PLAIN),
    "a default ACL": lambda top: os.setxattr(top / "inner", DEFAULT, PLAIN),
    "a capability": lambda top: os.setxattr(top / "other/kid", CAPABILITY, CAN_BIND),
}


def is_alike(both: Sides, paths: Sequence[str] = PATHS) -> bool:
    try:
        both.assert_alike(paths)
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module", params=SETUPS.values(), ids=list(SETUPS))
def setup(request: pytest.FixtureRequest) -> Setup:
    found: Setup = request.param
    return found


@pytest.fixture(scope="module")
def shared(setup: Setup) -> Iterator[tuple[Mounted, Sides]]:
    with sides_on(setup.fs_type, setup.options(f"timeout={TIMEOUT_S}")) as both:
        yield both


@pytest.fixture(scope="module")
def unbelieved(setup: Setup) -> Iterator[Sides]:
    """Of a mount with timeout=0: neither the kernel nor the daemon remembers anything."""
    with sides_on(setup.fs_type, setup.options("timeout=0")) as (_mounted, top):
        yield top


def test_what_is_looked_up_while_it_changes_is_right_when_it_is_quiet(shared: tuple[Mounted, Sides]) -> None:
    mounted, top = shared
    both = top.below(f"place{next(_NUMBERS)}")
    paths = [f"{i}" for i in range(N_CHANGES)]
    for path in paths:
        (both.behind / path).mkdir(parents=True)
    assert until(lambda: is_alike(both, paths))
    for _ in range(N_ROUNDS):
        mounted.forget_all()
        with ThreadPoolExecutor(1) as pool:
            for path in paths:
                looker = pool.submit(os.stat, both.mount_path / path)
                (both.behind / path).touch()
                looker.result(LIMIT_S)
        if not until(lambda: is_alike(both, paths)):
            both.assert_alike(paths)


def change_often(top: Path) -> None:
    """A few names come, mean something else, and go."""
    for i in range(N_CHANGES):
        path = top / f"{i % N_NAMES}"
        path.write_bytes(b"x" * i)
        if i % 3 == 0:
            path.rename(path.with_name(f"{path.name}-renamed"))
        elif i % 3 == 1:
            path.unlink()


def test_what_is_looked_at_while_it_changes_is_right_when_it_is_quiet(shared: tuple[Mounted, Sides]) -> None:
    """An answer that was on its way when the change came must not be remembered."""
    mounted, top = shared
    both = top.below(f"place{next(_NUMBERS)}")
    both.behind.mkdir()
    paths = [".", *(f"{i}{end}" for i in range(N_NAMES) for end in ("", "-renamed"))]
    with ThreadPoolExecutor(1) as pool:
        for i in range(N_ROUNDS):
            writer = pool.submit(change_often, both.behind)
            while not writer.done():
                both.warm(paths)
            writer.result(LIMIT_S)
            if i % 2:
                mounted.forget_all()
            if not until(lambda: is_alike(both, paths)):
                both.assert_alike(paths)
            mounted.forget_all()
            both.assert_alike(paths)


@pytest.mark.parametrize("how", ["looking all the time", "forgetting all the time", "not looking"])
def test_a_change_is_seen_when_the_timeout_is_over(shared: tuple[Mounted, Sides], how: str) -> None:
    """All changes at a time, each in a place of its own, so that the timeout passes once.

    What an answer takes comes on top: the kernel counts from when the client has it.
    """
    mounted, top = shared
    places = {change: top.below(f"place{next(_NUMBERS)}") for change in CHANGES}
    for both in places.values():
        make(both.behind)
    (top.mount_path / "new").touch()  # what was made behind it is listed now
    for both in places.values():
        both.warm(PATHS)
    for change, both in places.items():
        CHANGES[change](both.behind)
    changed_s, longest_s = time.monotonic(), 0.0
    while (begun_s := time.monotonic()) < changed_s + TIMEOUT_S + TICK_S + longest_s:
        match how:
            case "looking all the time":
                for both in places.values():
                    both.warm(PATHS)
            case "forgetting all the time":
                mounted.forget_all()
                for both in places.values():
                    for path in PATHS:
                        os.path.lexists(both.mount_path / path)
            case _:
                time.sleep(TICK_S)
        longest_s = max(longest_s, time.monotonic() - begun_s)
    for both in places.values():
        both.assert_alike(PATHS)


@pytest.mark.parametrize("setup", REMEMBERED_NOWHERE.values(), ids=REMEMBERED_NOWHERE, indirect=True, scope="module")
@pytest.mark.parametrize("change", CHANGES)
def test_what_nobody_may_believe_is_asked_for_each_time(unbelieved: Sides, change: str) -> None:
    both = unbelieved.below(change)
    make(both.behind)
    both.warm(PATHS)
    CHANGES[change](both.behind)
    both.assert_alike(PATHS)


HOUR, SLOW = "timeout=3600", "backing=slow"
MOUNTS = {
    "exclusive": ["coherence=exclusive"],
    "shared": ["coherence=shared", HOUR],
    "in threads": ["coherence=exclusive", SLOW],
    "in threads, tiny": ["coherence=exclusive", SLOW, "cache_size=4K"],
    "in threads, shared": ["coherence=shared", HOUR, SLOW],
}
N_STANDING = 300  # several replies, and some 10 KiB of names


@pytest.fixture(scope="module", params=MOUNTS)
def mount(request: pytest.FixtureRequest) -> Iterator[tuple[Mounted, Sides]]:
    with sides_on("ext4", MOUNTS[request.param]) as both:
        yield both


@pytest.fixture
def place(mount: tuple[Mounted, Sides]) -> Sides:
    """A directory of some size, and one beside it."""
    below = mount[1].below(f"place{next(_NUMBERS)}")
    for name in ("d", "beside"):
        (below.behind / name).mkdir(parents=True)  # which is not known yet
    (below.behind / "beside/new").touch()
    for i in range(N_STANDING):
        (below.behind / f"d/standing-{i:020}").touch()
    return below


def names(fd: int, size: int = 2048) -> list[str]:
    return [os.fsdecode(name) for name, _offset in read_entries(fd, size)]


def rest(fd: int) -> list[str]:
    """What is left to be read."""
    return [name for some in iter(lambda: names(fd, 32768), []) for name in some if name not in (".", "..")]


def assert_right(mounted: Mounted, place: Sides) -> None:
    """The listing is what is there: as it is remembered, and when the kernel has forgotten it."""
    for _ in range(3):
        right = sorted(os.listdir(place.behind / "d"))
        for _ in range(2):
            assert sorted(os.listdir(place.mount_path / "d")) == right
        with os.scandir(place.mount_path / "d") as entries:
            assert sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False)) == right
        mounted.forget_all()


FIRST, LAST = f"d/standing-{0:020}", f"d/standing-{N_STANDING - 1:020}"
LISTED_CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda top: (top / "d/made").touch(),
    "unlink": lambda top: (top / FIRST).unlink(),
    "unlink another": lambda top: (top / LAST).unlink(),
    "rename": lambda top: (top / FIRST).rename(top / "d/renamed"),
    "rename over": lambda top: (top / FIRST).rename(top / LAST),
    "rename out": lambda top: (top / LAST).rename(top / "out"),
    "rename in": lambda top: (top / "beside/new").rename(top / "d/in"),
    "link": lambda top: os.link(top / FIRST, top / "d/link"),
}


@pytest.mark.parametrize("change", LISTED_CHANGES)
def test_what_changes_while_a_listing_is_read_is_in_the_next(
    mount: tuple[Mounted, Sides], place: Sides, change: str
) -> None:
    for is_known in (False, True):
        if is_known:
            os.listdir(place.mount_path / "d")
        fd = os.open(place.mount_path / "d", os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert names(fd)
            LISTED_CHANGES[change](place.mount_path)
            rest(fd)
        finally:
            os.close(fd)
        assert_right(mount[0], place)
        if not is_known:
            for undo in (place.mount_path / "d").iterdir():
                if not undo.name.startswith("standing"):
                    undo.unlink()
            for name in (FIRST, LAST, "beside/new"):
                (place.mount_path / name).touch()


def test_listings_read_by_halves_make_no_whole(mount: tuple[Mounted, Sides], place: Sides) -> None:
    """One reads the beginning, another the end; one seeks over the middle."""
    one, two, three = (os.open(place.mount_path / "d", os.O_RDONLY | os.O_DIRECTORY) for _ in range(3))
    try:
        beginning = names(one)
        (place.mount_path / "d" / beginning[-1]).unlink()
        names(two)
        (place.mount_path / "d/made").touch()
        names(three)
        middle = os.lseek(three, 0, os.SEEK_CUR)
        rest(two)
        (place.mount_path / "d/made").unlink()
        os.lseek(one, middle, os.SEEK_SET)
        rest(one)
        rest(three)
    finally:
        for fd in (one, two, three):
            os.close(fd)
    assert_right(mount[0], place)


def test_a_rewound_listing_is_a_new_one(mount: tuple[Mounted, Sides], place: Sides) -> None:
    fd = os.open(place.mount_path / "d", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert len(rest(fd)) == N_STANDING
        for i in range(3):
            (place.mount_path / f"d/made-{i}").touch()
            if i == 1:
                mount[0].forget_all()
            os.lseek(fd, 0, os.SEEK_SET)
            assert len(rest(fd)) == N_STANDING + i + 1
    finally:
        os.close(fd)
    assert_right(mount[0], place)


def test_a_listing_left_in_the_middle_is_none(mount: tuple[Mounted, Sides], place: Sides) -> None:
    for _ in range(5):
        fd = os.open(place.mount_path / "d", os.O_RDONLY | os.O_DIRECTORY)
        assert names(fd, 300)
        os.close(fd)
    assert_right(mount[0], place)


def test_a_removed_directory_lists_nothing(mount: tuple[Mounted, Sides], place: Sides) -> None:
    fd = os.open(place.mount_path / "beside", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.listdir(fd) == ["new"]
        (place.mount_path / "beside/new").unlink()
        (place.mount_path / "beside").rmdir()
        os.lseek(fd, 0, os.SEEK_SET)
        assert os.listdir(fd) == []
        (place.mount_path / "beside").mkdir()
        (place.mount_path / "beside/other").touch()
        assert os.listdir(place.mount_path / "beside") == ["other"]
        mount[0].forget_all()
        assert os.listdir(place.mount_path / "beside") == ["other"]
    finally:
        os.close(fd)
