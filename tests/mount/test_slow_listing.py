"""Listings over a slow filesystem: names wait for names alone, attributes and xattrs come many at a time."""

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.getdents import Dirents
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
from tests.support.make_trees import fill
from tests.support.open_files import errno_of, opened
from tests.support.other_users import as_user
from tests.support.slow_mounts import LIMIT_S, SLOW, N, SlowMount, slow_mount

pytestmark = [pytest.mark.needs("root", "fuse"), pytest.mark.takes_engine]


N_MANY = 10_000
N_SPARE = 20  # the directory itself, and the way to it
N_LATE = 512  # two batches that are fetched ahead: for what is late, the daemon waits two seconds, and then asks again
N_IN_FLIGHT = 64


def make_many(n_directories: int, directory: Path, n: int) -> None:
    fill(directory, n)
    for number in range(1, n_directories):
        fill(directory.with_name(f"{directory.name}{number}"), n)


def ls(*words: str | Path) -> list[str]:
    """What `ls` prints, as people call it."""
    done = subprocess.run(["ls", *words], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("words", [["-f"], ["-U"], ["-1"], ["-p", "-U"], ["--color=never", "-a"]], ids=" ".join)
def test_names_alone_ask_for_no_attributes(words: list[str]) -> None:
    """Kinds come with the names."""
    with slow_mount(SLOW) as one:
        before = one.count_entry_requests()
        assert len(ls(*words, one.top)) >= N
        assert one.count_entry_requests() - before < N_SPARE


@pytest.mark.parametrize("xattrs", [Xattrs.ALL, Xattrs.NONE], ids=["xattrs", "no xattrs"])
@pytest.mark.parametrize("words", [["-l"], ["-lU"], ["-l", "--color=always"], ["-s"]], ids=" ".join)
def test_attributes_are_asked_for_once_for_each_entry(words: list[str], *, xattrs: Xattrs) -> None:
    with slow_mount(SLOW, xattrs=xattrs) as one:
        before = one.count_entry_requests()
        assert len(ls(*words, one.top)) == N + 1
        first = one.count_entry_requests()
        assert N <= first - before < N * 1.1 + N_LATE + N_SPARE
        assert len(ls(*words, one.top)) == N + 1
        assert one.count_entry_requests() - first < N_SPARE
        one.forget_all()
        assert len(ls(*words, one.top)) == N + 1
        assert one.count_entry_requests() - first < 2 * N_SPARE, "the kernel forgot, and so did the daemon"


def test_who_wants_names_and_then_attributes_has_them_once() -> None:
    """A plain listing first, as a shell does for a pattern; then each name."""
    with slow_mount(SLOW) as one:
        before = one.count_entry_requests()
        names = os.listdir(one.top)
        for name in sorted(names):
            assert os.lstat(one.top / name).st_size == 0
        assert one.count_entry_requests() - before < N * 1.2 + N_LATE + N_SPARE


@pytest.mark.parametrize("n_in_flight", [1, 8, N_IN_FLIGHT])
def test_no_more_are_in_flight_than_allowed(n_in_flight: int) -> None:
    with slow_mount(SLOW, f"in_flight={n_in_flight}", n=4 * N) as one:
        one.volume.forget_max()
        with os.scandir(one.top) as entries:
            for number, entry in enumerate(entries):
                # Once as many as may be are fetched at a time, they take so long that all of them are sent off.
                is_seen = one.volume.max_under_way >= n_in_flight / 2
                if is_seen and number > N:
                    break
                one.volume.delay(100 if number < N_SPARE or is_seen else 2000 * n_in_flight)
                entry.stat(follow_symlinks=False)
        one.count_entry_requests()
        most = one.volume.max_under_way
        assert most <= n_in_flight + 4  # and the listing itself, and the client's own
        assert most >= n_in_flight / 2


def test_the_head_of_a_listing_costs_little() -> None:
    """`ls -U | head`: names; and a few attributes, for which no more are fetched than the next few."""
    with slow_mount(SLOW, n=N_MANY) as one:
        before = one.count_entry_requests()
        with subprocess.Popen(["ls", "-U", one.top], stdout=subprocess.PIPE) as head:
            assert head.stdout is not None
            assert head.stdout.readline()
            head.stdout.close()
        assert one.count_entry_requests() - before < N_SPARE
        with os.scandir(one.top) as entries:
            for _, entry in zip(range(3), entries, strict=False):
                entry.stat(follow_symlinks=False)
        assert one.count_entry_requests() - before < N_MANY / 4


def test_two_who_list_at_a_time_are_both_told_all() -> None:
    with slow_mount(SLOW, delay_us=500) as one, ThreadPoolExecutor(3) as pool:
        before = one.count_entry_requests()
        lists = [pool.submit(ls, "-l", one.top) for _ in range(3)]
        assert {len(found.result(LIMIT_S)) for found in lists} == {N + 1}
        assert lists[0].result() == lists[1].result() == lists[2].result()
        assert one.count_entry_requests() - before < 3 * N + N_SPARE


def test_many_directories_at_a_time_are_listed_whole() -> None:
    with (
        slow_mount(SLOW, n=200, make=partial(make_many, 12)) as one,
        ThreadPoolExecutor(8) as pool,
    ):
        directories = [path for path in one.mounted.path.iterdir() if path.name.startswith("flat")]
        assert len(directories) == 12
        for found in pool.map(lambda path: ls("-l", path), directories):
            assert len(found) == 201


@pytest.mark.parametrize("size", ["0", "4K", "200K"])
def test_what_can_not_be_remembered_is_listed_too(size: str) -> None:
    """Larger than the cache: it costs more, and within bounds."""
    with slow_mount(SLOW, f"cache_size={size}") as one:
        before = one.count_entry_requests()
        for _ in range(2):
            found = ls("-l", one.top)
            assert len(found) == N + 1
            one.forget_all()
        assert one.count_entry_requests() - before < 2 * (2 * N + N_LATE + N_SPARE)


def test_it_is_found_out_that_a_filesystem_is_slow() -> None:
    with slow_mount(make=partial(make_many, 3), delay_us=3000) as one:
        for name in ("flat", "flat1"):
            ls("-l", one.mounted.path / name)
        one.volume.delay(100_000)
        one.volume.forget_max()
        assert len(ls("-l", one.mounted.path / "flat2")) == 1001
        assert one.volume.max_under_way > 8


# Change, while attributes are fetched.


def link_and_unlink(top: Path) -> None:
    os.link(top / "f1", top / "linked")
    (top / "f1").unlink()


CHANGES: dict[str, Callable[[Path], object]] = {
    "rename": lambda top: (top / "f1").rename(top / "renamed"),
    "rename over": lambda top: (top / "f1").rename(top / "f2"),
    "link": lambda top: os.link(top / "f1", top / "linked"),
    "unlink one of two": link_and_unlink,
    "write": lambda top: (top / "f1").write_bytes(b"content"),
    "chmod": lambda top: (top / "f1").chmod(0o600),
    "xattr": lambda top: os.setxattr(top / "f1", "user.x", b"1"),
    "utime": lambda top: os.utime(top / "f1", ns=(1, 2)),
}


@pytest.fixture(scope="module")
def listed_for_all() -> Iterator[SlowMount]:
    with slow_mount(SLOW, n=0, limit_s=SHARED_LIMIT_S) as one:
        yield one


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_fetched_as_it_is_now(listed_for_all: SlowMount, change: str) -> None:
    """Though the kernel below believes what it knows: of what changed, it must be asked anew."""
    one = listed_for_all
    behind = fill(one.volume.backing / f"of {change}", 50)
    top = one.mounted.path / behind.name
    assert len(attributes(top)) == 50
    CHANGES[change](top)
    for _ in range(2):
        one.mounted.forget_all()
        assert attributes(top) == attributes(behind)


def attributes(top: Path) -> dict[str, tuple[int, ...]]:
    """Of all entries, by name."""
    with os.scandir(top) as entries:
        found = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    return {name: (st.st_mode, st.st_nlink, st.st_size, st.st_mtime_ns, st.st_ctime_ns) for name, st in found.items()}


def lists_for_ever(top: Path) -> None:
    while True:
        with os.scandir(top) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    entry.stat(follow_symlinks=False)


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["cache_size=8K"], ["timeout=0"]], ids=str)
def test_who_changed_something_sees_it_however_many_look(options: Sequence[str]) -> None:
    """What was fetched before a change, and comes after it, is not believed: by no client."""
    with slow_mount(SLOW, *options, n=150, delay_us=1000) as one:
        with workers([lambda: lists_for_ever(one.top)] * 2):
            for i in range(10):
                path = one.top / f"f{i}"
                path.chmod(0o600 + i % 64)
                assert path.stat().st_mode & 0o777 == 0o600 + i % 64
                os.truncate(path, i * 100)
                assert path.stat().st_size == i * 100
                if i % 5 == 4:
                    one.forget_all()
                made = one.top / f"made{i}"
                assert not made.exists()
                made.touch()
                assert made.exists()
                path.rename(one.top / f"renamed{i}")
                assert not path.exists()
                assert (one.top / f"renamed{i}").stat().st_size == i * 100
                made.unlink()
                assert not made.exists()
        for _ in range(2):
            assert attributes(one.top) == attributes(one.backing)
            one.forget_all()


@pytest.fixture
def both() -> Iterator[SlowMount]:
    with slow_mount(SLOW, ttl_s=0) as found:
        yield found


def n_opened(both: SlowMount) -> int:
    """How often a directory was opened below."""
    return both.volume.n_messages.get("opendir", 0)


def remember(both: SlowMount) -> None:
    """Only the daemon does."""
    os.listdir(both.top)
    both.forget_all()


def test_what_is_remembered_is_listed_without_opening_it(both: SlowMount) -> None:
    remember(both)
    before = n_opened(both)
    assert sorted(os.listdir(both.top)) == sorted(os.listdir(both.backing))
    assert n_opened(both) == before


def test_what_changes_while_it_is_open_is_seen(both: SlowMount) -> None:
    remember(both)
    with opened(both.top, os.O_RDONLY | os.O_DIRECTORY) as fd:
        (both.top / "new").touch()
        assert "new" in os.listdir(fd)
        (both.top / "new").unlink()
        assert sorted(os.listdir(fd)) == sorted(os.listdir(both.backing))


def test_its_names_are_made_durable(both: SlowMount) -> None:
    remember(both)
    with opened(both.top, os.O_RDONLY | os.O_DIRECTORY) as fd:
        before = both.volume.n_messages.get("fsyncdir", 0)
        os.fsync(fd)
        assert both.volume.n_messages["fsyncdir"] > before
        os.fdatasync(fd)


def test_it_may_be_moved_and_removed_while_it_is_open(both: SlowMount) -> None:
    remember(both)
    with opened(both.top, os.O_RDONLY | os.O_DIRECTORY) as fd:
        both.top.rename(both.top.with_name("moved"))
        assert len(os.listdir(fd)) == N
        os.fsync(fd)
        shutil.rmtree(both.top.with_name("moved"))
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []


def test_what_is_gone_behind_the_mount_is_told_to_be(both: SlowMount) -> None:
    remember(both)
    with opened(both.top, os.O_RDONLY | os.O_DIRECTORY) as fd:
        shutil.rmtree(both.backing)
        (both.mounted.path / "other").mkdir()
        assert errno_of(lambda: os.fsync(fd)) >= 0  # whatever it says: no client waits, and the daemon lives
    assert (both.mounted.path / "other").is_dir()


@pytest.mark.parametrize("is_remembered", [False, True])
def test_who_goes_back_is_told_what_was_told_before_and_nothing_is_read_again(*, is_remembered: bool) -> None:
    """As the kernel does when it has lost what it kept of a listing."""
    with slow_mount(SLOW, ttl_s=0) as both:
        if is_remembered:
            remember(both)
        with opened(both.top, os.O_RDONLY | os.O_DIRECTORY) as fd:
            entries = Dirents(Fd(fd))

            def block(offset: int) -> list[tuple[bytes, int, int, int]]:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                return entries.block(offset)

            parts = [block(0)]
            while parts[-1]:
                parts.append(block(parts[-1][-1][2]))
                if len(parts) == 4:  # before the end, and after it
                    again = block(parts[0][-1][2])
                    assert again[: len(parts[1])] == parts[1][: len(again)]
                    assert again
            n_read = both.volume.n_messages.get("readdir", 0)
            for one, following in itertools.pairwise(parts):
                again = block(one[-1][2])  # who has jumped is told few at first
                assert again == following[: len(again)]
                assert bool(again) == bool(following)
            assert both.volume.n_messages.get("readdir", 0) == n_read
        remember(both)
        assert both.volume.n_messages.get("readdir", 0) == n_read
        assert sum(map(len, parts)) == N + 2


def test_who_may_not_read_it_is_refused(both: SlowMount) -> None:
    both.top.chmod(0o711)
    remember(both)
    with pytest.raises(PermissionError):
        as_user(1000, lambda: os.listdir(both.top))
    both.top.chmod(0o755)
    assert len(as_user(1000, lambda: os.listdir(both.top))) == N


@pytest.mark.parametrize("options", [["cache_size=0"], ["timeout=0"], ["cache_size=16K"]], ids=str)
def test_what_is_not_remembered_is_opened(options: list[str]) -> None:
    with slow_mount(SLOW, *options, ttl_s=0) as both:
        remember(both)
        before = n_opened(both)
        assert len(os.listdir(both.top)) == N
        assert n_opened(both) == before + 1


def test_a_listing_read_anew_makes_nobody_ask_for_what_the_kernel_knows(both: SlowMount) -> None:
    """The kernel drops a file's ACL when a listing tells what the file is; so does no listing, of what it was told."""

    def ask_all() -> int:
        for name in os.listdir(both.top):
            path = both.top / name
            path.lstat()
            errno_of(partial(os.getxattr, path, ACCESS))
        return both.mounted.stats().operations["getxattr"].n()

    before = ask_all()
    (both.top / "new").touch()
    (both.top / "new").unlink()
    assert ask_all() - before < N / 10


def test_a_listing_tells_in_full_what_the_kernel_believes_no_more() -> None:
    with slow_mount(SLOW, "timeout=1.5", ttl_s=0) as both:

        def look_at_all() -> int:
            """How often names were looked up for it; read anew, and not as the kernel has it."""
            (both.top / "new").touch()
            (both.top / "new").unlink()
            before = both.mounted.stats().operations["lookup"].n()
            with os.scandir(both.top) as entries:
                for entry in entries:
                    entry.stat(follow_symlinks=False)
            return both.mounted.stats().operations["lookup"].n() - before

        look_at_all()
        time.sleep(2)  # what was told has to grow old
        assert look_at_all() < N / 2


N_FEW = 200
N_LATE_XATTRS = 300  # asked for while they were being fetched, or fetched before it was known what is wanted
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


_GETXATTRS = """
import os
for entry in os.scandir("."):
    entry.stat(follow_symlinks=False)
    try:
        os.getxattr(entry.name, "system.posix_acl_access", follow_symlinks=False)
    except OSError:
        pass
"""
COMMANDS = {
    "getxattrs": [sys.executable, "-ISc", _GETXATTRS],  # as ls -l of coreutils 9.1; that of 9.7 calls llistxattr
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
        before = one.count_requests()
        one.forget_all()
        assert run(COMMANDS[command], one.top) == first
        asked = one.count_requests_since(before)
        assert asked == {}
        assert first == run(COMMANDS[command], one.backing)


def test_each_is_asked_for_once() -> None:
    with slow_mount(SLOW, make=make) as one:
        before = one.count_requests()
        run(COMMANDS["getxattrs"], one.top)
        asked = one.count_requests_since(before)
        assert N <= asked["getxattr"] <= N + N_LATE_XATTRS
        assert N <= asked["lookup"] <= N + N_LATE_XATTRS


def test_many_are_asked_for_at_a_time() -> None:
    with slow_mount(SLOW, "in_flight=64", make=make) as one:
        one.volume.delay_all()
        one.volume.delay(5000)
        one.volume.forget_max()
        run(COMMANDS["getfacl"], one.top)
        assert one.volume.max_under_way >= 32


def test_who_asks_for_none_has_none_fetched() -> None:
    with slow_mount(SLOW, make=make) as one:
        before = one.count_requests()
        for _ in range(2):
            run(COMMANDS["ls --color"], one.top)
        assert "getxattr" not in one.count_requests_since(before)
        run(COMMANDS["getxattrs"], one.top)
        for name in ("next", "one after"):  # one listing later, they are not wanted any more
            before = one.count_requests()
            fill(one.volume.backing / name, 100)
            run(COMMANDS["ls --color"], one.top.parent / name)
        assert one.count_requests_since(before).get("getxattr", 0) == 0


def test_what_one_client_has_fetched_getfacl_reads_from_memory() -> None:
    """And what was listed without is fetched at a request: many at a time."""
    with slow_mount(SLOW, make=make) as one:
        run(COMMANDS["find"], one.top)
        before = one.count_requests()
        one.volume.forget_max()
        run(COMMANDS["getxattrs"], one.top)
        asked = one.count_requests_since(before)
        assert N <= asked["getxattr"] <= N + N_LATE_XATTRS
        before = one.count_requests()
        run(COMMANDS["getfacl"], one.top)
        assert one.count_requests_since(before).get("getxattr", 0) < 10  # of the directories: a default ACL each


def test_few_are_waited_for_one_by_one_though_the_attributes_are_remembered() -> None:
    with slow_mount(SLOW, make=make) as one:
        one.volume.delay_all()
        run(COMMANDS["find"], one.top)
        one.count_requests()
        one.forget_all()
        before = one.mounted.stats().remembered["xattr"].n_misses
        run(COMMANDS["getfacl"], one.top)
        assert one.mounted.stats().remembered["xattr"].n_misses - before < N / 10


@pytest.mark.parametrize("xattrs", [Xattrs.NONE, Xattrs.UNKNOWN, Xattrs.DIRECTORIES, Xattrs.FILES])
@pytest.mark.parametrize("command", ["getxattrs", "ls -l", "getfacl", "getfattr", "rsync -X"])
def test_who_has_none_is_asked_once(xattrs: Xattrs, command: str) -> None:
    """Or once of a file, and once of a directory."""
    with slow_mount(SLOW, make=make, n=N_FEW, xattrs=xattrs) as one:
        for _ in range(2):
            before = one.count_requests()
            printed = run(COMMANDS[command], one.top)
            asked = one.count_requests_since(before)
            n_asked = asked.get("getxattr", 0) + asked.get("listxattr", 0)
            if xattrs is Xattrs.FILES:
                assert n_asked <= 2 * N_FEW + 3 * N_LATE_XATTRS  # the list of names, and an ACL
            else:
                assert n_asked <= 16
            one.forget_all()
        assert printed.count(b"\n") >= N_FEW or command in ("getxattrs", "getfattr")


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


XATTR_CHANGES: dict[str, Callable[[Path], object]] = {
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


@pytest.mark.parametrize("change", XATTR_CHANGES)
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
    XATTR_CHANGES[change](one.top / "f0")
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


def lists_long_for_ever(top: Path) -> None:
    while True:
        run(COMMANDS["ls -l"], top)


@pytest.mark.parametrize("options", [[], ["cache_size=8K"]], ids=str)
def test_who_changed_one_sees_it_however_many_look(options: list[str]) -> None:
    """What was fetched before a change, and comes after it, is not believed: by no client."""
    with slow_mount(SLOW, *options, make=make, n=150) as one:
        path = one.top / "f7"
        with workers([lambda: lists_long_for_ever(one.top)] * 2 + [lambda: sets_for_ever(one.top / "f8")]):
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
        before = one.count_requests()
        one.forget_all()
        assert as_user(1000, partial(acl_of, one.top / path.name)) is None
        assert as_user(1001, partial(acl_of, one.top / path.name)) is None
        assert "getxattr" not in one.count_requests_since(before)
        os.setxattr(one.top / path.name, ACCESS, PLAIN)
        assert as_user(1000, partial(acl_of, one.top / path.name)) is None
        assert one.count_requests_since(before)["getxattr"] >= 1, "what was changed is asked for"
        one.volume.serve_xattrs(Xattrs.NONE)
        one.forget_all()
        before = one.count_requests()
        for name in os.listdir(one.top):
            for uid in (1000, 1001):
                with contextlib.suppress(OSError):
                    as_user(uid, partial(acl_of, one.top / name))
        assert one.count_requests_since(before).get("getxattr", 0) <= 8


def test_root_is_told_from_memory_though_others_would_be_told_otherwise() -> None:
    with slow_mount(SLOW, make=make, xattrs=Xattrs.ALL | Xattrs.FOR_ROOT) as one:
        first = run(COMMANDS["ls -l"], one.top)
        before = one.count_requests()
        one.forget_all()
        assert run(COMMANDS["ls -l"], one.top) == first
        assert one.count_requests_since(before) == {}


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
