"""Whatever one user has open through a mount, others open theirs: the daemon's fds are shared between them."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.real_filesystems import volume_of
from tests.support.trashd_command import trashd

pytestmark = pytest.mark.needs("root", "fuse")

N_FDS, N_FOR_CLIENTS = 512, 368
FIRST, ROOTS = 16, 11
HOG, NEWCOMERS = 1000, (1001, 1002)
N_FILES, N_DIRECTORIES = 20, 600
Open = Callable[[Path, int], int]


@pytest.fixture(scope="module", params=[("tmpfs", "local"), ("tmpfs", "slow"), ("overlay", "local")])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    fs_type, backing = request.param  # of an overlayfs the kernel opens directories by requests
    with volume_of(fs_type) as volume:
        source = volume / "source"
        source.mkdir()
        source.chmod(0o1777)
        for number in range(N_FILES):
            (source / f"f{number}").touch()
        for number in range(N_DIRECTORIES):
            (source / f"d{number}").mkdir()
        options = ["coherence=exclusive", f"backing={backing}"]
        with trashd_mount(source, options=options, n_fds_max=N_FDS, limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def holding(mount: Mounted) -> Iterator[list[int]]:
    """Fds, closed by root in the end; and everything that the daemon had for them."""
    fds: list[int] = []
    n_before = mount.n_fds()
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
        for path in mount.backing.glob("made-*"):
            path.unlink()
        assert until(lambda: mount.n_fds() <= max(n_before, N_FDS - N_FOR_CLIENTS))
        assert until(lambda: mount.stats().gauges["n_handles"] == 0)  # what is not closed yet counts for its user


def one_of_many(path: Path, number: int) -> int:
    return os.open(path / f"f{number % N_FILES}", os.O_RDONLY)


def new(path: Path, number: int) -> int:
    return os.open(path / f"made-{os.geteuid()}-{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def unnamed(path: Path, _number: int) -> int:
    return os.open(path, os.O_RDWR | os.O_TMPFILE, 0o600)


def directory(path: Path, number: int) -> int:
    return os.open(path / f"d{number % N_FILES}", os.O_RDONLY | os.O_DIRECTORY)


def take(mount: Mounted, uid: int, open_: Open, fds: list[int], n: int = 2 * N_FDS) -> int:
    """How many of n a user gets."""
    with acting_as(uid):
        for number in range(n):
            try:
                fds.append(open_(mount.path, number))
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                return number
    return n


def assert_others_get_theirs(mount: Mounted, fds: list[int]) -> None:
    for uid in NEWCOMERS:
        assert take(mount, uid, one_of_many, fds, FIRST // 2) == FIRST // 2
        assert take(mount, uid, new, fds, FIRST // 2) == FIRST // 2
    assert take(mount, 0, new, fds, ROOTS) == ROOTS


@pytest.mark.parametrize(
    "open_",
    [one_of_many, new, pytest.param(unnamed, marks=pytest.mark.takes_engine)],
    ids=["opens", "creates", "makes unnamed"],
)
def test_who_takes_all_that_he_gets_leaves_some_to_others(mount: Mounted, open_: Open) -> None:
    with holding(mount) as fds:
        assert 0.7 * N_FOR_CLIENTS < take(mount, HOG, open_, fds) < 0.9 * N_FOR_CLIENTS
        assert_others_get_theirs(mount, fds)


def test_nor_does_root_take_the_last(mount: Mounted) -> None:
    with holding(mount) as fds:
        take(mount, 0, one_of_many, fds)
        assert take(mount, NEWCOMERS[0], new, fds, FIRST) == FIRST


def test_open_directories_are_shared_as_files_are(mount: Mounted) -> None:
    """Where they are the daemon's to open; else they take none."""
    with holding(mount) as fds:
        take(mount, HOG, directory, fds)
        assert_others_get_theirs(mount, fds)


def test_what_is_closed_by_another_user_is_given_back_to_who_opened_it(mount: Mounted) -> None:
    found = []
    for _ in range(2):
        with holding(mount) as fds:
            found.append(take(mount, HOG, one_of_many, fds))
        assert until(lambda: mount.stats().gauges["n_handles"] == 0)
    assert found[0] == found[1]


def test_directories_that_are_known_take_nothing_from_anybody(mount: Mounted) -> None:
    for number in range(N_DIRECTORIES):
        os.stat(mount.path / f"d{number}")
        with suppress(FileNotFoundError):
            os.stat(mount.path / f"d{number}" / "none")
    with holding(mount) as fds:
        assert take(mount, HOG, one_of_many, fds) > 0.7 * N_FOR_CLIENTS
        assert_others_get_theirs(mount, fds)


def test_what_one_user_may_have_is_printed_by_explain_and_by_doctor_if_the_limit_is_low(mount: Mounted) -> None:
    explained = trashd("mount", "--explain", mount.path).out
    (doctored,) = [told for told in trashd("doctor", "--json").objects() if told["where"] == str(mount.path)]
    assert "files open" not in mount.log.read_text()
    with holding(mount) as fds:
        most = take(mount, HOG, one_of_many, fds)
    for text in (explained, doctored["what"]):
        assert any(
            f"limit on open files is {N_FDS} for the whole mount ({n} per user)" in text for n in (most, most - 1)
        )
    assert "LimitNOFILE=" in doctored["hint"]
