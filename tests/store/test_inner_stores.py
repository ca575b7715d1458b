"""Nothing carries a noted store away that holds something: what would refuses, or says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import IsStore
from fusefs.core.selection import Selection
from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.stage import SwapOptions
from fusefs.sweep.request import ToDelete, ToMove, ToTrash
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.nested_stores import own_store, point_to, store_in, without_upper_store
from tests.support.other_users import as_user
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, tmpfs_volume
from tests.support.run_sweep import sweep
from tests.support.small_orphans import PINNED
from tests.support.store_verbs import folder_of, init, raw, reap_now, remove, restore, swap, tmpfs_store, users_own
from tests.support.trashd_command import trashd

pytestmark = pytest.mark.needs("root")

ALICE, BOB = 1001, 1002


@pytest.fixture
def volume() -> Iterator[Path]:
    """A store; deep in a directory another one, noted, with an orphan that is pinned."""
    with tmpfs_store() as path:
        make_tree(path / "team", {"a": "1", "deep": {"proj": {"b": "2"}}})
        store_in(path, path / "team/deep/proj", PINNED)
        point_to(path, path / "team/deep/proj")
        yield path


def held(volume: Path) -> str:
    """The id of what the lower store holds."""
    (container,) = (volume / "team/deep/proj/.trashd/u/0/orphans").iterdir()
    return container.name


@pytest.mark.parametrize("name", ["team", "team/deep", "team/deep/proj"])
@pytest.mark.parametrize("verb", [swap, remove])
def test_what_holds_a_store_is_refused_however_deep(volume: Path, verb: Callable[[Path], object], name: str) -> None:
    before = snapshot(volume / "team")
    with pytest.raises(IsStore) as refused:
        verb(volume / name)
    assert refused.value.detail == str(volume / "team/deep/proj/.trashd")
    assert snapshot(volume / "team") == before


def test_check_and_the_command_line_say_which_and_what_to_do(volume: Path) -> None:
    done = trashd("swap", volume / "team")
    assert done.code == 3
    assert f"trashd list --volume {volume}/team/deep/proj" in done.err
    assert trashd("check", volume / "team").code == 3
    (told,) = trashd("list", "--json", "--volume", volume / "team/deep/proj").objects()
    assert told["id"] == held(volume)


def test_what_lies_beside_it_is_swapped(volume: Path) -> None:
    for name in ("team2", "tea", "team/deep/other"):
        make_tree(volume / name, {"a": "1"})
        swap(volume / name)


def test_a_store_that_holds_nothing_any_more_is_in_nobodys_way(volume: Path) -> None:
    reap_now(volume / "team/deep/proj", held(volume))
    swap(volume / "team")


def test_a_store_that_is_gone_is_in_nobodys_way(volume: Path) -> None:
    restore(volume / "team/deep/proj", held(volume), to=volume / "back")
    (volume / "team/deep/proj").rename(volume / "proj")
    swap(volume / "team")


def test_a_pointer_to_what_is_no_store_is_in_nobodys_way(volume: Path) -> None:
    (volume / "team").rename(volume / "away")
    make_tree(volume / "team", {"deep": {"proj": {".trashd": {"u": {"0": {"orphans": {"x": {}}}}}}}})
    swap(volume / "team")


@pytest.mark.needs("loop", "btrfs")
def test_a_store_that_trashd_had_to_make_further_down_is_found() -> None:
    with loop_volume("btrfs") as path:
        init(path)
        make_tree(path / "team", {})
        btrfs_subvolume(path / "team", "sub")
        make_tree(path / "team/sub/job", {"a": "1"})
        swap(path / "team/sub/job", options=PINNED)
        assert (path / "team/sub/.trashd").exists()
        with pytest.raises(IsStore):
            swap(path / "team")


def test_a_store_that_nothing_but_the_registry_names_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob made it in a place of Bob's, without an upper store that had a pointer."""
    with tmpfs_volume() as path:
        make_tree(path / "team", {"proj": Dir({"job": Dir({}, owner=(BOB, BOB))}, owner=(BOB, BOB))})
        make_tree(path / "state", Dir(owner=(BOB, BOB)))
        monkeypatch.setenv("XDG_STATE_HOME", str(path / "state"))

        def act() -> str:
            return str(swap(path / "team/proj/job", options=PINNED).id)

        as_user(BOB, act)
        assert users_own(path / "team/proj", BOB).exists()
        for directory in (path, path / "team"):
            os.chown(directory, BOB, BOB)
        with pytest.raises(IsStore):
            as_user(BOB, partial(_swap_quietly, path / "team"))
        swept = as_user(BOB, partial(sweep, path, Selection(types=frozenset("d"), names=("team",)), ToTrash()))
        assert [one.why for one in swept.spared] == ["holds a trash store"]


# Whose


@pytest.fixture
def shared() -> Iterator[Path]:
    """A store of root's; Alice has one of her own in her home, noted, with an orphan."""
    with tmpfs_store() as path:
        make_tree(path / "team", {"alice": Dir({"proj": Dir(owner=(ALICE, ALICE))}, owner=(ALICE, ALICE))})
        with without_upper_store(path):
            as_user(ALICE, partial(own_store, path / "team/alice/proj"))
        as_user(ALICE, partial(point_to, path, path / "team/alice/proj"))
        yield path


@pytest.mark.parametrize("name", ["team", "team/alice"])
def test_root_refuses_for_everybody(shared: Path, name: str) -> None:
    with pytest.raises(IsStore):
        swap(shared / name)


def test_root_refuses_for_the_owner_too_when_he_swaps_for_him(shared: Path) -> None:
    with pytest.raises(IsStore):
        swap_for_owner(Kernel(), raw(shared / "team/alice"), SwapOptions())


def test_what_nothing_but_another_users_registry_names_goes_with_roots_swap_and_comes_back_with_it() -> None:
    """Root does not read all users' registries for a swap; what is pinned there is in the orphan, whole."""
    with tmpfs_store() as path:
        make_tree(path / "team", {"alice": Dir({"proj": Dir(owner=(ALICE, ALICE))}, owner=(ALICE, ALICE))})
        with without_upper_store(path):
            as_user(ALICE, partial(own_store, path / "team/alice/proj", PINNED))
        before = snapshot(path / "team/alice/proj", with_times=True)
        restore(path, str(swap(path / "team").id))
        assert snapshot(path / "team/alice/proj", with_times=True) == before


def test_a_user_refuses_for_himself(shared: Path) -> None:
    make_tree(shared / "homes", Dir(owner=(ALICE, ALICE)))
    with pytest.raises(IsStore):
        as_user(ALICE, partial(_swap_quietly, shared / "team/alice"))


def _swap_quietly(path: Path) -> None:
    swap(path)


def test_a_pointer_of_anothers_stops_no_user(shared: Path) -> None:
    """Bob's words are not believed about Alice's directory: she can't see them, and they are no store of hers."""
    make_tree(shared / "hers", Dir({"job": Dir({"sub": Dir({}, owner=(ALICE, ALICE))}, owner=(ALICE, ALICE))}))
    os.chown(shared / "hers", ALICE, ALICE)
    make_tree(shared / "bobs", Dir(owner=(BOB, BOB)))
    as_user(BOB, partial(point_to, shared, shared / "hers/job/sub"))
    as_user(ALICE, partial(_swap_quietly, shared / "hers/job"))


def test_a_user_who_stops_his_process_stops_nobody(shared: Path) -> None:
    """What was noted is not known then; the remover stops at a store all the same."""
    pointers = folder_of(shared, ALICE) / "pointers"
    for number in range(3):
        os.mkfifo(pointers / f"{number:032}")
        os.chown(pointers / f"{number:032}", ALICE, ALICE)
    make_tree(shared / "other", {"a": "1"})
    swap(shared / "other")
    for number in range(3):
        (pointers / f"{number:032}").unlink()


# Sweeps


@pytest.mark.parametrize("name", ["deep", "proj"])
@pytest.mark.parametrize("act", [ToTrash(), ToMove(b"to")], ids=["trash", "move"])
def test_a_sweep_leaves_a_directory_with_a_store_in_it_and_says_so(
    volume: Path, act: ToTrash | ToMove, name: str
) -> None:
    make_tree(volume / "to", {})
    if isinstance(act, ToMove):
        act = act._replace(target=raw(volume / "to"))
    swept = sweep(volume / "team", Selection(types=frozenset("d"), names=(name,)), act)
    assert [one.why for one in swept.spared] == ["holds a trash store"]
    assert (volume / "team/deep/proj/.trashd/u/0/orphans" / held(volume)).exists()


def test_a_sweep_that_deletes_enters_no_store(volume: Path) -> None:
    sweep(volume / "team", Selection(), ToDelete(recursive=True))
    assert (volume / "team/deep/proj/.trashd/u/0/orphans" / held(volume) / "tree/a").exists()
    assert not (volume / "team/a").exists()
