"""A mate who may rename another's directory and delete nothing in it: no command takes it for her folder."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.cli.main import run
from tests.support.group_members import FORGED, plant
from tests.support.make_trees import Dir, EntrySnapshot, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import (
    assert_silent,
    entries,
    folder_of,
    init_as_of_old,
    problems,
    reap_now,
    recover_all,
    restore,
    swap,
)
from tests.support.two_users_store import ALICE, BOB, alices_volume, orphan_of

pytestmark = pytest.mark.needs("root")

VOLUME = alices_volume

HEX = "0123456789ab"
LIKE_FOLDERS = [f"{ALICE}", f"{ALICE}.{HEX}"]
UNLIKE = ["junk", f"0{ALICE}", f"{ALICE}.{HEX[:-1]}", f"{ALICE}.{HEX}0", f"{ALICE}.{HEX.upper()}", f"{ALICE}.", "-1"]


@contextmanager
def nothing_changes(planted: Path) -> Iterator[None]:
    """In what was planted: no entry, no content, no mode, no time."""
    before: tuple[EntrySnapshot, ...] = snapshot(planted, with_times=True)
    yield
    assert snapshot(planted, with_times=True) == before
    assert (planted / "results/thesis.txt").exists()
    assert (planted / "orphans" / FORGED / "tree/results/thesis.txt").exists()


def list_and_tend(volume: Path) -> None:
    """What every command begins with."""
    recover_all(volume)
    assert entries(volume) == []


def reap_all(volume: Path) -> None:
    assert run(["reap", "--volume", str(volume)]) == 0
    run(["reap", "--all", "--now", "--volume", str(volume)])


def repair(volume: Path) -> None:
    run(["doctor", "--repair", str(volume)])


def take_over(volume: Path) -> None:
    run(["init", "--replace", str(volume)])


def restore_it(volume: Path) -> None:
    """By its id, which may be known."""
    assert run(["restore", FORGED, "--volume", str(volume)]) == 5


HERS: list[Callable[[Path], object]] = [list_and_tend, reap_all, repair, restore_it, problems]
ACTS = [*HERS, take_over]


@pytest.mark.parametrize(("uid", "act"), [(0, act) for act in ACTS] + [(ALICE, act) for act in HERS])
@pytest.mark.parametrize("name", LIKE_FOLDERS)
def test_no_command_touches_a_planted_folder(volume: Path, name: str, uid: int, act: Callable[[Path], object]) -> None:
    planted = plant(volume, BOB, ALICE, name)
    with nothing_changes(planted):
        act(volume) if uid == 0 else as_user(uid, lambda: act(volume))


@pytest.mark.parametrize("name", UNLIKE)
def test_what_has_no_users_name_is_nobodys_folder(volume: Path, name: str) -> None:
    planted = plant(volume, BOB, ALICE, name)
    with nothing_changes(planted):
        for act in ACTS:
            act(volume)
    assert_silent(volume)


@pytest.mark.parametrize("name", LIKE_FOLDERS)
def test_its_user_works_in_one_folder_of_her_own_beside_a_planted_one(volume: Path, name: str) -> None:
    planted = plant(volume, BOB, ALICE, name)
    with nothing_changes(planted):
        first = orphan_of(volume, ALICE)
        as_user(ALICE, lambda: restore(volume, first))
        shutil.rmtree(volume / "alice/job")
        second = orphan_of(volume, ALICE)
        assert [entry.id for entry in entries(volume)] == [second]
        assert reap_now(volume, second).lost is None
    folders = [path.name for path in folder_of(volume, ALICE).parent.glob(f"{ALICE}*")]
    assert len(folders) == 2, folders


@pytest.mark.parametrize("name", LIKE_FOLDERS)
def test_a_planted_folder_is_told_with_its_reason_and_no_repair(
    volume: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plant(volume, BOB, ALICE, name)
    for uid in (0, ALICE):
        for command in (["list", "--volume", str(volume)], ["doctor", str(volume)], ["init", str(volume)]):
            if uid == 0 or command[0] != "init":
                as_user(uid, lambda command=command: run(command)) if uid else run(command)  # type: ignore[misc]
                output = "".join(capfd.readouterr())
                assert f"new/{name}: not used as uid {ALICE}'s directory: its mode is 2775 instead of 0700" in output
                assert "--repair" not in output
                assert "chmod" not in output
    [problem] = problems(volume)
    assert "mv" in problem.hint


@pytest.mark.parametrize("name", LIKE_FOLDERS)
def test_the_hands_that_he_kept_open_lead_to_nothing_of_hers(volume: Path, name: str) -> None:
    planted = plant(volume, BOB, ALICE, name)
    held = [os.open(planted / part, os.O_RDONLY) for part in (".", "orphans", "drop", "stage")]
    try:
        orphan_of(volume, ALICE)
        recover_all(volume)
        for fd in held:
            assert not any(b"-job-" in os.fsencode(name) for name in os.listdir(fd))
    finally:
        for fd in held:
            os.close(fd)


def test_after_root_took_over_a_store_no_directory_of_roots_is_his_folder() -> None:
    """Bob's own first swap makes the store; then Bob plants what is root's, and the administrator follows the hint."""
    with tmpfs_volume(options=("mode=1777",)) as volume:
        make_tree(volume / "bob", Dir(owner=(BOB, BOB)))

        def begin() -> None:
            make_tree(volume / "bob/job", {"a": "b"})
            init_as_of_old(volume)
            swap(volume / "bob/job")

        as_user(BOB, begin)
        plant(volume, BOB, 0, "0")
        take_over(volume)
        [planted] = volume.glob(".trashd/old-*/u/0")
        with nothing_changes(planted):
            for act in (take_over, list_and_tend_others, reap_all, repair):
                act(volume)
            make_tree(volume / "job", {"results": "root's"})
            identifier = swap(volume / "job").id
        [entry] = [entry for entry in entries(volume) if entry.id == identifier]
        assert b"/.trashd/u/0/" in entry.path
        [problem] = problems(volume)
        assert "/old-" in problem.where
        assert problem.where.endswith("u/0")


def list_and_tend_others(volume: Path) -> None:
    """Bob's commands and root's recover the volume; all that is listed is Bob's, though others have orphans."""
    as_user(BOB, lambda: recover_all(volume))
    recover_all(volume)
    assert {entry.uid for entry in entries(volume)} == {BOB}
