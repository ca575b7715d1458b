"""Where one file has many names: a missing name must not be remembered there, nor where that is unknown."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux import filesystem_probes, syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.filesystem_probes import find_case_folding, has_ext4_casefold
from tests.support.fuse_bad_rename import lying_volume
from tests.support.fuse_casefold import folding_volume
from tests.support.open_fds import open_fds
from tests.support.other_users import as_user
from tests.support.real_filesystems import loop_volume, tmpfs_volume

pytestmark = pytest.mark.needs("root")

OTHER = 4321
EXT4, TMPFS, XFS = 0xEF53, 0x01021994, 0x58465342
CASEFOLD_FL = 0x40000000
ASCII_CI = 1 << 12


@pytest.fixture
def top() -> Iterator[Path]:
    with tmpfs_volume() as path:
        (path / "names").touch()
        yield path


def asked(path: Path) -> bool | None:
    with Fd(os.open(path, os.O_PATH)) as fd:
        return find_case_folding(fd).folds


def other_kernel(patch: pytest.MonkeyPatch, kind: int, answer: int | OSError) -> None:
    """A filesystem that this kernel has not got: what it calls itself, and answers to the question for its flags."""

    def ioctl(_fd: int, _request: int, buffer: bytearray) -> None:
        if isinstance(answer, OSError):
            raise answer
        at = 92 if len(buffer) > 8 else 0
        buffer[at : at + 4] = answer.to_bytes(4, "little")

    patch.setattr(syscalls, "statfs_type", lambda _fd: kind)
    patch.setattr(syscalls, "ioctl", ioctl)


@pytest.mark.parametrize(
    "volume",
    [tmpfs_volume, pytest.param(partial(loop_volume, "ext4"), marks=pytest.mark.needs("loop"))],
)
def test_a_filesystem_without_the_flag_or_feature_does_not_fold(volume: type[AbstractContextManager[Path]]) -> None:
    with volume() as path:
        assert asked(path) is False


@pytest.mark.parametrize(
    "fs_type",
    [pytest.param("xfs", marks=pytest.mark.needs("loop", "xfs")),
     pytest.param("btrfs", marks=pytest.mark.needs("loop", "btrfs"))],
)  # fmt: skip
def test_a_filesystem_that_never_folds_is_known(fs_type: str) -> None:
    with loop_volume(fs_type) as path:
        assert asked(path) is False


def test_a_directory_with_the_flag_folds(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_kernel(monkeypatch, EXT4, CASEFOLD_FL | 0x80000)
    assert asked(top) is True


@pytest.mark.parametrize("options", [["-O", "casefold"], []], ids=["casefold", "plain"])
def test_the_superblock_of_ext4_tells(tmp_path: Path, options: list[str]) -> None:
    with (image := tmp_path / "image").open("wb") as file:
        file.truncate(4 << 20)
    subprocess.run(["mkfs.ext4", "-q", *options, image], check=True)
    assert has_ext4_casefold(str(image)) is bool(options)


def test_an_xfs_with_the_flag_folds(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_kernel(monkeypatch, XFS, ASCII_CI | 0x8000)
    assert asked(top) is True


@pytest.mark.parametrize("kind", [0x4D44, 0x2011BAB0, 0x7366746E, 0x482B, 0xFF534D42, 0xFE534D42])
def test_filesystems_from_elsewhere_fold(top: Path, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    other_kernel(monkeypatch, kind, 0)
    assert asked(top) is True


def test_a_kernel_without_the_flag_does_not_fold(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_kernel(monkeypatch, TMPFS, OSError(errno.ENOTTY, "no flags"))
    assert asked(top) is False


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EIO])
def test_a_refused_question_tells_nothing(top: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    other_kernel(monkeypatch, EXT4, OSError(number, "refused"))
    assert asked(top) is None


def test_a_filesystem_without_statfs_tells_nothing(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def statfs_type(_fd: int) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(syscalls, "statfs_type", statfs_type)
    assert asked(top) is None


def test_a_directory_that_may_only_be_searched_tells_nothing(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_probes, "_TMPFS_FEATURE", os.fspath(top))
    (top / "passage").mkdir(0o711)
    (top / "passage").chmod(0o711)
    assert as_user(OTHER, partial(asked, top / "passage")) is None


def test_a_name_that_is_found_in_upper_case_too_tells() -> None:
    with folding_volume(["1234", "Readme"]) as path:
        assert asked(path) is True


def test_a_name_that_is_found_as_it_stands_alone_tells() -> None:
    with lying_volume("honest") as served:
        (served.backing / "1234").touch()
        (served.backing / "Readme").touch()
        assert asked(served.path) is False


def test_two_files_that_differ_in_case_alone_tell() -> None:
    with lying_volume("honest") as served:
        (served.backing / "README").touch()
        (served.backing / "readme").touch()
        assert asked(served.path) is False


@pytest.mark.parametrize("names", [[], ["1234", "\u00e4"]])
def test_without_a_name_that_has_letters_nobody_can_tell(names: list[str]) -> None:
    with folding_volume(names) as path:
        assert asked(path) is None


def test_asking_leaves_no_fd_open(top: Path) -> None:
    before = open_fds()
    asked(top)
    asked(Path("/proc/self/fd"))
    assert open_fds() == before


def test_the_kinds_are_of_one_sort_each() -> None:
    sorts = (filesystem_probes._EXACT, filesystem_probes._FOLDING, filesystem_probes._FLAGGED, {XFS})
    assert len(frozenset().union(*sorts)) == sum(map(len, sorts))
