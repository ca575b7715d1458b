"""The remover stops at a trash store that holds something, and at no other; what is pinned in it survives."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.results import PINNED, STORE, Reaped
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import Dir, make_tree
from tests.support.nested_stores import (
    made_elsewhere,
    own_store,
    plant_store,
    reap_with_stores,
    store_in,
    without_upper_store,
)
from tests.support.open_files import write_lease
from tests.support.other_users import as_user
from tests.support.reap_process import state_of
from tests.support.small_orphans import PINNED as KEPT
from tests.support.small_orphans import command, orphan_in
from tests.support.store_verbs import entries, init, place, reap_now, remove, restore, swap, tmpfs_store
from tests.support.team_trees import tick

pytestmark = pytest.mark.needs("root")

ALICE, BOB = 1001, 1002


def told(reaped: Reaped) -> list[tuple[bytes, str]]:
    """What stayed, and why."""
    return [(failure.name, failure.call) for failure in reaped.report.failures]


def team_in(volume: Path, options: SwapOptions | None = None) -> tuple[str, str]:
    """The id of an orphan with a store of its own deep in it; and of the orphan that this holds."""
    make_tree(volume / "team", {"a": "1", "deep": {"proj": {"b": "2"}}})
    inner = store_in(volume, volume / "team/deep/proj", options)
    return str(swap(volume / "team").id), inner


def left_over(volume: Path, identifier: str) -> Path:
    return place(volume, identifier) / "tree"


def test_a_store_that_holds_an_orphan_stays_and_all_else_goes(volume: Path) -> None:
    team, inner = team_in(volume)
    assert told(reap_now(volume, team)) == [(b"tree/deep/proj/.trashd", STORE)]
    assert state_of(volume, team) is State.QUARANTINE
    tree = left_over(volume, team)
    assert os.listdir(tree / "deep/proj") == [".trashd"]
    assert os.listdir(tree) == ["deep"]
    restore(tree / "deep/proj", inner, to=volume / "back")
    assert (volume / "back/a").read_text() == "1"


@pytest.mark.parametrize("by_word", [False, True])
def test_the_rest_goes_when_it_holds_nothing_any_more_or_by_a_persons_word(volume: Path, by_word: bool) -> None:
    team, inner = team_in(volume)
    reap_now(volume, team)
    if not by_word:
        reap_now(left_over(volume, team) / "deep/proj", inner)
    again = reap_with_stores if by_word else reap_now
    assert again(volume, team).report.n_failed == 0
    assert state_of(volume, team) is None


def test_what_is_pinned_in_it_survives_a_persons_word_and_is_named(volume: Path) -> None:
    team, inner = team_in(volume, options=KEPT)
    reaped = reap_with_stores(volume, team)
    way = f"tree/deep/proj/.trashd/u/0/orphans/{inner}"
    assert told(reaped) == [(way.encode(), PINNED)]
    proj = left_over(volume, team) / "deep/proj"
    assert command(proj, "keep", inner, "--release") == 0
    assert reap_with_stores(volume, team).report.n_failed == 0


def test_what_has_an_unreadable_record_survives_a_persons_word(volume: Path) -> None:
    team, inner = team_in(volume)
    reap_now(volume, team)
    record = left_over(volume, team) / f"deep/proj/.trashd/u/0/orphans/{inner}/record.json"
    text = record.read_bytes()
    record.write_bytes(text[:40])
    assert [why for _way, why in told(reap_with_stores(volume, team))] == [PINNED]
    assert state_of(volume, team) is State.QUARANTINE


@pytest.mark.parametrize("state", [state for state in State if state is not State.ORPHANS])
def test_a_container_in_any_state_counts(volume: Path, state: State) -> None:
    team, inner = team_in(volume)
    folder = left_over(volume, team) / "deep/proj/.trashd/u/0"
    (folder / "orphans" / inner).rename(folder / state.value / inner)
    assert [why for _way, why in told(reap_now(volume, team))] == [STORE]


def test_what_lies_in_drop_counts(volume: Path) -> None:
    make_tree(volume / "team", {"proj": {}})
    with made_elsewhere(volume, volume / "team/proj") as made:
        init(made)
    make_tree(volume / "team/proj/.trashd/u/0/drop/thing", {"a": "1"})
    assert [why for _way, why in told(reap_now(volume, swap(volume / "team").id))] == [STORE]


def test_a_store_that_holds_nothing_goes(volume: Path) -> None:
    make_tree(volume / "team", {"proj": {}})
    with made_elsewhere(volume, volume / "team/proj") as made:
        init(made)
    assert told(reap_now(volume, swap(volume / "team").id)) == []


def test_a_store_deeper_than_directories_are_held_open_is_found(volume: Path) -> None:
    deep = volume / "team" / "/".join(["d"] * 200)
    deep.mkdir(parents=True)
    store_in(volume, deep)
    reaped = reap_now(volume, swap(volume / "team").id)
    assert [why for _way, why in told(reaped)] == [STORE]
    assert len(list(place(volume, reaped.id).rglob("record.json"))) == 2


def test_a_store_that_was_dropped_itself_stays(volume: Path) -> None:
    make_tree(volume / "proj", {})
    inner = store_in(volume, volume / "proj")
    (volume / "proj/.trashd").rename(volume / ".trashd/u/0/drop/away")
    command(volume, "list")
    (entry,) = entries(volume)
    assert [why for _way, why in told(reap_now(volume, entry.id))] == [STORE]
    assert (left_over(volume, entry.id) / "u/0/orphans" / inner).exists()


# Whose


@pytest.fixture
def shared() -> Iterator[Path]:
    """A store of root's, and a directory of Alice's in which she has a store of her own with an orphan."""
    with tmpfs_store() as path:
        make_tree(path / "team", Dir({"alice": Dir({}, owner=(ALICE, ALICE))}))
        with without_upper_store(path):
            as_user(ALICE, partial(own_store, path / "team/alice", KEPT))
        tick(path)
        yield path


def test_a_users_reaper_stops_at_his_own(shared: Path) -> None:
    os.chown(shared / "team", ALICE, ALICE)
    make_tree(shared / "hers", Dir(owner=(ALICE, ALICE)))
    (shared / "team").rename(shared / "hers/team")
    team = as_user(ALICE, lambda: str(remove(shared / "hers/team").id))
    assert [why for _way, why in told(reap_now(shared, team))] == [STORE]
    assert [why for _way, why in told(as_user(ALICE, partial(reap_with_stores, shared, team)))] == [PINNED]


def test_roots_reaper_stops_at_that_of_whose_tree_it_is(shared: Path) -> None:
    os.chown(shared / "team", ALICE, ALICE)
    assert [why for _way, why in told(reap_now(shared, swap(shared / "team").id))] == [STORE]


def test_roots_own_tree_goes_with_a_third_persons_store(shared: Path) -> None:
    assert told(reap_now(shared, swap(shared / "team").id)) == []


def test_in_a_store_of_roots_everybodys_orphans_count_for_root(volume: Path) -> None:
    make_tree(volume / "team", {"proj": Dir({"job": Dir({}, owner=(ALICE, ALICE))}, mode=0o777)})
    with without_upper_store(volume):
        init(volume / "team/proj")
        inner = as_user(ALICE, lambda: str(remove(volume / "team/proj/job", None, KEPT).id))
    (volume / "team").rename(volume / "group")
    team = swap(volume / "group").id
    assert [why for _way, why in told(reap_now(volume, team))] == [STORE]
    ((way, why),) = told(reap_with_stores(volume, team))
    assert (way, why) == (f"tree/proj/.trashd/new/{ALICE}/orphans/{inner}".encode(), PINNED)


def test_a_deletion_by_root_spares_what_its_owner_pinned(volume: Path) -> None:
    """`reap --force` of what Alice could not delete: root is who asks, and her pinned orphan stays."""
    make_tree(volume / "alice", Dir({"team": Dir({"roots": {"file": "root's"}}, owner=(ALICE, ALICE))}))
    os.chown(volume / "alice", ALICE, ALICE)

    make_tree(volume / "alice/team/proj", Dir(owner=(ALICE, ALICE)))
    with without_upper_store(volume):
        inner = as_user(ALICE, partial(own_store, volume / "alice/team/proj", KEPT))
    team = as_user(ALICE, lambda: str(remove(volume / "alice/team").id))
    reap_now(volume, team)
    for words in ((), ("--with-stores",)):
        assert command(volume, "reap", "--force", "--yes", team, *words) == 13
        (entry,) = [one for one in entries(volume) if one.state is State.QUARANTINE]
        team = entry.id
        (found,) = place(volume, team).rglob(f".trashd-{ALICE}/u/{ALICE}/orphans/{inner}")
        assert (found / "tree/a").read_text() == "1"
    assert not list(place(volume, team).rglob("roots"))


# What is none


def test_what_a_third_person_planted_is_no_store(volume: Path) -> None:
    make_tree(volume / "team", Dir(mode=0o777))
    as_user(BOB, partial(plant_store, volume / "team", 0))
    os.chown(volume / "team/.trashd", 0, 0)
    tick(volume)
    assert told(reap_now(volume, swap_all(volume / "team"))) == []


def swap_all(path: Path) -> str:
    """A directory with what looks like a store in its top, which a swap refuses: that came in later."""
    away = path.parent / "away"
    (path / ".trashd").rename(away)
    identifier = str(swap(path).id)
    away.rename(place(path.parent, identifier) / "tree/.trashd")
    return identifier


DAMAGES = {
    "link": "mv volume.json other; ln -s other volume.json",
    "mode": "chmod 777 .",
    "owner": f"chown {BOB}:{BOB} volume.json",
    "text": "echo '[]' >volume.json",
    "fifo": "rm volume.json; mkfifo volume.json",
    "folder": "chmod 770 u/0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_others_could_have_made_is_no_store(volume: Path, damage: str) -> None:
    team, _inner = team_in(volume)
    store = left_over(volume, team) / "deep/proj/.trashd"
    subprocess.run(["sh", "-euc", DAMAGES[damage]], cwd=store, check=True)
    assert STORE not in [why for _way, why in told(reap_now(volume, team))]


def test_a_third_persons_lease_on_what_he_planted_keeps_nothing(volume: Path) -> None:
    make_tree(volume / "team", {"open": Dir(mode=0o777)})
    as_user(BOB, partial(plant_store, volume / "team/open", BOB))
    tick(volume)
    team = swap(volume / "team").id
    with write_lease(left_over(volume, team) / "open/.trashd/volume.json"):
        assert told(reap_now(volume, team)) == []


# Words


def test_the_list_of_the_quarantine_says_what_helps(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    team, inner = team_in(volume)
    command(volume, "reap", "--now", team)
    assert "trashd reap --with-stores ID" in capsys.readouterr().out
    command(volume, "list")
    reason = capsys.readouterr().out.splitlines()[-1]
    assert reason.startswith("  tree/deep/proj/.trashd: a trash store that is not empty")
    assert command(left_over(volume, team) / "deep/proj", "restore", inner, "--to", str(volume / "back")) == 0
    assert command(volume, "reap", "--now", "--with-stores", team) == 0


def test_a_store_is_deleted_by_name_alone(volume: Path) -> None:
    assert command(volume, "reap", "--with-stores") == 2
    assert command(volume, "reap", "--now", "--all", "--with-stores") == 2


def test_what_a_copy_of_a_volume_holds_is_held(volume: Path) -> None:
    """A backup that lies in a directory which is swapped away."""
    inner = orphan_in(volume, options=KEPT)
    shutil.copytree(volume / ".trashd", volume / "backup/day/.trashd", symlinks=True)
    for state in State:
        (volume / f"backup/day/.trashd/u/0/{state.value}").chmod(0o700)
    reaped = reap_with_stores(volume, swap(volume / "backup").id)
    assert told(reaped) == [(f"tree/day/.trashd/u/0/orphans/{inner.id}".encode(), PINNED)]


def test_what_a_copy_that_lost_its_owners_holds_is_held(volume: Path) -> None:
    """`cp -r` by root: Alice's folder is root's there."""
    make_tree(volume / "team", {"proj": {}})
    store_in(volume, volume / "team/proj")
    users = volume / "team/proj/.trashd/u"
    (users / "0").rename(users / str(ALICE))
    assert [why for _way, why in told(reap_now(volume, swap(volume / "team").id))] == [STORE]
