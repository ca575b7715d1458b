"""Restore: the tree back at its name, elsewhere or in part, and nothing of others replaced by it."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import NotADirectory, NotFound, Occupied, OtherFilesystem, UsageError
from fusefs.linux.kernel import Kernel
from fusefs.store.recover import RESCUED_RETENTION_S
from tests.support.make_trees import Dir, deep_chain, make_tree
from tests.support.real_filesystems import tmpfs_volume
from tests.support.small_orphans import OTHER, orphan_in, victim_in
from tests.support.store_verbs import (
    ActingBefore,
    DyingAt,
    die,
    entries,
    in_child,
    reap_now,
    recover_all,
    remove,
    restore,
    swap,
    tree_of,
)

pytestmark = pytest.mark.needs("root")


def test_restore_gives_the_name_back_to_anything_else_and_hints_at_to(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    job.rmdir()
    make_tree(job, {"strange": "x"})
    with pytest.raises(Occupied) as caught:
        restore(volume, swapped.id)
    assert "--to" in caught.value.hint
    assert os.listdir(job) == ["strange"]
    assert [entry.state for entry in entries(volume)] == [State.ORPHANS]


def test_empty_directory_of_somebody_else_does_not_make_way(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    job.rename(volume / "elsewhere")
    job.mkdir()
    with pytest.raises(Occupied):
        restore(volume, swapped.id)


def test_what_takes_the_name_during_a_restore_keeps_it(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)

    def take_the_name() -> None:
        job.rmdir()
        make_tree(job, {"strange": "x"})

    with pytest.raises(Occupied):
        restore(volume, swapped.id, Kernel(ActingBefore("exchange", take_the_name)))
    assert os.listdir(job) == ["strange"]
    assert sorted(os.listdir(tree_of(swapped))) == ["a", "sub"]


@pytest.mark.parametrize("there", [{}, {"x": "y"}])
def test_restore_to_a_name_that_is_taken_is_refused(volume: Path, there: dict[str, str]) -> None:
    swapped = swap(victim_in(volume))
    make_tree(volume / "other", there)
    with pytest.raises(Occupied):
        restore(volume, swapped.id, to=volume / "other")
    assert sorted(os.listdir(tree_of(swapped))) == ["a", "sub"]


def test_directories_on_the_way_to_a_part_are_made_like_the_trees_own(volume: Path) -> None:
    job = make_tree(volume / "job", {"sub": Dir({"deep": Dir({"f": "x"}, mode=0o711)}, 0o750, (OTHER, OTHER))})
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"sub/deep/f")
    made = [(job / path).stat() for path in ("sub", "sub/deep")]
    assert [(st.st_mode & 0o7777, st.st_uid) for st in made] == [(0o750, OTHER), (0o711, 0)]


def test_part_never_replaces_what_has_its_name(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    (job / "a").write_text("new")
    with pytest.raises(Occupied):
        restore(volume, swapped.id, inside=b"a")
    assert ((job / "a").read_text(), (tree_of(swapped) / "a").read_text()) == ("new", "1")


@pytest.mark.parametrize(
    ("inside", "error"),
    [(b"absent", NotFound), (b"a/x", NotADirectory), (b"../x", UsageError), (b"/a", UsageError), (b"", UsageError)],
)
def test_part_that_is_not_there_or_climbs_is_refused(volume: Path, inside: bytes, error: type[Exception]) -> None:
    swapped = swap(victim_in(volume))
    with pytest.raises(error):
        restore(volume, swapped.id, inside=inside)
    assert [entry.state for entry in entries(volume)] == [State.ORPHANS]


def test_id_may_be_cut_short_as_long_as_it_is_unique(volume: Path) -> None:
    first, second = swap(victim_in(volume)), remove(victim_in(volume, "other"))
    with pytest.raises(UsageError, match="could be"):
        restore(volume, first.id[:4])
    restore(volume, second.id[-12:])
    restore(volume, first.id[:30])
    assert entries(volume) == []


def test_another_filesystem_is_called_that_and_the_orphan_stays(volume: Path) -> None:
    swapped = orphan_in(volume)
    with tmpfs_volume() as other, pytest.raises(OtherFilesystem) as caught:
        restore(volume, swapped.id, to=other / "job")
    assert f"below {volume}" in caught.value.hint
    assert [entry.state for entry in entries(volume)] == [State.ORPHANS]


# What a killed reap leaves


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "renameat2"])
def test_restore_killed_on_its_way_from_a_reap_knows_that_the_tree_is_not_whole(volume: Path, call: str) -> None:
    swapped = orphan_in(volume)
    in_child(lambda: reap_now(volume, swapped.id, Kernel(ActingBefore("rmdir", die))))
    killed = in_child(partial(restore, volume, swapped.id, Kernel(ActingBefore(call, die))))
    assert killed == DyingAt.EXIT_CODE
    recover_all(volume)
    assert restore(volume, swapped.id, to=volume / "elsewhere").partial


def test_nothing_that_was_moved_up_by_a_killed_reap_is_lost_by_a_restore(volume: Path) -> None:
    swapped = swap(deep_chain(volume / "job", 300))  # a reap holds open about 100 of them, and renames the rest up
    in_child(lambda: reap_now(volume, swapped.id, Kernel(ActingBefore("rmdir", die))))
    restored = restore(volume, swapped.id)
    assert restored.partial
    assert any("structure" in warning for warning in restored.warnings)
    (kept,) = entries(volume)
    assert kept.expires_ns == kept.created_ns + RESCUED_RETENTION_S * 10**9
    found = subprocess.run(["find", os.fsdecode(kept.path) + "/tree", "-name", "leaf"], capture_output=True, check=True)
    assert found.stdout.count(b"leaf\n") == 1
