"""`trashd list`: stores that no one named, sums by user, project and age, and lines that fit the terminal."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusefs.store.stage import SwapOptions
from tests.support.fuse_silent import silent_fuse
from tests.support.fuse_watchdog import device_for_all
from tests.support.make_trees import make_tree, owned
from tests.support.peak_usage import beside_small_parent
from tests.support.real_filesystems import tmpfs_volume
from tests.support.small_orphans import EXPIRED, OTHER, many_orphans, orphan_in, orphan_of
from tests.support.store_verbs import init, users_own
from tests.support.terminals import Terminal
from tests.support.trashd_command import TRASHD, CommandResult, done_well, swapped, trashd
from tests.support.user_homes import ALICE, BOB, homes, registry_of, trashd_as

pytestmark = pytest.mark.needs("root")


ELSEWHERE = Path("/")


@pytest.fixture
def home() -> Iterator[Path]:
    """Alice's, on a disk of its own whose root is not hers, with /dev/fuse open to all, as udev makes it."""
    with homes(ALICE, BOB) as made, device_for_all():
        yield made[ALICE]


def his(path: Path) -> Path:
    return owned(path, ALICE)


def listed(done: CommandResult) -> list[dict[str, Any]]:
    assert done.code == 0, done
    return [json.loads(line) for line in done.out.splitlines()]


def swapped_at_home(home: Path, *options: str) -> dict[str, Any]:
    """What is said of a directory that Alice swaps where the store is in her home."""
    his(make_tree(home / "job", {"file": "x"}))
    (swap_result,) = trashd_as(ALICE, home, "swap", "--json", *options, home / "job").objects()
    assert swap_result["store"] == f"{home}/.trashd-{ALICE}/u/{ALICE}"
    return dict(swap_result)


@pytest.fixture
def dead() -> Iterator[Path]:
    """A mount whose server does not answer."""
    with tmpfs_volume() as volume:
        (volume / "dead").mkdir()
        with silent_fuse(volume / "dead", 0):
            yield volume / "dead"


def undo(told: dict[str, Any]) -> list[str]:
    return str(told["restore"]).split()[1:]


def test_the_undo_line_works_from_anywhere_and_need_not_say_where(home: Path) -> None:
    swap_result = swapped_at_home(home)
    assert swap_result["volume"] is None
    assert trashd_as(ALICE, home, *undo(swap_result)).code == 0
    assert (home / "job/file").exists()


def test_an_undo_line_says_where_if_nothing_can_be_remembered(home: Path) -> None:
    his(make_tree(home / "job", {"file": "x"}))
    nowhere = Path("/nonexistent")
    (swap_result,) = trashd_as(ALICE, nowhere, "swap", "--json", home / "job").objects()
    assert swap_result["volume"] == str(home)
    assert trashd_as(ALICE, nowhere, *undo(swap_result)).code == 0
    assert (home / "job/file").exists()


def test_root_lists_what_is_in_a_home_and_nobody_else_does(home: Path) -> None:
    swap_result = swapped_at_home(home)
    assert [(one["id"], one["uid"]) for one in listed(trashd("list", "--json", cwd=ELSEWHERE))] == [
        (swap_result["id"], ALICE)
    ]
    assert listed(trashd_as(BOB, home.with_name(f"user{BOB}"), "list", "--json")) == []


def test_roots_reap_takes_what_has_expired_in_a_home_as_its_user(home: Path) -> None:
    swap_result = swapped_at_home(home, "--keep-for", "0s")
    done = trashd("reap", "--json", cwd=ELSEWHERE)
    assert [(one["id"], one["lost"]) for one in done.objects()] == [(swap_result["id"], None)]
    assert os.listdir(home / f".trashd-{ALICE}/u/{ALICE}/orphans") == []
    assert sorted(os.listdir(home / f".trashd-{ALICE}/u")) == [str(ALICE)]


def test_root_restores_from_a_home_by_the_id_alone(home: Path) -> None:
    swap_result = swapped_at_home(home)
    assert trashd("restore", swap_result["id"], cwd=ELSEWHERE).code == 0
    assert (home / "job/file").stat().st_uid == ALICE


def test_root_takes_nothing_over_in_a_users_own_store(home: Path) -> None:
    swapped_at_home(home)
    for words in (("list",), ("reap",), ("doctor", home)):
        assert trashd(*words, cwd=ELSEWHERE).code == 0
    assert {path.stat().st_uid for path in (users_own(home, ALICE), *users_own(home, ALICE).rglob("*"))} == {ALICE}


@pytest.mark.needs("fuse")
def test_what_was_swapped_in_a_users_own_mount_is_found_when_that_is_gone(home: Path) -> None:
    source, mounted = his(make_tree(home / "src", {"d": {"file": "x"}})), his(make_tree(home / "mnt", {}))
    assert trashd_as(ALICE, home, "mount", source, mounted).code == 0
    (swap_result,) = trashd_as(ALICE, home, "swap", "--json", mounted / "d").objects()
    assert trashd_as(ALICE, home, "umount", mounted).code == 0
    assert [one["id"] for one in listed(trashd_as(ALICE, home, "list", "--json"))] == [swap_result["id"]]
    assert [one["id"] for one in listed(trashd("list", "--json", cwd=ELSEWHERE))] == [swap_result["id"]]
    assert trashd_as(ALICE, home, *undo(swap_result)).code == 0
    assert (source / "d/file").exists()


@pytest.fixture
def copy(home: Path) -> Path:
    """A copy of a directory of Alice's, with her store in it, where one orphan has expired."""
    work = his(make_tree(home / "work", {"job": {"file": "x"}}))
    (swap_result,) = trashd_as(ALICE, home, "swap", "--json", "--keep-for", "0s", work / "job").objects()
    assert swap_result["store"].startswith(str(home / ".trashd"))
    shutil.copytree(home, home.with_name("copy"), symlinks=True)
    return his(home.with_name("copy"))


def test_a_reap_leaves_what_is_in_a_copy_and_says_so(home: Path, copy: Path) -> None:
    done = trashd_as(ALICE, home, "reap", "--volume", copy)
    assert done.code == 0
    assert "1 orphan not deleted" in done.err
    assert f"trashd init {copy}" in done.err
    assert len(os.listdir(copy / f".trashd-{ALICE}/u/{ALICE}/orphans")) == 1


def test_all_of_ones_own_are_not_those_of_a_copy(home: Path, copy: Path) -> None:
    done = trashd_as(ALICE, home, "reap", "--all", "--now", "--json", "--volume", copy)
    assert [one["lost"] for one in done.objects()] == ["unregistered"]
    assert len(os.listdir(copy / f".trashd-{ALICE}/u/{ALICE}/orphans")) == 1


def test_what_is_in_quarantine_in_a_copy_is_tried_again_by_its_id(home: Path, copy: Path) -> None:
    """The one in the original has the same id, and is no hindrance."""
    folders = [base / f".trashd-{ALICE}/u/{ALICE}" for base in (home, copy)]
    for folder in folders:
        (identifier,) = os.listdir(folder / "orphans")
        (folder / "orphans" / identifier).rename(folder / "quarantine" / identifier)
    done = trashd_as(ALICE, home, "reap", identifier, "--volume", copy, cwd=copy)
    assert done.code == 0, done
    assert [len(os.listdir(folder / "quarantine")) for folder in folders] == [1, 0]


def test_to_use_a_copy_is_not_to_vouch_for_it(home: Path, copy: Path) -> None:
    his(make_tree(copy / "other", {}))
    (swap_result,) = trashd_as(ALICE, home, "swap", "--json", copy / "other").objects()
    assert swap_result["volume"] == str(copy)
    assert trashd_as(ALICE, home, "reap", "--volume", copy).code == 0
    assert len(os.listdir(copy / f".trashd-{ALICE}/u/{ALICE}/orphans")) == 2


def test_who_can_have_no_registry_vouches_for_no_copy(home: Path, copy: Path) -> None:
    nowhere = Path("/nonexistent")
    for base, n_left in ((copy, 1), (home, 0)):
        assert trashd_as(ALICE, nowhere, "reap", "--volume", base).code == 0
        assert len(os.listdir(base / f".trashd-{ALICE}/u/{ALICE}/orphans")) == n_left


def test_root_leaves_what_is_in_a_copy(copy: Path) -> None:
    assert trashd("reap", "--volume", copy).code == 0
    assert len(os.listdir(copy / f".trashd-{ALICE}/u/{ALICE}/orphans")) == 1


def test_a_copy_is_listed_and_restored_from(home: Path, copy: Path) -> None:
    (one,) = listed(trashd_as(ALICE, home, "list", "--json", "--volume", copy))
    assert one["is_vouched"] is False
    assert trashd_as(ALICE, home, "restore", "--volume", copy, one["id"], "--to", copy / "back").code == 0
    assert (copy / "back/file").exists()


def test_init_by_its_owner_vouches_for_a_copy(home: Path, copy: Path) -> None:
    assert trashd_as(ALICE, home, "init", copy).code == 0
    assert trashd_as(ALICE, home, "reap", "--volume", copy).code == 0
    assert os.listdir(copy / f".trashd-{ALICE}/u/{ALICE}/orphans") == []


@pytest.mark.needs("fuse")
def test_a_mount_that_does_not_answer_is_passed_over_with_a_word(home: Path, dead: Path) -> None:
    swap_result = swapped_at_home(home)
    done = trashd("list", "--json", cwd=ELSEWHERE)
    assert [one["id"] for one in listed(done)] == [swap_result["id"]]
    assert done.err.splitlines() == [f"trashd: warning: {dead} does not respond, and was skipped"]


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("words", [("reap",), ("list",), ("reap", "--all", "--now")])
@pytest.mark.usefixtures("home", "dead")
def test_commands_go_on_where_a_mount_does_not_answer(words: tuple[str, ...]) -> None:
    done = trashd(*words, cwd=ELSEWHERE)
    assert (done.code, done.err.count("does not respond")) == (0, 1)


@pytest.mark.needs("fuse")
def test_an_id_that_is_nowhere_may_be_where_nobody_answers(home: Path, dead: Path) -> None:
    swap_result = swapped_at_home(home)
    done = trashd("restore", "20261121T032253.555Z-job-2fe7e4cb8ba8", cwd=ELSEWHERE)
    assert done.code == 5
    assert f"{dead}, which does not respond" in done.err
    assert trashd("restore", swap_result["id"], cwd=ELSEWHERE).code == 0


@pytest.mark.needs("fuse")
def test_a_users_own_dead_mount_is_not_asked_for_anything(home: Path) -> None:
    dead = his(make_tree(home / "dead", {}))
    with silent_fuse(dead, ALICE):
        done = trashd("list", cwd=ELSEWHERE)
        assert (done.code, done.err) == (0, "no orphans\n")


def test_a_registry_is_not_looked_for_where_the_user_says_so_to_himself_alone(home: Path) -> None:
    his(make_tree(home / "job", {}))
    state = his(make_tree(home / "state", {}))
    (swap_result,) = trashd_as(ALICE, home, "swap", "--json", home / "job", XDG_STATE_HOME=str(state)).objects()
    assert not registry_of(home).exists()
    assert [one["id"] for one in listed(trashd_as(ALICE, home, "list", "--json", XDG_STATE_HOME=str(state)))] == [
        swap_result["id"]
    ]
    assert listed(trashd("list", "--json", cwd=ELSEWHERE)) == []


def test_doctor_tells_of_a_copy_and_of_what_would_vouch_for_it(home: Path, copy: Path) -> None:
    for done in (trashd_as(ALICE, home, "doctor", "--json", copy), trashd("doctor", "--json", copy)):
        (problem,) = [one for one in done.objects() if one["where"] == f"{copy}/.trashd-{ALICE}"]
        assert f"trashd init {copy}" in problem["hint"]
    assert trashd_as(ALICE, home, "doctor", home).code == 0


def test_doctor_tells_of_a_store_that_is_gone_until_the_next_one_is_used(home: Path) -> None:
    swapped_at_home(home)
    inner = his(make_tree(home / "inner", {}))
    assert trashd_as(ALICE, home, "init", inner).code == 0
    shutil.rmtree(inner)
    (problem,) = trashd_as(ALICE, home, "doctor", "--json", home).objects()
    assert problem["where"] == f"{inner}/.trashd-{ALICE}"
    his(make_tree(home / "other", {}))
    assert trashd_as(ALICE, home, "init", home / "other").code == 0
    assert trashd_as(ALICE, home, "doctor", home).out == ""


def test_doctor_tells_of_a_registry_that_others_can_write(home: Path) -> None:
    swap_result = swapped_at_home(home)
    registry_of(home).chmod(0o666)
    (problem,) = trashd_as(ALICE, home, "doctor", "--json", home).objects()[:1]
    assert problem["where"] == str(registry_of(home))
    assert listed(trashd_as(ALICE, home, "list", "--json")) == []
    registry_of(home).chmod(0o600)
    assert [one["id"] for one in listed(trashd_as(ALICE, home, "list", "--json"))] == [swap_result["id"]]


N_FEW, N_MANY = 300, 6000
GROWTH_MAX_KIB = 3 * 1024  # a list of as many takes twice that


@pytest.fixture
def held(volume: Path) -> Path:
    """Two users' orphans from two projects."""
    init(volume)
    (volume / "p").mkdir()
    (volume / "q").mkdir()
    orphan_in(volume / "p", "one", EXPIRED)
    orphan_in(volume / "q", "two")
    orphan_of(OTHER, volume, SwapOptions())
    return volume


def test_users_are_told_with_their_orphans(held: Path) -> None:
    list_results = done_well("list", "--sum-by", "user", "--json", "--volume", held).objects()
    assert {(one["uid"], one["n_orphans"], one["n_due"]) for one in list_results} == {(0, 2, 1), (OTHER, 1, 0)}
    assert {one["sum_by"] for one in list_results} == {"user"}


def test_projects_are_told_by_where_orphans_came_from(held: Path) -> None:
    list_results = done_well("list", "--sum-by", "project", "--json", "--volume", held).objects()
    assert {one["project"] for one in list_results} == {f"{held}/p", f"{held}/q", f"{held}/home-{OTHER}"}
    deeper = done_well("list", "--sum-by", "project", "--depth", "2", "--json", "--volume", held).objects()
    assert f"{held}/p/one" in {one["project"] for one in deeper}


def test_ages_are_told_by_brackets(held: Path) -> None:
    (list_result,) = done_well("list", "--sum-by", "age", "--json", "--volume", held).objects()
    assert (list_result["from_s"], list_result["under_s"], list_result["n_orphans"]) == (0, 3600, 3)
    head, line = done_well("list", "--sum-by", "age", "--volume", held).out.splitlines()
    assert (head.split()[-1], line.split()[0], line.endswith("to 1h")) == ("AGE", "3", True)


def test_what_was_counted_is_in_the_sum(held: Path) -> None:
    counted = done_well("du", "--json", "--user", "root", "--volume", held).objects()
    (list_result,) = done_well("list", "--sum-by", "user", "--user", "root", "--json", "--volume", held).objects()
    assert list_result["n_bytes"] == sum(int(one["n_bytes"]) for one in counted)
    assert (list_result["n_unknown"], list_result["is_at_least"]) == (0, False)


def test_a_user_is_told_of_his_own(held: Path) -> None:
    command = [TRASHD, "list", "--sum-by", "user", "--volume", str(held)]
    done = subprocess.run(command, user=OTHER, group=OTHER, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1].endswith(str(OTHER))
    assert len(done.stdout.splitlines()) == 2


def test_filters_say_which_orphans_are_summed(held: Path) -> None:
    words = ("list", "--sum-by", "project", "--path", f"{held}/q/*", "--json", "--volume", held)
    assert [one["project"] for one in done_well(*words).objects()] == [f"{held}/q"]


def test_nothing_is_changed_by_it(held: Path) -> None:
    dropped = held / ".trashd/u/0/drop/dropped"
    dropped.mkdir(parents=True)
    done_well("list", "--sum-by", "user", "--volume", held)
    assert dropped.exists()
    done_well("list", "--volume", held)
    assert not dropped.exists()


def test_without_orphans_there_is_nothing_to_tell(volume: Path) -> None:
    init(volume)
    done = trashd("list", "--sum-by", "user", "--volume", volume)
    assert (done.code, done.out, done.err) == (0, "", "no orphans\n")


def peak_kib(volume: Path) -> int:
    command = beside_small_parent([TRASHD, "list", "--sum-by", "user", "--volume", volume])
    return int(subprocess.run(command, capture_output=True, check=True).stderr.splitlines()[-1])


def test_memory_goes_with_the_sums_and_not_with_the_orphans(volume: Path) -> None:
    init(volume)
    many_orphans(volume, N_FEW)
    few = peak_kib(volume)
    many_orphans(volume, N_MANY)
    assert peak_kib(volume) - few < GROWTH_MAX_KIB


NOTE = "a note that is long enough to fill a line of its own, and then some"


@pytest.fixture
def deep(volume: Path) -> Path:
    """An orphan's origin that is longer than a line, and another one's that is not."""
    deep = volume / "/".join(["long-" * 20] * 2) / "the-end"
    deep.parent.mkdir(parents=True)
    swapped(make_tree(deep, {"file": "content"}), "--note", NOTE)
    return deep


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("command", ["list", "du"])
@pytest.mark.parametrize("columns", [60, 80, 132])
def test_no_line_is_longer_than_the_terminal(volume: Path, command: str, columns: int) -> None:
    terminal = Terminal(command, "--volume", volume, COLUMNS=str(columns))
    assert terminal.end() == 0
    lines = [line for line in terminal.output.replace("\r", "").splitlines() if not line.startswith("trashd: ")]
    assert len(lines) > 1
    assert max(map(len, lines)) <= columns
    assert any(line.endswith("the-end") for line in lines)


def test_a_note_is_told_where_there_is_room(volume: Path, deep: Path) -> None:
    terminal = Terminal("list", "--volume", volume, COLUMNS="1000")
    assert terminal.end() == 0
    assert f"{deep}  # {NOTE}" in terminal.output


def test_a_pipe_gets_all_of_it(volume: Path, deep: Path) -> None:
    assert done_well("list", "--volume", volume).out.endswith(f"{deep}  # {NOTE}\n")
    assert str(deep) in done_well("du", "--volume", volume).out
