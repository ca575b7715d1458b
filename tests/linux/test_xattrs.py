"""Extended attributes by a name in a directory: a value, the list of all names, or why there is none."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.core.common_xattrs import NAMES
from fusefs.linux import xattrs
from fusefs.linux.fd import Fd
from tests.support.real_filesystems import tmpfs_volume

pytestmark = pytest.mark.needs("root")

NAME = b"user.name"


@pytest.fixture(params=[True, False], ids=["getxattrat", "by path"], autouse=True)
def has_call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On older kernels the same is had by a path in /proc."""
    has: Callable[[], bool] = (lambda: False) if not request.param else xattrs.has_getxattrat
    monkeypatch.setattr(xattrs, "has_getxattrat", has)


@pytest.fixture
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        (path / "file").touch()
        (path / "link").symlink_to("file")
        yield path


def found(volume: Path, name: bytes, xattr: bytes = NAME) -> bytes | int:
    with Fd(os.open(volume, os.O_PATH)) as fd:
        return xattrs.get_at(fd, name, xattr)


@pytest.mark.parametrize("size", [0, 1, 256, 257, 20_000])
def test_a_value_of_any_size_is_told(volume: Path, size: int) -> None:
    os.setxattr(volume / "file", "trusted.name", b"x" * size)
    assert found(volume, b"file", b"trusted.name") == b"x" * size


def test_a_binary_value_is_told(volume: Path) -> None:
    os.setxattr(volume / "file", "trusted.name", bytes(range(256)))
    assert found(volume, b"file", b"trusted.name") == bytes(range(256))


@pytest.mark.parametrize("n", [0, 1, 100])
def test_all_names_are_told(volume: Path, n: int) -> None:
    """More than a buffer holds, too."""
    names = [f"trusted.{number}" for number in range(n)]
    for name in names:
        os.setxattr(volume / "file", name, b"")
    listed = found(volume, b"file", NAMES)
    assert isinstance(listed, bytes)
    assert sorted(listed.split(b"\0")[:-1]) == sorted(map(os.fsencode, names))


def test_names_of_a_link_are_its_own(volume: Path) -> None:
    os.setxattr(volume / "file", "trusted.of-the-file", b"")
    assert found(volume, b"link", NAMES) == b""


@pytest.mark.parametrize(
    ("name", "xattr", "number"),
    [
        (b"none", NAMES, errno.ENOENT),
        (b"file", b"trusted.none", errno.ENODATA),
        (b"file", b"unknown.none", errno.EOPNOTSUPP),
        (b"none", NAME, errno.ENOENT),
    ],
)
def test_what_is_not_there_has_its_errno(volume: Path, name: bytes, xattr: bytes, number: int) -> None:
    assert found(volume, name, xattr) == number


def test_a_link_is_not_followed(volume: Path) -> None:
    os.setxattr(volume / "file", "trusted.name", b"of the file")
    assert found(volume, b"link", b"trusted.name") == errno.ENODATA
