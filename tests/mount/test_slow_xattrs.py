"""Extended attributes over a slow filesystem: fetched with what is listed, remembered, told as they are to users who
may see them. What the slow filesystem is asked is counted by itself.
"""

import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.acls import (
    ACCESS,
    CAN_BIND,
    CAPABILITY,
    DEFAULT,
    GROUP_OBJ,
    MASK,
    NOBODY,
    OTHER,
    USER,
    USER_OBJ,
    acl,
)
from tests.support.background_processes import workers
from tests.support.foreground_mount import SHARED_LIMIT_S, until
from tests.support.fuse_slow import Xattrs
from tests.support.many_files import fill
from tests.support.other_users import as_user
from tests.support.slow_mounts import LIMIT_S, SLOW, N, SlowMount, slow_mount

pytestmark = [pytest.mark.needs("root", "fuse"), pytest.mark.takes_engine]

N_FEW = 200
N_LATE = 300  # asked for while they were being fetched, or fetched before it was known what is wanted
BEFORE_ALL = 1_000_000_000  # s: of no file here
PLAIN = acl((USER_OBJ, 6, NOBODY), (GROUP_OBJ, 0, NOBODY), (OTHER, 0, NOBODY))
GRANTS = acl((USER_OBJ, 6, NOBODY), (USER, 6, 1234), (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 4, NOBODY))
_300_USERS = ((USER, 4, uid) for uid in range(300))
LONG = acl((USER_OBJ, 6, NOBODY), *_300_USERS, (GROUP_OBJ, 4, NOBODY), (MASK, 4, NOBODY), (OTHER, 0, NOBODY))


def make(top: Path, n: int) -> None:
    """Every tenth file has an ACL."""
    fill(top, n)
    for path in list(top.iterdir())[::10]:
        os.setxattr(path, ACCESS, GRANTS)
    (top / "inner").mkdir()
    os.setxattr(top / "inner", DEFAULT, GRANTS)


def run(words: list[str], top: Path) -> bytes:
    """What a command prints, as people call it."""
    with tempfile.TemporaryDirectory() as elsewhere:
        os.utime(elsewhere, (0, 0))
        argv = [word.format(elsewhere) for word in words]
        return subprocess.run(argv, capture_output=True, timeout=LIMIT_S, check=False, cwd=top).stdout


COMMANDS = {
    "ls -l": ["ls", "-l", "--color=always", "."],
    "ls --color": ["ls", "--color=always", "."],
    "find": ["find", ".", "-newermt", f"@{BEFORE_ALL}", "-perm", "/111"],
    "getfacl": ["getfacl", "-R", "."],
    "getfattr": ["getfattr", "-R", "-d", "-m", "-", "."],
    "rsync": ["rsync", "-aA", "--dry-run", "--itemize-changes", "./", "{}/"],
    "rsync -X": ["rsync", "-aAX", "--dry-run", "--itemize-changes", "./", "{}/"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("ttl_s", [0, 1000])
def test_the_second_time_nothing_is_asked_though_the_kernel_has_forgotten_all(command: str, ttl_s: float) -> None:
    with slow_mount(SLOW, make=make, n=N_FEW, ttl_s=ttl_s) as one:
        first = run(COMMANDS[command], one.top)
        before = one.asked()
        one.forget_all()
        assert run(COMMANDS[command], one.top) == first
        asked = one.asked_since(before)
        assert asked == {}
        assert first == run(COMMANDS[command], one.backing)


def test_each_is_asked_for_once() -> None:
    with slow_mount(SLOW, make=make) as one:
        before = one.asked()
        run(COMMANDS["ls -l"], one.top)
        asked = one.asked_since(before)
        assert N <= asked["getxattr"] <= N + N_LATE
        assert N <= asked["lookup"] <= N + N_LATE


def test_many_are_asked_for_at_a_time() -> None:
    with slow_mount(SLOW, "in_flight=64", make=make) as one:
        one.volume.delay_all()
        one.volume.delay(5000)
        one.volume.forget_max()
        run(COMMANDS["getfacl"], one.top)
        assert one.volume.max_under_way >= 32


def test_who_asks_for_none_has_none_fetched() -> None:
    with slow_mount(SLOW, make=make) as one:
        before = one.asked()
        for _ in range(2):
            run(COMMANDS["ls --color"], one.top)
        assert "getxattr" not in one.asked_since(before)
        run(COMMANDS["ls -l"], one.top)
        for name in ("next", "one after"):  # one listing later, they are not wanted any more
            before = one.asked()
            fill(one.volume.backing / name, 100)
            run(COMMANDS["ls --color"], one.top.parent / name)
        assert one.asked_since(before).get("getxattr", 0) == 0


def test_what_ls_has_fetched_getfacl_is_told_from_memory() -> None:
    """And what was listed without is fetched at a request: many at a time."""
    with slow_mount(SLOW, make=make) as one:
        run(COMMANDS["find"], one.top)
        before = one.asked()
        one.volume.forget_max()
        run(COMMANDS["ls -l"], one.top)
        asked = one.asked_since(before)
        assert N <= asked["getxattr"] <= N + N_LATE
        before = one.asked()
        run(COMMANDS["getfacl"], one.top)
        assert one.asked_since(before).get("getxattr", 0) < 10  # of the directories: a default ACL each


def test_few_are_waited_for_one_by_one_though_the_attributes_are_remembered() -> None:
    with slow_mount(SLOW, make=make) as one:
        one.volume.delay_all()
        run(COMMANDS["find"], one.top)
        one.asked()
        one.forget_all()
        before = one.mounted.stats().remembered["xattr"].n_misses
        run(COMMANDS["getfacl"], one.top)
        assert one.mounted.stats().remembered["xattr"].n_misses - before < N / 10


@pytest.mark.parametrize("xattrs", [Xattrs.NONE, Xattrs.UNKNOWN, Xattrs.DIRECTORIES, Xattrs.FILES])
@pytest.mark.parametrize("command", ["ls -l", "getfacl", "getfattr", "rsync -X"])
def test_who_has_none_is_asked_once(xattrs: Xattrs, command: str) -> None:
    """Or once of a file, and once of a directory."""
    with slow_mount(SLOW, make=make, n=N_FEW, xattrs=xattrs) as one:
        for _ in range(2):
            before = one.asked()
            told = run(COMMANDS[command], one.top)
            asked = one.asked_since(before)
            n_asked = asked.get("getxattr", 0) + asked.get("listxattr", 0)
            if xattrs is Xattrs.FILES:
                assert n_asked <= 2 * N_FEW + 3 * N_LATE  # the list of names, and an ACL
            else:
                assert n_asked <= 16
            one.forget_all()
        assert told.count(b"\n") >= N_FEW or command == "getfattr"


def all_xattrs(path: Path) -> dict[str, bytes | int]:
    found: dict[str, bytes | int] = {}
    for name in {*os.listxattr(path, follow_symlinks=False), ACCESS, DEFAULT, CAPABILITY, "user.a"}:
        try:
            found[name] = os.getxattr(path, name, follow_symlinks=False)
        except OSError as error:
            found[name] = error.errno or errno.EIO
    return found


def take_away(path: Path) -> None:
    os.removexattr(path, ACCESS)


def write(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def make_anew(path: Path) -> None:
    path.unlink()
    path.touch()


CHANGES: dict[str, Callable[[Path], object]] = {
    "set": lambda path: os.setxattr(
        path, ACCESS, acl((USER_OBJ, 7, NOBODY), (GROUP_OBJ, 1, NOBODY), (OTHER, 0, NOBODY))
    ),
    "remove": take_away,
    "chmod": lambda path: path.chmod(0o604),
    "write": write,
    "truncate": lambda path: os.truncate(path, 1),
    "chown": lambda path: os.chown(path, 12, 34),
    "another": lambda path: os.setxattr(path, "user.a", b"1"),
    "its capability": lambda path: os.setxattr(path, CAPABILITY, CAN_BIND[:-1] + b"\0"),
    "no capability": lambda path: os.removexattr(path, CAPABILITY),
    "replace": lambda path: path.with_name("f1").rename(path),
    "make anew": make_anew,
}


@pytest.fixture(scope="module", params=[[], ["cache_size=0"], ["timeout=0"], ["timeout=1"]], ids=str)
def served_for_all(request: pytest.FixtureRequest) -> Iterator[SlowMount]:
    with slow_mount(SLOW, *request.param, make=make, n=0, limit_s=SHARED_LIMIT_S) as one:
        yield one


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_told_as_it_is_now(served_for_all: SlowMount, change: str) -> None:
    one = served_for_all._replace(name=f"of {change}")
    make(one.backing, 6)
    os.setxattr(one.backing / "f0", ACCESS, GRANTS)
    os.setxattr(one.backing / "f0", CAPABILITY, CAN_BIND)
    paths = [one.top / name for name in os.listdir(one.top)]
    for _ in range(2):
        for path in paths:
            assert all_xattrs(path) == all_xattrs(one.backing / path.name)
        run(COMMANDS["ls -l"], one.top)
    CHANGES[change](one.top / "f0")
    for _ in range(2):
        for path in one.top.iterdir():
            assert all_xattrs(path) == all_xattrs(one.backing / path.name)
        assert run(COMMANDS["ls -l"], one.top) == run(COMMANDS["ls -l"], one.backing)
        one.mounted.forget_all()


def test_xattrs_of_all_kinds_are_told_as_they_are() -> None:
    with slow_mount(SLOW, make=make, n=10) as one:
        os.mkfifo(one.backing / "pipe")
        (one.backing / "link").symlink_to("f1")
        (one.backing / "\udcff new\nline").touch()
        for path in one.backing.iterdir():
            if path.is_file() and not path.is_symlink():
                os.setxattr(path, "user.long", b"x" * 3000)
                os.setxattr(path, ACCESS, LONG)
        for _ in range(3):
            run(COMMANDS["getfattr"], one.top)
            for path in one.top.iterdir():
                assert all_xattrs(path) == all_xattrs(one.backing / path.name)
            one.mounted.forget_all()


def test_an_acl_lets_in_and_keeps_out_as_it_is_now() -> None:
    """The kernel asks, and the daemon may remember; then it is another."""

    def may_read() -> bool:
        return os.access(one.top / "f0", os.R_OK)

    with slow_mount(SLOW, make=make, n=20) as one:
        (one.backing / "f0").chmod(0o600)
        os.setxattr(one.backing / "f0", ACCESS, GRANTS)
        run(COMMANDS["ls -l"], one.top)
        one.forget_all()
        for _ in range(2):
            assert as_user(1234, may_read)
            os.setxattr(one.top / "f0", ACCESS, PLAIN)
            assert not as_user(1234, may_read)
            one.forget_all()
            assert not as_user(1234, may_read)
            os.setxattr(one.top / "f0", ACCESS, GRANTS)


def sets_for_ever(path: Path) -> None:
    n = 0
    while True:
        n += 1
        os.setxattr(path, "user.other", b"%d" % n)


def lists_for_ever(top: Path) -> None:
    while True:
        run(COMMANDS["ls -l"], top)


@pytest.mark.parametrize("options", [[], ["cache_size=8K"]], ids=str)
def test_who_changed_one_sees_it_however_many_look(options: list[str]) -> None:
    """What was fetched before a change, and comes after it, is not believed: by no client."""
    with slow_mount(SLOW, *options, make=make, n=150) as one:
        path = one.top / "f7"
        with workers([lambda: lists_for_ever(one.top)] * 2 + [lambda: sets_for_ever(one.top / "f8")]):
            for i in range(25):
                value = acl((USER_OBJ, 6, NOBODY), (USER, i % 8, 1234), (GROUP_OBJ, 4, NOBODY), (MASK, 7, NOBODY),
                            (OTHER, 4, NOBODY))  # fmt: skip
                os.setxattr(path, ACCESS, value)
                assert os.getxattr(path, ACCESS) == value
                if i % 5 == 4:
                    one.forget_all()
                    assert os.getxattr(path, ACCESS) == value
                os.removexattr(path, ACCESS)
                with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
                    os.getxattr(path, ACCESS)


def acl_of(path: Path) -> bytes | None:
    try:
        return os.getxattr(path, ACCESS)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return None
        raise


def test_nobody_is_told_what_another_user_was_told() -> None:
    """Of a filesystem that looks who asks: neither by the daemon nor by the kernel, which has one ACL of an inode."""
    with slow_mount(SLOW, make=make, n=20, xattrs=Xattrs.ALL | Xattrs.FOR_ROOT, ttl_s=0) as one:
        names = [path.name for path in one.backing.iterdir() if acl_of(path) is not None]
        assert names
        for _ in range(3):
            run(COMMANDS["ls -l"], one.top)
            for name in names:
                assert acl_of(one.top / name) == GRANTS
                assert as_user(1000, partial(acl_of, one.top / name)) is None
                assert acl_of(one.top / name) == GRANTS
            with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
                as_user(1000, lambda: os.listxattr(one.top / names[0]))
            assert ACCESS in os.listxattr(one.top / names[0])
            one.forget_all()


def test_each_is_told_from_memory_what_he_was_told() -> None:
    """And what is told to no client is asked for once."""
    with slow_mount(SLOW, make=make, n=20, xattrs=Xattrs.ALL | Xattrs.FOR_ROOT) as one:
        path = next(path for path in one.backing.iterdir() if acl_of(path) is not None)
        for _ in range(2):
            as_user(1000, partial(acl_of, one.top / path.name))
            as_user(1001, partial(acl_of, one.top / path.name))
        before = one.asked()
        one.forget_all()
        assert as_user(1000, partial(acl_of, one.top / path.name)) is None
        assert as_user(1001, partial(acl_of, one.top / path.name)) is None
        assert "getxattr" not in one.asked_since(before)
        os.setxattr(one.top / path.name, ACCESS, PLAIN)
        assert as_user(1000, partial(acl_of, one.top / path.name)) is None
        assert one.asked_since(before)["getxattr"] >= 1, "what was changed is asked for"
        one.volume.serve_xattrs(Xattrs.NONE)
        one.forget_all()
        before = one.asked()
        for name in os.listdir(one.top):
            for uid in (1000, 1001):
                with contextlib.suppress(OSError):
                    as_user(uid, partial(acl_of, one.top / name))
        assert one.asked_since(before).get("getxattr", 0) <= 8


def test_root_is_told_from_memory_though_others_would_be_told_otherwise() -> None:
    with slow_mount(SLOW, make=make, xattrs=Xattrs.ALL | Xattrs.FOR_ROOT) as one:
        first = run(COMMANDS["ls -l"], one.top)
        before = one.asked()
        one.forget_all()
        assert run(COMMANDS["ls -l"], one.top) == first
        assert one.asked_since(before) == {}


def test_what_is_remembered_is_counted() -> None:
    with slow_mount(SLOW, make=make) as one:
        run(COMMANDS["getfacl"], one.top)
        one.forget_all()
        before = one.mounted.stats().remembered
        run(COMMANDS["getfacl"], one.top)
        now = one.mounted.stats().remembered
        assert now["xattr"].n_hits - before["xattr"].n_hits >= N / 10
        assert now["missing_xattr"].n_hits - before["missing_xattr"].n_hits >= N * 9 / 10
        assert now["xattr"].n_misses == before["xattr"].n_misses


def test_what_is_remembered_takes_the_room_that_it_may() -> None:
    with slow_mount(SLOW, "cache_size=64K", make=make) as one:
        for _ in range(2):
            run(COMMANDS["getfattr"], one.top)
            assert run(COMMANDS["getfacl"], one.top) == run(COMMANDS["getfacl"], one.backing)
            assert until(lambda: 0 < one.mounted.stats().gauges["cache_bytes"] <= 64 << 10)
