"""Directories that the kernel opens without us: what it keeps it lists alone, and what it lists is always right."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.metadata_cache import ROOT
from fusefs.linux.fd import Fd
from fusefs.linux.getdents import read_on
from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, renameat2
from fusefs.mount.tree.listings import why_opened
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, fresh_mount, until
from tests.support.open_files import held
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.vfs_without_mount import DirectoryRequests, vfs_at

pytestmark = [
    pytest.mark.needs("root", "fuse", "loop"),
    pytest.mark.takes_engine,
]

N_NAMES = 3000
"""More than the kernel asks for at a time."""


@pytest.fixture(scope="module", params=["tmpfs exclusive", "ext4 exclusive", "tmpfs shared", "ext4 shared"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    fs_type, coherence = request.param.split()
    made = tmpfs_volume() if fs_type == "tmpfs" else loop_volume("ext4", 256)
    with fresh_mount(f"coherence={coherence}", made=made, limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def directory(mount: Mounted, own_name: str) -> Path:
    """A directory with more names than one answer takes, that was not listed yet."""
    (mount.backing / own_name).mkdir()
    for number in range(N_NAMES):
        (mount.backing / own_name / f"{number}").touch()
    return mount.path / own_name


def names() -> set[str]:
    return {str(number) for number in range(N_NAMES)}


def names_left(fd: int) -> list[str]:
    found = []
    while (block := read_on(fd)) is not None:
        found += block.names
    return found


def test_a_second_listing_is_the_kernels_own(mount: Mounted, directory: Path) -> None:
    def asks_nobody() -> bool:
        asked = mount.n_asked("opendir", "readdir", "releasedir")
        assert set(os.listdir(directory)) == names()
        return mount.n_asked("opendir", "readdir", "releasedir") == asked

    with held(directory):
        assert not asks_nobody()
        assert until(asks_nobody)  # at once, unless memory is short just now


def test_no_directory_stays_open(mount: Mounted, directory: Path) -> None:
    with Fd(os.open(directory, os.O_RDONLY)) as fd:
        assert read_on(fd) is not None
        assert mount.n_asked("opendir") <= 1
        began_ns = time.time_ns()
        os.statvfs(directory)  # after each operation there are new numbers
        assert until(lambda: (told := mount.stats()).updated_ns > began_ns and not told.gauges["n_handles"])


def test_a_listing_stays_in_the_directory_that_was_opened(directory: Path) -> None:
    """A swap, while a process lists: it goes on in what it has opened."""
    fresh = directory.with_name(f"{directory.name}-fresh")
    fresh.mkdir()
    with Fd(os.open(directory, os.O_RDONLY)) as fd:
        first = read_on(fd)
        assert first is not None
        renameat2(AT_FDCWD, bytes(fresh), AT_FDCWD, bytes(directory), RENAME_EXCHANGE)
        assert os.listdir(directory) == []
        assert {*first.names, *names_left(fd)} == names()
    assert set(os.listdir(fresh)) == names()


def test_a_filesystem_that_has_become_slow_tells_names_alone() -> None:
    with tmpfs_volume() as volume, vfs_at(volume, is_slow=True) as vfs:
        for name in ("a", "b", ".trashd"):
            (volume / name).touch()
        found, at = set(), 0
        while more := DirectoryRequests(vfs).entries(ROOT, at):
            assert not any(one.entry.nodeid for one in more)
            found |= {one.name for one in more}
            at = more[-1].offset
        assert found == {b".", b"..", b"a", b"b"}


def test_it_is_not_done_where_a_listing_may_not_go_on_elsewhere() -> None:
    with Fd(os.open("/proc", os.O_PATH)) as proc, tmpfs_volume() as volume, Fd(os.open(volume, os.O_PATH)) as root:
        assert why_opened(proc, checks_permissions=True)
        assert why_opened(root, checks_permissions=False)
        assert why_opened(root, checks_permissions=True) is None
