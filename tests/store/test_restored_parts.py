"""A part restored first and the whole later: the tree is whole again, with that part as it is now."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.names import ContainerId, RelPath
from fusefs.core.record_decoding import decode
from fusefs.linux.kernel import Kernel
from tests.support.crash_scenarios import forbid_exchange
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.small_orphans import victim_in
from tests.support.store_verbs import calls_of, entries, folder_of, remove, restore, swap, tree_of

pytestmark = pytest.mark.needs("root")
ALICE = 1000


def parts_of(volume: Path, orphan: ContainerId) -> tuple[RelPath, ...]:
    return decode((folder_of(volume, 0) / "orphans" / orphan / "record.json").read_bytes()).parts


@pytest.mark.quick("restore")
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("inside", ["a", "sub/b", "sub"])
def test_the_whole_has_a_part_that_was_restored_before(volume: Path, inside: str, *, exchange: bool) -> None:
    if not exchange:
        forbid_exchange(volume)
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=inside.encode())
    assert parts_of(volume, swapped.id) == (inside.encode(),)
    done = restore(volume, swapped.id)
    assert (done.rescued, done.warnings) == (None, ())
    assert ((job / "a").read_text(), (job / "sub/b").read_text()) == ("1", "2")
    assert sorted(os.listdir(job)) == ["a", "sub"]
    assert entries(volume) == []


def test_the_part_is_as_it_is_now_and_all_else_becomes_an_orphan(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"sub/b")
    (job / "sub/b.new").write_text("newer")
    (job / "sub/b.new").rename(job / "sub/b")
    (job / "sub/other").write_text("not of it")
    done = restore(volume, swapped.id)
    assert (job / "sub/b").read_text() == "newer"
    assert sorted(os.listdir(job / "sub")) == ["b", "link"]
    (kept,) = entries(volume)
    assert kept.id == done.rescued
    kept_tree = Path(os.fsdecode(kept.path)) / "tree"
    assert (kept_tree / "sub/other").read_text() == "not of it"
    assert os.listdir(kept_tree / "sub") == ["other"]


def test_a_part_that_was_removed_since_stays_removed(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"a")
    (job / "a").unlink()
    assert restore(volume, swapped.id).rescued is None
    assert os.listdir(job) == ["sub"]


def test_where_both_have_the_name_both_copies_are_kept_and_reported(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"a")
    (tree_of(swapped) / "a").write_text("written late into the old tree")
    done = restore(volume, swapped.id)
    assert (job / "a").read_text() == "written late into the old tree"
    (kept,) = entries(volume)
    assert kept.id == done.rescued
    assert (Path(os.fsdecode(kept.path)) / "tree/a").read_text() == "1"
    assert [warning for warning in done.warnings if "a (File exists)" in warning]


def test_a_part_restored_elsewhere_is_not_of_the_fresh_directory(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"a", to=volume / "other")
    assert parts_of(volume, swapped.id) == ()
    restore(volume, swapped.id)
    assert (os.listdir(job), (volume / "other").read_text()) == (["sub"], "1")


def test_the_whole_elsewhere_leaves_the_part_where_it_was_restored(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"a")
    restore(volume, swapped.id, to=volume / "other")
    assert (os.listdir(job), os.listdir(volume / "other")) == (["a"], ["sub"])


def test_a_link_in_the_place_of_a_directory_on_the_way_leads_nowhere(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"sub/b")
    make_tree(volume / "others", {"b": "of others"})
    (job / "sub").rename(volume / "moved")
    (job / "sub").symlink_to(volume / "others")
    done = restore(volume, swapped.id)
    assert (volume / "others/b").read_text() == "of others"
    assert os.listdir(job / "sub") == ["link"]
    assert done.rescued is not None


def test_a_users_own_directory_that_may_not_be_changed_keeps_the_part_in_an_orphan(volume: Path) -> None:
    home = volume / "home"
    home.mkdir()
    os.chown(home, ALICE, ALICE)

    def act() -> tuple[bool, list[str]]:
        job = make_tree(home / "job", {"sub": {"b": "2", "c": "3"}})
        swapped = swap(job)
        restore(volume, swapped.id, inside=b"sub/b")
        (job / "sub").chmod(0o555)
        done = restore(volume, swapped.id)
        return done.rescued is not None, [*done.warnings]

    is_rescued, warnings = as_user(ALICE, act)
    assert is_rescued
    assert [warning for warning in warnings if "sub/b (Permission denied)" in warning]
    assert os.listdir(home / "job/sub") == ["c"]


def test_more_parts_than_a_record_has_room_for_are_restored_and_said(volume: Path) -> None:
    job = make_tree(volume / "job", {f"{n:03}" + "x" * 240: "x" for n in range(160)})
    names = sorted(os.listdir(job))
    swapped = swap(job)
    told = [restore(volume, swapped.id, inside=os.fsencode(name)).warnings for name in names]
    assert (told[0], len(told[-1])) == ((), 1)
    done = restore(volume, swapped.id)
    assert done.rescued is not None
    assert 0 < len(os.listdir(job)) < len(names)


def test_what_was_removed_leaves_a_name_that_only_one_of_the_two_can_have(volume: Path) -> None:
    """`rm` leaves no fresh directory: nothing is noted."""
    removed = remove(victim_in(volume))
    restore(volume, removed.id, inside=b"a")
    assert parts_of(volume, removed.id) == ()


def test_a_restore_of_a_part_writes_its_record_once(volume: Path) -> None:
    swapped = swap(victim_in(volume))
    calls = calls_of(lambda kernel: partial(restore, volume, swapped.id)(kernel, inside=b"a"))
    assert calls.count("write") == 1


def test_a_part_named_twice_is_noted_once(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    for _ in range(2):
        restore(volume, swapped.id, Kernel(), inside=b"a")
        (job / "a").rename(tree_of(swapped) / "a")
    assert parts_of(volume, swapped.id) == (b"a",)
