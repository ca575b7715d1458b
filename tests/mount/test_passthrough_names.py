"""Open files that are passed through while their names change and go: by swaps, the reaper, and other processes."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.open_files import opened
from tests.support.passthrough_files import (
    CONTENT,
    LIMIT_S,
    NEARLY,
    SIZE,
    free_bytes,
    not_asked,
    put,
    space_comes_back,
    works_on,
)
from tests.support.store_verbs import reap_now, recover_all, swap

pytestmark = [pytest.mark.needs("root", "fuse"), pytest.mark.takes_engine]


# Trees that go.


def test_a_file_of_a_swapped_tree_is_passed_through_when_it_is_opened_then(mount: Mounted) -> None:
    (mount.path / "tree").mkdir()
    put(mount.path / "tree/file")
    with opened(mount.path / "tree", os.O_RDONLY | os.O_DIRECTORY) as tree:
        swap(mount.path / "tree")
        fd = os.open("file", os.O_RDWR, dir_fd=tree)
        try:
            with not_asked(mount):
                works_on(fd)
        finally:
            os.close(fd)


def test_who_has_a_reaped_file_open_goes_on_and_its_space_comes_back_with_the_last_close(mount: Mounted) -> None:
    (mount.path / "tree").mkdir()
    with space_comes_back(mount.backing):
        file = put(mount.path / "tree/file")
        with opened(file) as fd:
            with opened(file, os.O_RDONLY) as other:
                swapped = swap(mount.path / "tree")
                reap_now(mount.backing, swapped.id)
                taken = free_bytes(mount.backing)
                with not_asked(mount):
                    works_on(fd)
                    assert os.pread(other, SIZE, 0) == CONTENT
            assert os.pread(fd, SIZE, 0) == CONTENT
            assert free_bytes(mount.backing) <= taken + NEARLY
    assert recover_all(mount.backing) == []


def test_a_mapping_of_a_reaped_file_outlives_its_close(mount: Mounted) -> None:
    (mount.path / "tree").mkdir()
    with space_comes_back(mount.backing):
        with opened(put(mount.path / "tree/file")) as fd:
            mapped = mmap.mmap(fd, SIZE)
        with mapped:
            swapped = swap(mount.path / "tree")
            reap_now(mount.backing, swapped.id)
            assert mapped[:] == CONTENT
            mapped[:6] = b"MAPPED"
            mapped.flush()
            assert mapped[:7] == b"MAPPED "


# Names that change.


@pytest.mark.parametrize("is_open_first", [True, False])
def test_an_unlinked_file_goes_on_until_it_is_closed(mount: Mounted, is_open_first: bool) -> None:
    with space_comes_back(mount.backing):
        file = put(mount.path / "file")
        with ExitStack() as stack:
            fds = [stack.enter_context(opened(file)) for _ in range(1 + is_open_first)]
            file.unlink()
            with pytest.raises(FileNotFoundError):
                file.stat()
            with not_asked(mount):
                works_on(fds[-1])
            assert os.fstat(fds[0]).st_nlink == 0


def test_a_file_open_by_two_names_is_one(mount: Mounted) -> None:
    with space_comes_back(mount.backing):
        file, other = put(mount.path / "file"), mount.path / "other"
        other.hardlink_to(file)
        with opened(file) as one, opened(other) as two, not_asked(mount):
            os.pwrite(one, b"one", 0)
            assert os.pread(two, 3, 0) == b"one"
            file.unlink()
            os.pwrite(two, b"two", SIZE)
            assert os.pread(one, 3, SIZE) == b"two"
            assert os.fstat(one).st_size == os.fstat(two).st_size == other.stat().st_size == SIZE + 3
        assert other.read_bytes()[:3] == b"one"
        other.unlink()


def test_an_open_file_is_the_same_wherever_it_is_renamed_to(mount: Mounted) -> None:
    (mount.path / "d").mkdir()
    with space_comes_back(mount.backing):
        file, moved, replaced = put(mount.path / "file"), mount.path / "d/moved", put(mount.path / "replaced")
        with opened(file) as fd, opened(replaced) as lost, not_asked(mount):
            file.rename(moved)
            with opened(moved) as other:
                os.pwrite(other, b"moved", 0)
                assert os.pread(fd, 5, 0) == b"moved"
            moved.rename(replaced)
            assert os.pread(lost, SIZE, 0) == CONTENT
            with opened(replaced) as other:
                assert os.pread(other, 5, 0) == b"moved"
            os.pwrite(fd, CONTENT[:5], 0)
            works_on(fd)
            works_on(lost)
        replaced.unlink()


# More than one way in.


def test_a_file_open_through_two_mounts_of_the_same_tree_is_one(source: Path, tmp_path: Path) -> None:
    with (
        trashd_mount(source, options=["coherence=shared"], limit_s=LIMIT_S) as one,
        trashd_mount(source, tmp_path, ["coherence=shared"], limit_s=LIMIT_S) as two,
        space_comes_back(source),
    ):
        put(one.path / "file")
        with opened(one.path / "file") as first, opened(two.path / "file") as second, not_asked(one), not_asked(two):
            assert_one_file(first, second)
            (one.path / "file").unlink()
            os.pwrite(second, CONTENT[:6], 0)
            works_on(second)


def assert_one_file(first: int, second: int) -> None:
    with mmap.mmap(first, SIZE) as here, mmap.mmap(second, SIZE) as there:
        here[:5] = b"first"
        assert there[:5] == os.pread(second, 5, 0) == b"first"
        os.pwrite(second, b"SECOND", 0)
        assert here[:6] == os.pread(first, 6, 0) == b"SECOND"
