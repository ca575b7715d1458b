"""Stores inside a victim, noted or pointed at: nothing carries one away, and no pointer leads to another's."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from fusefs.core.errors import Exit, IsStore, NotFound, TrashdError
from fusefs.core.selection import Selection
from fusefs.linux.kernel import Kernel
from fusefs.store import doctor as check_module
from fusefs.store import orphans
from fusefs.store import user_folders as pointers_module
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.stage import SwapOptions
from fusefs.store.user_folders import lower_stores
from fusefs.sweep.request import ToDelete, ToMove, ToTrash
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.nested_stores import own_store, point_to, store_in, without_upper_store
from tests.support.other_users import as_user
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, tmpfs_volume
from tests.support.run_sweep import sweep
from tests.support.small_orphans import PINNED
from tests.support.store_verbs import (
    assert_silent,
    entries,
    folder_of,
    init,
    own,
    problems,
    raw,
    reap_now,
    recover_all,
    remove,
    restore,
    swap,
    tmpfs_store,
    users_own,
)
from tests.support.trashd_command import done_well, trashd

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
    (list_result,) = trashd("list", "--json", "--volume", volume / "team/deep/proj").objects()
    assert list_result["id"] == held(volume)


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
        assert [one.why for one in swept.spared] == ["contains a trash store"]


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
    assert [one.why for one in swept.spared] == ["contains a trash store"]
    assert (volume / "team/deep/proj/.trashd/u/0/orphans" / held(volume)).exists()


def test_a_sweep_that_deletes_enters_no_store(volume: Path) -> None:
    sweep(volume / "team", Selection(), ToDelete(recursive=True))
    assert (volume / "team/deep/proj/.trashd/u/0/orphans" / held(volume) / "tree/a").exists()
    assert not (volume / "team/a").exists()


T = TypeVar("T")


def saying(says: bytes) -> Callable[[Path], object]:
    def point(pointer: Path) -> None:
        pointer.write_bytes(says)

    return point


HOSTILE: dict[str, Callable[[Path], object]] = {
    "absolute": lambda pointer: pointer.write_bytes(raw(pointer.parents[4] / "home" / "bob")),
    "dots": saying(b"home/alice/../bob"),
    "dots out of the volume": saying(b"../../.."),
    "itself": saying(b"."),
    "through a link": saying(b"home/alice/link"),
    "beyond a link": saying(b"home/alice/above/bob"),
    "another's store": saying(b"home/bob"),
    "empty": saying(b""),
    "a NUL": saying(b"home/bob\0"),
    "a FIFO": os.mkfifo,
    "a directory": lambda pointer: pointer.mkdir(),
    "a link": lambda pointer: pointer.symlink_to(pointer.parents[4] / "home" / "alice" / "says-bob"),
    "a hard link": lambda pointer: pointer.hardlink_to(pointer.parents[4] / "home" / "alice" / "says-bob"),
}


@pytest.fixture
def pointing_volume() -> Iterator[Path]:
    """A volume with a store, Alice's home, and Bob's with an own store, which was there before, and an orphan."""
    with tmpfs_volume() as path:
        make_tree(path / "home", {"alice": Dir(owner=(ALICE, ALICE)), "bob": Dir(owner=(BOB, BOB))})
        as_user(BOB, lambda: swap(make_tree(path / "home" / "bob" / "job", {"results": "his"})))
        init(path)
        yield path
        assert_silent(path)
        as_user(BOB, partial(assert_silent, path / "home" / "bob"))


def by_both(act: Callable[[], T]) -> tuple[T, T]:
    """What root gets, and what Alice does."""
    return act(), as_user(ALICE, act)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_pointer_leads_nowhere_and_is_told(pointing_volume: Path, hostile: str) -> None:
    home, bobs = pointing_volume / "home" / "alice", pointing_volume / "home" / "bob"
    recover_all(pointing_volume)
    [kept] = bobs.glob(".trashd-*/u/*/orphans/*")
    before = snapshot(bobs, with_times=True)
    pointer = folder_of(pointing_volume, ALICE) / "pointers" / ("0" * 32)

    def act() -> None:
        (home / "link").symlink_to("../bob")
        (home / "above").symlink_to("..")
        (home / "says-bob").write_bytes(b"home/bob")
        init(pointing_volume)
        HOSTILE[hostile](pointer)

    as_user(ALICE, act)
    assert by_both(lambda: entries(pointing_volume)) == ([], [])
    assert by_both(lambda: recover_all(pointing_volume)) == ([], [])
    with pytest.raises(NotFound):
        reap_now(pointing_volume, kept.name)
    pointer = folder_of(pointing_volume, ALICE) / "pointers" / pointer.name
    told = [] if hostile == "another's store" else [str(pointer)]  # for her it is a directory without a store
    for problem in by_both(lambda: problems(pointing_volume)):
        assert [one.where for one in problem] == told
    assert snapshot(bobs, with_times=True) == before
    pointer.rmdir() if hostile == "a directory" else pointer.unlink()


@pytest.mark.needs("loop", "btrfs")
def test_the_commands_reach_a_users_lower_store_from_the_root_of_the_volume() -> None:
    with loop_volume("btrfs") as btrfs:
        init(btrfs)
        btrfs_subvolume(btrfs, "sub").chmod(0o755)
        make_tree(btrfs / "sub" / "home", Dir(owner=(ALICE, ALICE)))
        job = btrfs / "sub" / "home" / "job"
        as_user(ALICE, lambda: make_tree(job, {"results": "hers"}))
        identifier = as_user(ALICE, lambda: str(swap(job).id))
        [told] = done_well("list", "--json", "--volume", btrfs).objects()
        assert told["id"] == identifier
        done_well("restore", "--volume", btrfs, identifier)
        assert (job / "results").read_text() == "hers"
        identifier = as_user(ALICE, lambda: str(remove(job).id))
        done_well("reap", "--now", "--volume", btrfs, identifier)
        assert entries(btrfs) == []
        assert_silent(btrfs)


def test_many_pointers_to_one_store_have_it_read_once(pointing_volume: Path) -> None:
    lower = make_tree(pointing_volume / "home/alice/lower", Dir(owner=(ALICE, ALICE)))
    recover_all(pointing_volume)

    def act() -> int:
        init(lower)
        with own(pointing_volume) as folder:
            pointers = Path(os.fsdecode(folder.path())) / "pointers"
            for n in range(20):
                (pointers / f"{n:032x}").write_bytes(raw(lower.relative_to(pointing_volume)))
            stores = list(lower_stores(folder))
        for found in stores:
            found.__exit__()
        return len(stores)

    assert as_user(ALICE, act) == 1


def test_pointers_beyond_a_number_are_not_followed_and_that_is_told(
    pointing_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointers_module, "MAX_POINTERS", 3)
    monkeypatch.setattr(check_module, "MAX_POINTERS", 3)
    as_user(ALICE, lambda: swap(make_tree(pointing_volume / "home/alice/job", {})))
    recover_all(pointing_volume)
    pointers = folder_of(pointing_volume, ALICE) / "pointers"

    def act() -> None:
        for n in range(5):
            (pointers / f"{n:032x}").write_bytes(b"home/alice")

    as_user(ALICE, act)
    assert [one.where for one in as_user(ALICE, lambda: problems(pointing_volume))] == [str(pointers)]
    for pointer in pointers.iterdir():
        pointer.unlink()


def test_root_lists_no_more_of_one_user_than_an_answer_has_room_for(
    pointing_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "_MOST_LISTED", 3)
    for n in range(4):
        as_user(ALICE, lambda n=n: swap(make_tree(pointing_volume / f"home/alice/job{n}", {})).id)  # type: ignore[misc]
    roots = swap(make_tree(pointing_volume / "job", {})).id
    recover_all(pointing_volume)
    lost: list[TrashdError] = []
    assert [entry.id for entry in orphans.list_all_containers(Kernel(), [raw(pointing_volume)], lost)] == [roots]
    assert [error.exit_code for error in lost] == [Exit.INCOMPLETE]
    assert len(as_user(ALICE, lambda: entries(pointing_volume))) == 4
