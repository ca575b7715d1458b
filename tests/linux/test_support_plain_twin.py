"""The oracle of the hostile tests sees what it is for: what is gone, out of reach or readable and was never so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hostile_steps import ALICE, BOB, CAROL, LIVE, TEAM, team
from tests.support.plain_twin import Exchange, Twins, contents, could_delete
from tests.support.real_filesystems import tmpfs_volume

pytestmark = pytest.mark.needs("root")

HER_OWN = "content of live/results/thesis"
ANY_MATES = "content of live/draft"


@pytest.fixture
def twins() -> Iterator[Twins]:
    with tmpfs_volume() as first, tmpfs_volume() as plain, team(first, plain, BOB) as both:
        yield both


def test_nothing_is_a_fault_where_nothing_happened(twins: Twins) -> None:
    assert twins.faults(contents(twins.first)) == []


def test_what_is_gone_is_a_fault_unless_who_is_up_to_something_could_delete_it(twins: Twins) -> None:
    before = contents(twins.first)
    shutil.rmtree(twins.first.at(LIVE))
    assert f"gone: {HER_OWN}" in twins.faults(before)
    assert f"gone: {ANY_MATES}" not in twins.faults(before)


def test_what_its_owner_gave_away_may_go_until_it_is_back(twins: Twins) -> None:
    before = contents(twins.first)
    twins.give(ALICE, LIVE, 1, is_swap=False)
    shutil.copytree(twins.first.at(LIVE), twins.first.at("srv/back"))
    shutil.rmtree(twins.first.at(LIVE))
    assert not [fault for fault in twins.faults(before) if fault.startswith("gone")]
    twins.keep_from_now("srv/back")
    shutil.rmtree(twins.first.at("srv/back"))
    assert f"gone: {HER_OWN}" in twins.faults(before)


def test_what_somebody_reads_who_never_could_is_a_fault(twins: Twins) -> None:
    twins.first.at("team").chmod(0o2770)
    twins.first.at("srv/secret").chmod(0o604)
    assert twins.faults(contents(twins.first)) == [
        f"{name} reads: content of srv/secret" for name in ("alice", "bob", "carol")
    ]


def test_what_its_owner_gets_no_more_is_a_fault(twins: Twins) -> None:
    twins.first.at(LIVE).rename(twins.first.at("srv/live"))
    twins.first.at("srv").chmod(0o700)
    assert f"out of the reach of alice: {HER_OWN}" in twins.faults(contents(twins.first))


def test_the_plain_ones_people_do_only_what_the_kernel_lets_them(twins: Twins) -> None:
    before = contents(twins.plain)
    twins.give(CAROL, LIVE, 1, is_swap=True)
    twins.act(twins.plain, [lambda side: shutil.rmtree(side.at(LIVE), ignore_errors=True)])
    assert before.keys() - contents(twins.plain).keys() <= twins.may_go
    assert HER_OWN in contents(twins.plain)


def test_what_is_done_again_undoes_no_exchange_but_does_one_that_failed(twins: Twins) -> None:
    made, failing = Exchange(f"{LIVE}/open", f"{LIVE}/results"), Exchange(f"{LIVE}/open", f"{LIVE}/nothing")
    assert twins.act(twins.plain, [made, failing]) == [failing]
    assert twins.plain.at(f"{LIVE}/open/thesis").exists()


def test_who_could_delete_what_is_what_the_kernel_says(tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents):
        path.chmod(path.stat().st_mode | 0o111)
    for owner, group, mode, may in (
        (ALICE.uid, TEAM, 0o2775, True), (ALICE.uid, TEAM, 0o755, False), (ALICE.uid, TEAM, 0o3775, False),
        (BOB.uid, 0, 0o000, True), (ALICE.uid, 0, 0o777, True), (ALICE.uid, TEAM, 0o707, False),
    ):  # fmt: skip
        directory = tmp_path / f"{owner}-{group}-{mode:o}"
        directory.mkdir()
        (directory / "file").write_text("content of file")
        os.chown(directory, owner, group)
        directory.chmod(mode)
        assert (could_delete(BOB, directory) == {"content of file"}) is may, directory
