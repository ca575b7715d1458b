"""The daemon needs little: few fds however much is listed and walked, and nothing kept of what is forgotten."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.make_trees import fill
from tests.support.proc_stat import status_of
from tests.support.real_filesystems import tmpfs_volume
from tests.support.trashd_command import EXECUTED

pytestmark = pytest.mark.needs("root", "fuse")

N_FDS = 256
N_ENTRIES = 30_000
N_SIDE = 50
N_DIRECTORIES = N_SIDE**2
N_BYTES_AN_ENTRY = 1500
SLACK_KIB, N_ROUNDS = 6144, 6


@pytest.fixture(scope="module")
def backing() -> Iterator[Path]:
    """Many files in one directory, and many directories in a tree."""
    with tmpfs_volume("512m", ["nr_inodes=200000"]) as volume:
        top = volume / "source"
        top.mkdir()
        fill(top / "flat", N_ENTRIES)
        for i in range(N_SIDE):
            for j in range(N_SIDE):
                fill(top / "tree" / str(i) / str(j), 1)
        yield top


@pytest.fixture
def mounted(backing: Path) -> Iterator[Mounted]:
    with trashd_mount(backing, n_fds_max=N_FDS, command=EXECUTED) as mounted:
        yield mounted


def test_few_fds_list_many_entries_and_little_is_left_when_they_are_forgotten(mounted: Mounted) -> None:
    """The second time costs no memory: what the kernel forgot, the daemon has not kept.

    Python's memory comes in pieces, of which now more, now fewer are given back, and other tests have the machine drop
    its caches in the middle of a round: what is kept is kept each time, and no round ends as an earlier one did.
    """
    before = int(status_of(mounted.pid)["RssAnon"][0])
    rounds = [_memory_full_and_after(mounted)]
    n_bytes = (rounds[0][0] - before) * 1024 / N_ENTRIES
    print(f"{n_bytes:.0f} bytes of memory for an entry that the kernel knows")
    assert n_bytes < N_BYTES_AN_ENTRY
    while True:
        full, after = _memory_full_and_after(mounted)
        if any(full < most + SLACK_KIB and after < least + SLACK_KIB for most, least in rounds):
            break
        rounds.append((full, after))
        assert len(rounds) < N_ROUNDS, rounds


def _memory_full_and_after(mounted: Mounted) -> tuple[int, int]:
    """The daemon's memory when the kernel knows all entries, and when it has forgotten them; KiB."""
    names = set()
    with os.scandir(mounted.path / "flat") as entries:
        for entry in entries:
            names.add(entry.name)
            assert entry.stat(follow_symlinks=False).st_size == 0
    assert len(names) == N_ENTRIES
    assert mounted.n_fds() < N_FDS
    full = int(status_of(mounted.pid)["RssAnon"][0])
    assert mounted.settles()
    assert until(lambda: mounted.n_nodes() == 1)
    return full, int(status_of(mounted.pid)["RssAnon"][0])


def test_few_fds_walk_many_directories(mounted: Mounted) -> None:
    n_directories = n_files = most = 0
    for number, (_, directories, files) in enumerate(os.walk(mounted.path / "tree")):
        n_directories += len(directories)
        n_files += len(files)
        if number % 100 == 0:
            most = max(most, mounted.n_fds())
    assert (n_directories, n_files) == (N_DIRECTORIES + N_SIDE, N_DIRECTORIES)
    assert most < N_FDS


def test_file_too_many_is_refused_and_the_mount_goes_on(mounted: Mounted) -> None:
    """The daemon's own limit is the client's EMFILE; closed files give their places back."""
    with contextlib.ExitStack() as stack:
        number = 0
        for i in range(N_FDS + 100):
            try:
                fd = os.open(mounted.path / "flat" / f"f{i}", os.O_RDONLY)
            except OSError as error:
                number = error.errno or 0
                break
            stack.callback(os.close, fd)
        assert number == errno.EMFILE
        assert (mounted.path / "tree/7/7/f0").stat().st_size == 0  # needs no fd to stay
    assert until(lambda: mounted.n_fds() < N_FDS // 2)
    assert (mounted.path / "tree/8/8/f0").read_bytes() == b""
    assert len(os.listdir(mounted.path / "tree")) == N_SIDE


def test_known_directories_are_found_again_though_most_had_to_be_closed(mounted: Mounted) -> None:
    kept = {}
    for i in range(N_SIDE):
        for j in range(0, N_SIDE, 5):
            kept[i, j] = os.open(mounted.path / "tree" / str(i) / str(j), os.O_PATH)
    try:
        for fd in kept.values():
            assert os.stat("f0", dir_fd=fd).st_size == 0
            with pytest.raises(FileNotFoundError):
                os.stat("absent", dir_fd=fd)
    finally:
        for fd in kept.values():
            os.close(fd)
