"""Killed before any system call of any verb: what the next command recovers has lost nothing."""

import os
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.names import whose
from tests.support.crash_invariants import hold_when_killed, hold_when_killed_twice
from tests.support.crash_scenarios import HOME, VolumeContents, home, settle_without_loss
from tests.support.other_users import as_user
from tests.support.real_filesystems import loop_volume
from tests.support.store_verbs import use
from tests.support.verb_scenarios import CHECKS, SCENES

pytestmark = pytest.mark.needs("root")

TWICE = [
    "swap",
    "swap-two-rename",
    "swap-lent",
    "restore-late",
    "restore-two-rename-late",
    "restore-parts",
    "restore-two-rename-parts",
    "restore-late-lent",
    "reap",
]


@pytest.mark.parametrize("name", SCENES)
def test_nothing_is_lost_by_a_kill_before_any_call(volume: Path, name: str) -> None:
    hold_when_killed(SCENES[name], volume, partial(settle_without_loss, SCENES[name], volume))


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", ["swap", "restore-late", "restore-parts", "swap-two-rename-lent"])
def test_nothing_is_lost_by_a_kill_before_any_call_on_ext4(name: str) -> None:
    with loop_volume("ext4", 16) as ext4:
        hold_when_killed(SCENES[name], ext4, partial(settle_without_loss, SCENES[name], ext4))


@pytest.mark.parametrize("name", TWICE)
def test_nothing_is_lost_by_a_second_kill_in_recovery(volume: Path, name: str) -> None:
    hold_when_killed_twice(SCENES[name], volume, partial(settle_without_loss, SCENES[name], volume))


@pytest.mark.parametrize("name", CHECKS)
def test_nothing_is_left_of_a_check_killed_before_any_call(volume: Path, name: str) -> None:
    def law(before: VolumeContents) -> None:
        as_user(CHECKS[name].uid, partial(use, volume))
        settle_without_loss(CHECKS[name], volume, before)
        assert list((volume / HOME).iterdir()) == [home(volume)]
        areas = (volume / ".trashd").glob("[un]*")
        assert not [path for area in areas for path in area.iterdir() if whose(os.fsencode(path.name)) is None]

    hold_when_killed(CHECKS[name], volume, law)


@pytest.mark.parametrize("name", ["restore-parts", "restore-two-rename-parts", "restore-parts-by-root"])
def test_a_tree_that_is_back_has_the_parts_that_were_restored_before(volume: Path, name: str) -> None:
    def law(before: VolumeContents) -> None:
        settle_without_loss(SCENES[name], volume, before)
        if (home(volume) / "sub/b").exists():
            seen = {path: (home(volume) / path).read_bytes() for path in ("a", "sub/leaf", "sub/b")}
            assert seen == {"a": b"first", "sub/leaf": b"changed since", "sub/b": b"third"}
            assert not (home(volume) / "sub/late").exists()

    hold_when_killed(SCENES[name], volume, law)
