"""`swap --keep` taken back: the tree is whole again, and what else is in the fresh directory by then is not lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.store.test_keep_entries import TREE, keeping, names
from tests.support.make_trees import make_tree
from tests.support.store_verbs import place, restore

pytestmark = pytest.mark.needs("root")


@pytest.fixture
def job(volume: Path) -> Path:
    return make_tree(volume / "job", TREE)


def test_restore_takes_what_was_written_in_a_kept_directory_with_it(volume: Path, job: Path) -> None:
    swapped = keeping(job, "*.conf", "cache")
    (job / "cache/new").write_text("n")
    (job / "a.conf").write_text("changed in place")
    assert restore(volume, swapped.id).rescued is None
    assert (job / "cache/new").read_text() == "n"
    assert (job / "a.conf").read_text() == "changed in place"


def test_what_was_changed_or_added_meanwhile_is_an_orphan_of_its_own(volume: Path, job: Path) -> None:
    swapped = keeping(job, "*.conf", "cache")
    (job / "new").write_text("added")
    (job / "tmp").write_text("replaced")
    (job / "tmp").rename(job / "a.conf")
    (job / "more").mkdir()
    done = restore(volume, swapped.id)
    assert (names(job), (job / "a.conf").read_text()) == (set(TREE), "1")
    assert done.rescued is not None
    rescued = place(volume, done.rescued) / "tree"
    assert {name: (rescued / name).is_dir() for name in names(rescued)} == {"new": False, "a.conf": False, "more": True}


def test_another_directory_of_a_kept_name_is_an_orphan_and_the_absence_told(volume: Path, job: Path) -> None:
    swapped = keeping(job, "cache")
    (job / "cache").rename(volume / "moved away")
    (job / "cache").mkdir()
    done = restore(volume, swapped.id)
    assert "cache" not in names(job)
    assert "cache" in done.warnings[0]
    assert done.rescued is not None
    assert (volume / "moved away/deep/er").read_text() == "y"


def test_restore_elsewhere_leaves_in_view_what_is_kept(volume: Path, job: Path) -> None:
    swapped = keeping(job, "*.conf", "cache")
    done = restore(volume, swapped.id, to=volume / "elsewhere")
    assert names(job) == {"a.conf", "b.conf", "cache"}
    assert names(volume / "elsewhere") == {"a.conf", "b.conf", "data", "log"}
    assert "cache" in done.warnings[0]


def test_restore_to_a_free_name_tells_what_is_not_in_it(volume: Path, job: Path) -> None:
    swapped = keeping(job, "*.conf", "cache")
    job.rename(volume / "moved")
    done = restore(volume, swapped.id)
    assert names(job) == {"a.conf", "b.conf", "data", "log"}
    assert "cache" in done.warnings[0]
    assert (volume / "moved/cache/deep/er").read_text() == "y"


def test_fresh_directory_that_holds_a_foreign_link_of_a_file_keeps_it(volume: Path, job: Path) -> None:
    swapped = keeping(job, "a.conf")
    os.link(job / "a.conf", job / "another name")
    done = restore(volume, swapped.id)
    assert done.rescued is not None
    assert names(place(volume, done.rescued) / "tree") == {"another name"}
