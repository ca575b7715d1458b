"""Where a volume is served without extended attributes, there are none, and they are not asked for twice."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.acls import ACCESS
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.real_filesystems import tmpfs_volume

pytestmark = pytest.mark.needs("root", "fuse")


@pytest.fixture(params=["local", "slow"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with tmpfs_volume() as volume:
        (volume / "source").mkdir()
        for name in ("file", "other"):
            (volume / "source" / name).touch()
            os.setxattr(volume / "source" / name, "user.x", b"1")
        options = ["coherence=exclusive", "no_xattr", f"backing={request.param}"]
        with trashd_mount(volume / "source", options=options) as mounted:
            yield mounted


CALLS: dict[str, Callable[[Path], object]] = {
    "get": lambda path: os.getxattr(path, "user.x"),
    "get an ACL": lambda path: os.getxattr(path, ACCESS),
    "set": lambda path: os.setxattr(path, "user.x", b"2"),
    "remove": lambda path: os.removexattr(path, "user.x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_without_them_all_calls_say_so(mounted: Mounted, call: str) -> None:
    """Of ACLs the kernel says itself that a file has none."""
    for _ in range(2):
        for name in ("file", "other"):
            with pytest.raises(OSError, match=r".") as caught:
                CALLS[call](mounted.path / name)
            assert caught.value.errno == (errno.ENODATA if call == "get an ACL" else errno.EOPNOTSUPP)
    assert os.getxattr(mounted.backing / "file", "user.x") == b"1"


def test_without_them_the_kernel_asks_once(mounted: Mounted) -> None:
    for name in ("file", "other", "."):
        for _ in range(5):
            with pytest.raises(OSError, match=r"."):
                os.getxattr(mounted.path / name, "user.x")
    assert mounted.n_asked("getxattr", "listxattr") == 1


def test_without_them_files_go_on(mounted: Mounted) -> None:
    (mounted.path / "new").write_bytes(b"content")
    (mounted.path / "new").chmod(0o640)
    assert (mounted.path / "new").stat().st_mode & 0o777 == 0o640
