"""Filesystems where no identity lasts: a mark tells our fresh directory, if there are attributes; else nothing can."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import Occupied
from fusefs.linux.kernel import Kernel
from fusefs.store import silent_nodes
from tests.support.crash_scenarios import DyingAfter, forbid_exchange
from tests.support.fuse_watchdog import fuse_mount
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import tmpfs_volume
from tests.support.shared_memory_children import code_of_child
from tests.support.sshfs_volumes import sshfs_volume
from tests.support.store_verbs import (
    assert_silent,
    entries,
    init,
    place,
    reap_now,
    record_of,
    recover_all,
    restore,
    swap,
    tmpfs_store,
)

pytestmark = pytest.mark.needs("root", "fuse")

MARK = "user.trashd.fresh"


@contextmanager
def bindfs_volume() -> Iterator[Path]:
    """A FUSE filesystem with attributes, whose numbers are libfuse's own."""
    with tmpfs_volume() as base:
        backing, mount_point = base / "backing", base / "mount"
        backing.mkdir()
        mount_point.mkdir()
        with fuse_mount(["bindfs", "-f", str(backing), str(mount_point)], mount_point, 60):
            yield mount_point


@pytest.fixture
def volume() -> Iterator[Path]:
    with bindfs_volume() as path:
        init(path)
        make_tree(path / "job", {"results": "old"})
        yield path


@pytest.mark.parametrize("exchange", [True, False])
def test_a_restore_knows_our_fresh_directory_by_its_mark_whatever_was_written_there(
    volume: Path, exchange: bool
) -> None:
    if not exchange:
        forbid_exchange(volume)
    swapped = swap(volume / "job")
    (volume / "job/late").write_text("new")
    done = restore(volume, swapped.id)
    assert (volume / "job/results").read_text() == "old"
    assert done.rescued is not None
    assert (place(volume, done.rescued) / "tree/late").read_text() == "new"
    assert_silent(volume)


def test_a_directory_with_another_mark_is_not_ours(volume: Path) -> None:
    swapped = swap(volume / "job")
    (volume / "job").rmdir()
    (volume / "job").mkdir()
    os.setxattr(volume / "job", MARK, b"0" * 32)
    with pytest.raises(Occupied):
        restore(volume, swapped.id)
    assert [entry.state for entry in entries(volume)] == [State.ORPHANS]


def test_where_a_mark_got_lost_what_was_written_is_an_orphan_of_its_own(volume: Path) -> None:
    swapped = swap(volume / "job")
    os.removexattr(volume / "job", MARK)
    (volume / "job/late").write_text("new")
    assert restore(volume, swapped.id).rescued is not None
    assert (volume / "job/results").read_text() == "old"


def test_a_second_swap_gives_its_own_mark_and_not_the_first_ones(volume: Path) -> None:
    first = swap(volume / "job")
    (volume / "job/late").write_text("new")
    second = swap(volume / "job")
    assert os.getxattr(volume / "job", MARK) != os.getxattr(place(volume, second.id) / "tree", MARK)
    assert second.unlike == ()
    restore(volume, second.id)
    assert (volume / "job/late").read_text() == "new"
    restore(volume, first.id)
    assert (volume / "job/results").read_text() == "old"


def test_the_mark_goes_with_the_orphan_that_it_was_for(volume: Path) -> None:
    swapped = swap(volume / "job")
    assert MARK in os.listxattr(volume / "job")
    reap_now(volume, swapped.id)
    assert MARK not in os.listxattr(volume / "job")


@pytest.mark.parametrize("call", ["setxattr", "create", "exchange", "rename"])
def test_a_killed_swap_is_completed_or_undone_by_the_mark(
    volume: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_nodes, "takeover_s", lambda _volume: 0.0)  # what has no record yet may be another node's
    code_of_child(lambda: swap(volume / "job", Kernel(DyingAfter(call))))
    assert recover_all(volume) == []
    for entry in entries(volume):
        assert entry.state is State.ORPHANS
        restore(volume, entry.id)
    assert (volume / "job/results").read_text() == "old"
    assert_silent(volume)


def test_a_killed_restore_is_completed_or_undone_by_the_mark(volume: Path) -> None:
    swapped = swap(volume / "job")
    (volume / "job/late").write_text("new")
    code_of_child(lambda: restore(volume, swapped.id, Kernel(DyingAfter("exchange"))))
    assert recover_all(volume) == []
    assert (volume / "job/results").read_text() == "old"
    [entry] = entries(volume)
    assert (place(volume, entry.id) / "tree/late").read_text() == "new"
    assert_silent(volume)


def test_where_identities_last_nothing_is_marked() -> None:
    with tmpfs_store() as path:
        make_tree(path / "job", {"results": "old"})
        swapped = swap(path / "job")
        fresh = record_of(swapped).fresh
        assert fresh is not None
        assert not fresh.handle.startswith("mark:")
        assert os.listxattr(path / "job") == []


@pytest.mark.needs("sshfs")
def test_without_attributes_what_was_written_is_an_orphan_of_its_own() -> None:
    with sshfs_volume() as served:
        init(served.path)
        make_tree(served.path / "job", {"results": "old"})
        swapped = swap(served.path / "job")
        (served.path / "job/late").write_text("new")
        rescued = restore(served.path, swapped.id).rescued
        assert (served.path / "job/results").read_text() == "old"
        assert [entry.id for entry in entries(served.path)] == [rescued]
