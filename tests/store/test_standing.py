"""A user's folder: what counts as one, and what a look at thousands of planted names costs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fusefs.core.names import whose
from fusefs.store.standing import open_user
from tests.support.acls import ACCESS, DEFAULT, acl
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount
from tests.support.store_verbs import (
    assert_silent,
    entries,
    folder_of,
    opened,
    problems,
    recover_all,
)
from tests.support.two_users_store import ALICE, BOB, OPEN_TO_BOB, PARTS, alices_volume, folders, make, throw

pytestmark = pytest.mark.needs("root")

VOLUME = alices_volume


# What counts


@pytest.mark.parametrize("name", [b"0", b"1001", b"4294967294", b"1001.0123456789ab", b"0.ffffffffffff"])
def test_names_of_folders(name: bytes) -> None:
    assert whose(name) == int(name.partition(b".")[0])


@pytest.mark.parametrize(
    "name",
    [
        *(
            b"",
            b".",
            b"01",
            b"00",
            b"+1",
            b"-1",
            b" 1",
            b"1 ",
            b"1_0",
            "\u0661".encode(),
            b"4294967295",
            b"99999999999",
        ),
        *(b"1001.", b"1001.0123456789a", b"1001.0123456789abc", b"1001.0123456789aB", b"1001.0123456789ab.planted"),
        *(b"1001.0123456789a.", b".new-1001.0123456789ab", b"1001.0123456789ag", b"1" * 5000),
    ],
)
def test_other_names(name: bytes) -> None:
    assert whose(name) is None


INEXACT = [0o000, 0o500, 0o600, 0o701, 0o710, 0o750, 0o755, 0o770, 0o777, 0o1700, 0o2700, 0o4700, 0o2775]


@pytest.mark.parametrize("mode", INEXACT)
@pytest.mark.parametrize("part", ["", "orphans", "drop", "reserve"])
def test_what_is_not_exactly_0700_is_no_folder_and_stays_so(volume: Path, part: str, mode: int) -> None:
    planted = as_user(ALICE, lambda: throw(volume))
    (planted / part).chmod(mode)
    before = snapshot(planted, with_times=True)
    with opened(volume) as store:
        assert open_user(store, ALICE) is None
    other = as_user(ALICE, lambda: throw(volume))
    assert whose(os.fsencode(other.name)) == ALICE
    assert other != planted
    assert as_user(ALICE, lambda: throw(volume)) == other
    recover_all(volume)
    [problem] = problems(volume)
    assert f"its mode is {mode:04o} instead of 0700" in problem.what
    assert snapshot(planted, with_times=True) == before


@pytest.mark.parametrize("part", ["", "stage", "quarantine", "pointers"])
def test_what_another_owns_is_no_folder(volume: Path, part: str) -> None:
    planted = as_user(ALICE, lambda: throw(volume))
    os.chown(planted / part, BOB, BOB)
    assert as_user(ALICE, lambda: throw(volume)) != planted
    [problem] = problems(volume)
    assert "belongs to uid 1002" in problem.what


@pytest.mark.parametrize("part", ["", "orphans", "reserve"])
def test_what_an_acl_opens_to_others_is_no_folder(volume: Path, part: str) -> None:
    planted = as_user(ALICE, lambda: throw(volume))
    os.setxattr(planted / part, ACCESS, acl(*OPEN_TO_BOB))
    assert as_user(ALICE, lambda: throw(volume)) != planted
    assert len(problems(volume)) == 1


def test_an_acl_whose_mask_is_empty_opens_nothing(volume: Path) -> None:
    folder = as_user(ALICE, lambda: throw(volume))
    os.setxattr(folder, ACCESS, acl(*OPEN_TO_BOB))
    folder.chmod(0o700)
    with pytest.raises(PermissionError):
        as_user(BOB, lambda: os.listdir(folder))
    assert as_user(ALICE, lambda: throw(volume)) == folder
    assert_silent(volume)


def test_a_default_acl_opens_nothing_of_what_is_made_in_a_folder(volume: Path) -> None:
    folder = as_user(ALICE, lambda: throw(volume))
    for part in ("", *PARTS):
        os.setxattr(folder / part, DEFAULT, acl(*OPEN_TO_BOB))
    assert as_user(ALICE, lambda: throw(volume)) == folder
    for path in (folder / "orphans").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert_silent(volume)


@pytest.mark.parametrize("part", ["", "orphans"])
def test_what_is_mounted_over_is_no_folder(volume: Path, part: str) -> None:
    planted = as_user(ALICE, lambda: throw(volume))
    make_tree(volume / "over", Dir(mode=0o700, owner=(ALICE, ALICE)))
    with bind_mount(volume / "over", planted / part):
        assert as_user(ALICE, lambda: throw(volume)) != planted
        [problem] = problems(volume)
        assert "mounted over" in problem.what


def test_of_two_folders_the_plain_one_is_used_and_the_other_told(volume: Path) -> None:
    planted = as_user(ALICE, lambda: throw(volume))
    planted.chmod(0o750)
    other = as_user(ALICE, lambda: throw(volume))
    planted.chmod(0o700)
    assert as_user(ALICE, lambda: throw(volume)) == planted
    assert {os.fsdecode(entry.path).split("/")[-3] for entry in entries(volume)} == {planted.name}
    [problem] = problems(volume)
    assert problem.where == str(other)
    assert f"new/{ALICE} is used" in problem.what


# What a look costs


def plant_many(volume: Path, n_names: int) -> None:
    """Names like folders, all of one user's making."""

    def act() -> None:
        users = volume / ".trashd/new"
        (users / "file").touch()
        for n in range(n_names // 5):
            (users / f"{20_000 + n}").mkdir()
            (users / f"{BOB}.{n:012x}").mkdir()
            (users / f"{ALICE}.{n:012x}").mkdir(0o700)
            os.link(users / "file", users / f"{70_000 + n}")
            (users / f"{90_000 + n}").symlink_to("0")

    as_user(BOB, act)


def test_thousands_of_planted_names_are_told_in_a_few_lines(volume: Path) -> None:
    plant_many(volume, 500)
    told = problems(volume)
    assert len(told) == 4
    assert "more names of uid 1002" in told[-1].what


def test_a_look_of_roots_makes_nothing_in_a_folder_that_nobody_used(volume: Path) -> None:
    as_user(ALICE, lambda: folder_of(volume, ALICE).mkdir(0o700))
    recover_all(volume)
    entries(volume)
    assert_silent(volume)
    assert os.listdir(folder_of(volume, ALICE)) == []
    as_user(ALICE, lambda: throw(volume))
    assert folders(volume) == [str(ALICE)]


def test_a_look_of_roots_fills_no_reserve_of_a_folder_that_nobody_used(volume: Path) -> None:
    as_user(ALICE, lambda: make(volume))
    recover_all(volume)
    assert_silent(volume)
    assert os.listdir(folder_of(volume, ALICE) / "reserve") == []
