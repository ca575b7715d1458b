"""`swap --keep` where two renames must do: nothing is missing but while the name is, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import NotKept
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from tests.store.test_no_exchange import claim_exchange
from tests.support.crash_scenarios import forbid_exchange
from tests.support.fuse_bad_rename import lying_volume
from tests.support.make_trees import Spec, make_tree, snapshot
from tests.support.sshfs_volumes import sshfs_volume
from tests.support.store_verbs import (
    DyingAt,
    InTheGap,
    assert_silent,
    entries,
    in_child,
    init,
    recover_all,
    restore,
    swap,
    tmpfs_store,
    tree_of,
)

pytestmark = pytest.mark.needs("root")

TREE: Spec = {"a": "1", "sub": {"b": "2"}, "rest": "3"}
KEEP = SwapOptions(keep=("a", "sub"))


@pytest.fixture
def volume() -> Iterator[Path]:
    """A volume that believes that it can't exchange."""
    with tmpfs_store() as path:
        forbid_exchange(path)
        yield path


@pytest.fixture
def job(volume: Path) -> Path:
    return make_tree(volume / "job", TREE)


def test_name_that_was_taken_in_the_gap_is_left_to_him_and_told(volume: Path, job: Path) -> None:
    before = snapshot(job)
    swapped = swap(job, Kernel(InTheGap(job, job.mkdir)), KEEP)
    assert "with what was to be kept" in swapped.warnings[0]
    assert os.listdir(job) == []
    assert snapshot(tree_of(swapped)) == before
    assert (tree_of(swapped) / "a").stat().st_nlink == 1
    assert_silent(volume)


def test_name_that_was_taken_after_a_kill_in_the_gap_gets_nothing(volume: Path, job: Path) -> None:
    before = snapshot(job)
    killed = in_child(partial(swap, job, Kernel(InTheGap(job, partial(os._exit, DyingAt.EXIT_CODE))), KEEP))
    assert killed == DyingAt.EXIT_CODE
    job.mkdir()
    assert recover_all(volume) == []
    [orphan] = (volume / ".trashd/u/0/orphans").glob("*/tree")
    assert snapshot(orphan) == before
    assert (orphan / "a").stat().st_nlink == 1
    assert os.listdir(job) == []


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("mode", ["ignore", "lie", "einval"])
@pytest.mark.parametrize("claims", [False, True])
def test_liars_keep_or_refuse_and_lose_nothing(mode: str, *, claims: bool) -> None:
    with lying_volume(mode) as served:
        init(served.path)
        if claims:
            claim_exchange(served.path)
        job = make_tree(served.path / "job", TREE)
        try:
            swapped = swap(job, options=KEEP)
        except NotKept:
            assert sorted(os.listdir(job)) == ["a", "rest", "sub"]
        else:
            assert sorted(os.listdir(job)) == ["a", "sub"]
            restore(served.path, swapped.id)
            assert sorted(os.listdir(job)) == ["a", "rest", "sub"]
        assert (job / "sub/b").read_text() == "2"
        assert entries(served.path) == []
        assert_silent(served.path)


@pytest.mark.needs("fuse", "sshfs")
def test_sshfs_keeps_directories_and_refuses_files_whose_links_it_does_not_show() -> None:
    with sshfs_volume() as served:
        init(served.path)
        job = make_tree(served.path / "job", TREE)
        with pytest.raises(NotKept):
            swap(job, options=KEEP)
        assert sorted(os.listdir(job)) == ["a", "rest", "sub"]
        swapped = swap(job, options=SwapOptions(keep=("sub",)))
        assert (job / "sub/b").read_text() == "2"
        assert os.listdir(job) == ["sub"]
        restore(served.path, swapped.id)
        assert sorted(os.listdir(job)) == ["a", "rest", "sub"]
        assert entries(served.path) == []
        assert_silent(served.path)
