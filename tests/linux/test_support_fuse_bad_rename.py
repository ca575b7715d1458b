"""The filesystem that lies does so exactly as its mode says, and is an honest one otherwise."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tests.support.fuse_bad_rename import RENAME_EXCHANGE, RENAME_NOREPLACE, lying_volume, renameat2
from tests.support.fuse_watchdog import FuseVolume
from tests.support.make_trees import make_tree, snapshot
from tests.support.open_files import held
from tests.support.other_users import as_user

pytestmark = [pytest.mark.needs("root", "fuse")]

BOTH = {"a": {"old": "1"}, "b": {}}
SWAPPED = {"a": [], "b": ["old"]}
UNTOUCHED = {"a": ["old"], "b": []}


def _look(path: Path) -> dict[str, list[str]]:
    return {child.name: sorted(os.listdir(child)) for child in path.iterdir()}


def _try(served: FuseVolume, flags: int, new: str = "b") -> str:
    try:
        renameat2(served.path / "t/a", served.path / "t" / new, flags)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "OK"


@pytest.mark.parametrize(
    ("mode", "answer", "left"),
    [
        ("honest", "OK", SWAPPED),
        ("ignore", "OK", {"b": ["old"]}),
        ("lie", "OK", UNTOUCHED),
        ("einval", "EINVAL", UNTOUCHED),
        ("enosys", "EINVAL", UNTOUCHED),
        ("eopnotsupp", "ENOTSUP", UNTOUCHED),
    ],
)
def test_exchange_does_what_the_mode_says(mode: str, answer: str, left: dict[str, list[str]]) -> None:
    with lying_volume(mode) as served:
        make_tree(served.path / "t", BOTH)
        assert _try(served, RENAME_EXCHANGE) == answer
        assert _look(served.backing / "t") == left
        assert _look(served.path / "t") == left


@pytest.mark.parametrize(
    ("mode", "taken", "free"),
    [("ignore", "EEXIST", "OK"), ("lie", "EEXIST", "OK"), ("einval", "EEXIST", "EINVAL")],
)
def test_noreplace_does_what_the_mode_says(mode: str, taken: str, free: str) -> None:
    with lying_volume(mode) as served:
        make_tree(served.path / "t", BOTH)
        assert _try(served, RENAME_NOREPLACE) == taken  # the kernel's own word
        assert _try(served, RENAME_NOREPLACE, "c") == free


def test_ignored_flag_meets_enotempty_on_a_full_directory() -> None:
    with lying_volume("ignore") as served:
        make_tree(served.path / "t", {"a": {"old": "1"}, "b": {"new": "2"}})
        assert _try(served, RENAME_EXCHANGE) == "ENOTEMPTY"


def test_kernel_with_a_cache_believes_the_lie_and_a_listing_does_not() -> None:
    with lying_volume("lie", timeout_s=60) as served:
        path = make_tree(served.path / "t", BOTH)
        with held(path / "a", path / "b"):
            a, b = ((path / name).stat().st_ino for name in "ab")
            assert _try(served, RENAME_EXCHANGE) == "OK"
            assert [(path / name).stat().st_ino for name in "ab"] == [b, a]
        with os.scandir(path) as entries:
            listed = {entry.name: entry.inode() for entry in entries}
        assert listed == {"a": a, "b": b}


def test_fault_comes_once_at_its_call() -> None:
    with lying_volume("honest", ["rename:EIO:2", "mkdir:ENOSPC:1"]) as served:
        with pytest.raises(OSError, match="No space left"):
            (served.path / "t").mkdir()
        make_tree(served.path / "t", BOTH)
        answers = [_try(served, RENAME_EXCHANGE) for _ in range(3)]
        assert answers == ["OK", "EIO", "OK"]


def test_user_works_there_as_on_any_filesystem() -> None:
    def work() -> None:
        os.umask(0o027)
        home = Path(home_path)
        (home / "d").mkdir()
        fd = os.open(home / "f", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, b"text")
        os.fsync(fd)
        (home / "f").rename(home / "d/g")
        (home / "d/link").symlink_to("g")
        os.link(home / "d/g", home / "h")
        os.utime(home / "h", ns=(1, 2))
        os.truncate(home / "h", 2)
        (home / "d/g").unlink()
        assert os.fstat(fd).st_nlink == 1
        (home / "h").chmod(0o600)
        (home / "h").unlink()
        assert os.pread(fd, 9, 0) == b"te"
        assert os.fstat(fd).st_nlink == 0
        os.close(fd)
        directory = os.open(home, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        with pytest.raises(PermissionError):
            (home.parent / "foreign").mkdir()

    with lying_volume("einval") as served:
        home_path = served.path / "home"
        home_path.mkdir()
        os.chown(home_path, 12001, 12001)
        as_user(12001, work)
        (made,) = snapshot(home_path)[1:2]
        assert (made.name, made.mode & 0o7777, made.uid, made.gid) == (b"d", 0o750, 12001, 12001)
        assert [entry.name for entry in snapshot(served.backing)][1:] == [b"home", b"d", b"link"]
