"""`trashd list --sum-by`: what is held by user, project and age, from records alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fusefs.store.stage import SwapOptions
from tests.support.small_orphans import EXPIRED, OTHER, many_orphans, orphan_in, orphan_of
from tests.support.store_verbs import init
from tests.support.trashd_command import TRASHD, done_well, trashd

pytestmark = pytest.mark.needs("root")

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
    told = done_well("list", "--sum-by", "user", "--json", "--volume", held).objects()
    assert {(one["uid"], one["n_orphans"], one["n_due"]) for one in told} == {(0, 2, 1), (OTHER, 1, 0)}
    assert {one["sum_by"] for one in told} == {"user"}


def test_projects_are_told_by_where_orphans_came_from(held: Path) -> None:
    told = done_well("list", "--sum-by", "project", "--json", "--volume", held).objects()
    assert {one["project"] for one in told} == {f"{held}/p", f"{held}/q", f"{held}/home-{OTHER}"}
    deeper = done_well("list", "--sum-by", "project", "--depth", "2", "--json", "--volume", held).objects()
    assert f"{held}/p/one" in {one["project"] for one in deeper}


def test_ages_are_told_by_brackets(held: Path) -> None:
    (told,) = done_well("list", "--sum-by", "age", "--json", "--volume", held).objects()
    assert (told["from_s"], told["under_s"], told["n_orphans"]) == (0, 3600, 3)
    head, line = done_well("list", "--sum-by", "age", "--volume", held).out.splitlines()
    assert (head.split()[-1], line.split()[0], line.endswith("to 1h")) == ("AGE", "3", True)


def test_what_was_counted_is_in_the_sum(held: Path) -> None:
    counted = done_well("du", "--json", "--user", "root", "--volume", held).objects()
    (told,) = done_well("list", "--sum-by", "user", "--user", "root", "--json", "--volume", held).objects()
    assert told["n_bytes"] == sum(int(one["n_bytes"]) for one in counted)
    assert (told["n_unknown"], told["is_at_least"]) == (0, False)


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
    command = [TRASHD, "list", "--sum-by", "user", "--volume", str(volume)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as summed:
        _pid, status, usage = os.wait4(summed.pid, 0)
        summed.returncode = status
    assert status == 0
    return usage.ru_maxrss


def test_memory_goes_with_the_sums_and_not_with_the_orphans(volume: Path) -> None:
    init(volume)
    many_orphans(volume, N_FEW)
    few = peak_kib(volume)
    many_orphans(volume, N_MANY)
    assert peak_kib(volume) - few < GROWTH_MAX_KIB
