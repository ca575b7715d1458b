"""What changes behind a shared mount is seen in time, though the kernel, the daemon or both have remembered it.

That is after the timeout: however often it was looked at meanwhile, what is believed gets no younger by that.
"""

from __future__ import annotations

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
                looker = pool.submit(os.stat, both.seen / path)
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
    (top.seen / "new").touch()  # what was made behind it is listed now
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
                        os.path.lexists(both.seen / path)
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
