"""What threads of C find of many names: the same as one lookup after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from fusefs.core.metadata_cache import ACCESS_ACL, ASKED_OF_ALL, NAMES
from fusefs.linux.fd import Fd
from fusefs.linux.statx import StatxReader
from fusefs.linux.xattrs import get_of
from fusefs.mount.native._core import Prefetcher
from fusefs.mount.tables.daemon_cache import SeenByName
from tests.support.acls import ACCESS, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.real_filesystems import tmpfs_volume

pytestmark = pytest.mark.needs("root")

N = 1000
ACL = acl((USER_OBJ, 6, NOBODY), (USER, 6, 1000), (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 4, NOBODY))
ALL = (1 << len(ASKED_OF_ALL)) - 1
BATCH: Any = "batch"


@pytest.fixture
def top() -> Iterator[Path]:
    with tmpfs_volume() as volume:
        yield volume


@pytest.fixture
def prefetcher() -> Iterator[Prefetcher]:
    made = Prefetcher(8)
    yield made
    made.end()


def found(
    prefetcher: Prefetcher, top: Path, names: list[bytes], xattrs: tuple[int, int] = (0, 0), *, has_handles: bool = True
) -> dict[bytes, SeenByName | None]:
    assert prefetcher.add(BATCH, os.open(top, os.O_PATH), names, xattrs, has_handles, 1, 8)
    results: dict[bytes, SeenByName | None] = {}
    while len(results) < len(names):
        for batch, name, one in prefetcher.results():
            assert cast(str, batch) == BATCH
            assert name not in results
            results[name] = one
    return results


@pytest.mark.parametrize("has_handles", [True, False])
def test_many_names_are_found_as_they_are(prefetcher: Prefetcher, top: Path, *, has_handles: bool) -> None:
    names = [b"%d" % number for number in range(N)]
    for name in names:
        (top / os.fsdecode(name)).touch()
    with Fd(os.open(top, os.O_PATH)) as fd:
        for _ in range(2):
            for name, one in found(prefetcher, top, [*names, b"none"], has_handles=has_handles).items():
                if name == b"none":
                    assert one is None
                else:
                    seen, handle = StatxReader().peek_name(fd, name)
                    assert one == (seen, handle if has_handles else b"", {})


@pytest.mark.parametrize("is_directory", [False, True])
def test_extended_attributes_of_its_kind_are_found(prefetcher: Prefetcher, top: Path, *, is_directory: bool) -> None:
    (top / "it").mkdir() if is_directory else (top / "it").touch()
    os.setxattr(top / "it", ACCESS, ACL)
    (top / "link").symlink_to("it")
    xattrs = (0, ALL) if is_directory else (ALL, 0)
    results = found(prefetcher, top, [b"it", b"link"], xattrs)
    one, link = results[b"it"], results[b"link"]
    assert one is not None
    assert link is not None
    assert not link[2]
    with Fd(os.open(top / "it", os.O_PATH)) as fd:
        assert one[2] == {name: get_of(fd, name) for name in ASKED_OF_ALL}
    assert one[2][ACCESS_ACL] == ACL
    other = found(prefetcher, top, [b"it"], xattrs[::-1])[b"it"]
    assert other is not None
    assert not other[2]


def test_a_list_of_names_that_is_long_is_left_to_a_request(prefetcher: Prefetcher, top: Path) -> None:
    (top / "it").touch()
    for number in range(40):
        os.setxattr(top / "it", f"user.{'x' * 200}{number}", b"")
    one = found(prefetcher, top, [b"it"], (1 << ASKED_OF_ALL.index(NAMES), 0))[b"it"]
    assert one is not None
    assert one[2] == {}


def test_a_directory_is_closed_when_all_results_are_taken(prefetcher: Prefetcher, top: Path) -> None:
    before = os.listdir("/proc/self/fd")
    found(prefetcher, top, [b"none"])
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_nothing_is_looked_up_after_the_end(prefetcher: Prefetcher, top: Path) -> None:
    prefetcher.end()
    assert not prefetcher.add(BATCH, os.open(top, os.O_PATH), [b"it"], (0, 0), False, 1, 8)
    assert prefetcher.results() == []
