"""btrfs snapshots: what a store held when one was made is restored from it as from the store, and a rollback changes
nothing of it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.linux.kernel import Kernel
from tests.support.crash_scenarios import DyingAfter
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, mount_of, unmount
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import (
    assert_silent,
    entries,
    init,
    place,
    problems,
    recover_all,
    restore,
    swap,
)
from tests.support.two_users_store import ALICE, orphan_of

pytestmark = pytest.mark.needs("root", "loop")

_UNPROVEN = "it is not the folder that root registered (a copy, or another one took its place)"


@pytest.fixture
def top() -> Iterator[Path]:
    """A btrfs with a subvolume `data` that has a store of root's and a directory of Alice's."""
    with loop_volume("btrfs") as path:
        data = btrfs_subvolume(path, "data")
        init(data)
        make_tree(data / "alice", Dir(owner=(ALICE, ALICE)))
        yield path


def snap(top: Path, *options: str) -> Path:
    subprocess.run(["btrfs", "-q", "subvolume", "snapshot", *options, top / "data", top / "snap"], check=True)
    return top / "snap"


def assert_nothing_but_unproven(volume: Path) -> None:
    """The checker says that no folder is the one that root registered, and nothing else: a snapshot is a copy."""
    assert {problem.what.partition(": ")[2] for problem in problems(volume)} <= {_UNPROVEN}


@contextmanager
def rolled_back(top: Path) -> Iterator[Path]:
    """A snapshot of `data` mounted where a machine has that, as after a rollback."""
    snap(top)
    entry = mount_of(top)
    assert entry is not None
    place = top.parent / "rolled-back"
    place.mkdir()
    subprocess.run(["mount", "-o", "subvol=snap", os.fsdecode(entry.source), place], check=True)
    try:
        yield place
    finally:
        unmount(place)
        place.rmdir()


@pytest.mark.parametrize("mode", [0o755, 0o555])
def test_an_orphan_goes_back_in_a_snapshot_as_in_its_source(top: Path, mode: int) -> None:
    identifier = orphan_of(top / "data", ALICE, mode)
    copy = snap(top)
    for volume in (copy, top / "data"):
        as_user(ALICE, partial(restore, volume, identifier))
        assert (volume / "alice/job/results").read_text() == "his own"
        assert (volume / "alice/job").stat().st_mode & 0o7777 == mode
        assert entries(volume) == []
        assert_nothing_but_unproven(volume)


def test_what_was_written_into_the_fresh_directory_is_kept_after_a_rollback(top: Path) -> None:
    identifier = orphan_of(top / "data", ALICE)
    (top / "data/alice/job/late").write_text("later")
    os.chown(top / "data/alice/job/late", ALICE, ALICE)
    with rolled_back(top) as volume:
        done = as_user(ALICE, lambda: restore(volume, identifier))
        assert done.rescued is not None
        assert (place(volume, done.rescued) / "tree/late").read_text() == "later"
        assert_nothing_but_unproven(volume)


def test_root_restores_elsewhere_what_a_snapshot_proves(top: Path) -> None:
    identifier = orphan_of(top / "data", ALICE)
    copy = snap(top)
    make_tree(copy / "srv", {})
    restore(copy, identifier, to=copy / "srv/data")
    assert (copy / "srv/data/results").read_text() == "his own"
    assert_nothing_but_unproven(copy)


@pytest.mark.parametrize("call", ["tmpfile", "exchange", "rename"])
def test_a_swap_that_was_killed_before_the_snapshot_is_completed_or_undone_in_it(top: Path, call: str) -> None:
    job = top / "data/alice/job"

    def act() -> None:
        make_tree(job, {"results": "his own"})
        code_of_child(lambda: swap(job, Kernel(DyingAfter(call))))

    as_user(ALICE, act)
    copy = snap(top)
    for volume in (copy, top / "data"):
        assert as_user(ALICE, partial(recover_all, volume)) == []
        for entry in as_user(ALICE, partial(entries, volume)):
            assert entry.state is State.ORPHANS
            as_user(ALICE, partial(restore, volume, entry.id))
        assert (volume / "alice/job/results").read_text() == "his own"
        assert_nothing_but_unproven(volume)


def test_a_read_only_snapshot_is_listed(top: Path) -> None:
    identifier = orphan_of(top / "data", ALICE)
    copy = snap(top, "-r")
    assert [entry.id for entry in entries(copy)] == [identifier]


def test_a_read_only_snapshot_is_looked_after_as_far_as_that_goes(top: Path) -> None:
    """Root registers nothing in it, and that is no error."""
    orphan_of(top / "data", ALICE)
    assert all(_UNPROVEN in line for line in recover_all(snap(top, "-r")))


def test_after_a_rollback_root_says_that_it_is_his_store_and_the_checker_is_silent(top: Path) -> None:
    orphan_of(top / "data", ALICE)
    with rolled_back(top) as volume:
        assert problems(volume) != []
        init(volume)
        as_user(ALICE, partial(recover_all, volume))
        recover_all(volume)
        assert_silent(volume)
