"""Listings over a slow filesystem: names wait for names alone, and many attributes are fetched at a time.

What is asked of the slow filesystem is counted by itself; no law here is about how long anything takes.
"""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.support.background_processes import workers
from tests.support.foreground_mount import SHARED_LIMIT_S
from tests.support.fuse_slow import Xattrs
from tests.support.many_files import fill
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
        before = one.n_looks()
        assert len(ls(*words, one.top)) >= N
        assert one.n_looks() - before < N_SPARE


@pytest.mark.parametrize("xattrs", [Xattrs.ALL, Xattrs.NONE], ids=["xattrs", "no xattrs"])
@pytest.mark.parametrize("words", [["-l"], ["-lU"], ["-l", "--color=always"], ["-s"]], ids=" ".join)
def test_attributes_are_asked_for_once_for_each_entry(words: list[str], *, xattrs: Xattrs) -> None:
    with slow_mount(SLOW, xattrs=xattrs) as one:
        before = one.n_looks()
        assert len(ls(*words, one.top)) == N + 1
        first = one.n_looks()
        assert N <= first - before < N * 1.1 + N_LATE + N_SPARE
        assert len(ls(*words, one.top)) == N + 1
        assert one.n_looks() - first < N_SPARE
        one.forget_all()
        assert len(ls(*words, one.top)) == N + 1
        assert one.n_looks() - first < 2 * N_SPARE, "the kernel forgot, and so did the daemon"


def test_who_wants_names_and_then_attributes_has_them_once() -> None:
    """A plain listing first, as a shell does for a pattern; then each name."""
    with slow_mount(SLOW) as one:
        before = one.n_looks()
        names = os.listdir(one.top)
        for name in sorted(names):
            assert os.lstat(one.top / name).st_size == 0
        assert one.n_looks() - before < N * 1.2 + N_LATE + N_SPARE


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
        one.n_looks()
        most = one.volume.max_under_way
        assert most <= n_in_flight + 4  # and the listing itself, and the client's own
        assert most >= n_in_flight / 2


def test_the_head_of_a_listing_costs_little() -> None:
    """`ls -U | head`: names; and a few attributes, for which no more are fetched than the next few."""
    with slow_mount(SLOW, n=N_MANY) as one:
        before = one.n_looks()
        with subprocess.Popen(["ls", "-U", one.top], stdout=subprocess.PIPE) as head:
            assert head.stdout is not None
            assert head.stdout.readline()
            head.stdout.close()
        assert one.n_looks() - before < N_SPARE
        with os.scandir(one.top) as entries:
            for _, entry in zip(range(3), entries, strict=False):
                entry.stat(follow_symlinks=False)
        assert one.n_looks() - before < N_MANY / 4


def test_two_who_list_at_a_time_are_both_told_all() -> None:
    with slow_mount(SLOW, delay_us=500) as one, ThreadPoolExecutor(3) as pool:
        before = one.n_looks()
        lists = [pool.submit(ls, "-l", one.top) for _ in range(3)]
        assert {len(found.result(LIMIT_S)) for found in lists} == {N + 1}
        assert lists[0].result() == lists[1].result() == lists[2].result()
        assert one.n_looks() - before < 3 * N + N_SPARE


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
        before = one.n_looks()
        for _ in range(2):
            found = ls("-l", one.top)
            assert len(found) == N + 1
            one.forget_all()
        assert one.n_looks() - before < 2 * (2 * N + N_LATE + N_SPARE)


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
