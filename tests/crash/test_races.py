"""Two commands on one victim or one orphan: one stops at every call in turn, the other runs to its end meanwhile."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.acts import (
    ADOPT,
    KEEP,
    REAP,
    REMOVE,
    RESTORE,
    RESTORE_LATE,
    RESTORE_TWICE,
    SWAP,
    SWAP_TWICE,
    make_victim,
)
from tests.support.scenes import (
    BROKEN,
    LOST,
    USER,
    WON,
    Before,
    Scene,
    assert_nothing_lost,
    home,
    orphans,
    outcome,
    places,
    settle,
    stop_at,
)
from tests.support.store import own, recover_all, swap
from tests.support.tree import snapshot
from tests.support.users import as_user
from tests.support.volumes import full, tmpfs_volume

pytestmark = pytest.mark.needs("root")


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with tmpfs_volume("2m", ["nr_inodes=300"]) as path:
        yield path


def races(first: Scene, second: Scene, volume: Path) -> Iterator[tuple[int, Before, int, int]]:
    """The outcomes of both, the first stopped before its n-th call while the second ran, for every n."""
    for n in itertools.count():
        before = first.set_up(volume)
        stopped = stop_at(first, volume, n)
        is_stopped = stopped.is_stopped()
        try:
            of_second = outcome(lambda: second.act(volume, Kernel()))
        finally:
            of_first = stopped.go_on()
        yield n, before, of_first, of_second
        if not is_stopped:
            return


ON_ONE_VICTIM = {
    "swap-swap": (SWAP, SWAP),
    "swap-rm": (SWAP, REMOVE),
    "rm-swap": (REMOVE, SWAP),
    "rm-rm": (REMOVE, REMOVE),
    "swap-swap-two-rename": (SWAP_TWICE, SWAP_TWICE),
}


@pytest.mark.parametrize("name", ON_ONE_VICTIM)
def test_one_victim_becomes_one_orphan_whoever_wins(volume: Path, name: str) -> None:
    first, second = ON_ONE_VICTIM[name]
    for n, before, of_first, of_second in races(first, second, volume):
        told = f"stopped before call {n}: {of_first}, {of_second}"
        assert WON in (of_first, of_second), told
        assert BROKEN not in (of_first, of_second), told
        settle(volume)
        [tree] = before.trees
        assert [snapshot(path) for path in orphans(volume)].count(tree) == 1, told
        assert [snapshot(path) for path in places(volume)].count(tree) == 1, told


ON_ONE_ORPHAN = {
    "restore-restore": (RESTORE, RESTORE),
    "restore-restore-late": (RESTORE_LATE, RESTORE_LATE),
    "restore-restore-two-rename": (RESTORE_TWICE, RESTORE_TWICE),
    "restore-reap": (RESTORE, REAP),
    "reap-restore": (REAP, RESTORE),
    "reap-reap": (REAP, REAP),
}


@pytest.mark.parametrize("name", ON_ONE_ORPHAN)
def test_exactly_one_command_gets_an_orphan(volume: Path, name: str) -> None:
    first, second = ON_ONE_ORPHAN[name]
    for n, before, of_first, of_second in races(first, second, volume):
        told = f"stopped before call {n}: {of_first}, {of_second}"
        assert sorted((of_first, of_second)) == [WON, LOST], told
        settle(volume)
        winner = first if of_first == WON else second
        if winner.is_reap:
            assert snapshot(home(volume))[0] == before.head, told
            assert orphans(volume) == [], told
        else:
            assert_nothing_lost(first, volume, before)
            assert len(snapshot(home(volume))) > 1, told


BESIDE_A_KEEP = {
    "keep-reap": (KEEP, REAP),
    "reap-keep": (REAP, KEEP),
    "keep-restore": (KEEP, RESTORE),
    "restore-keep": (RESTORE, KEEP),
    "keep-keep": (KEEP, KEEP),
}


@pytest.mark.parametrize("name", BESIDE_A_KEEP)
def test_orphan_is_kept_or_goes_and_nobody_meets_half_of_it(volume: Path, name: str) -> None:
    first, second = BESIDE_A_KEEP[name]
    for n, before, of_first, of_second in races(first, second, volume):
        told = f"stopped before call {n}: {of_first}, {of_second}"
        assert WON in (of_first, of_second), told
        assert BROKEN not in (of_first, of_second), told
        settle(volume)
        gone = [scene for scene, code in ((first, of_first), (second, of_second)) if code == WON and scene is not KEEP]
        assert len(orphans(volume)) == (0 if gone else 1), told
        if not any(scene.is_reap for scene in gone):
            assert_nothing_lost(first, volume, before)


LIVE = {
    "swap": SWAP,
    "swap-two-rename": SWAP_TWICE,
    "rm": REMOVE,
    "restore-late": RESTORE_LATE,
    "restore-two-rename": RESTORE_TWICE,
    "keep": KEEP,
    "reap": REAP,
    "adopt": ADOPT,
}


def containers(volume: Path) -> list[Path]:
    """What has a record, wherever it is; what recovery must leave where a living command has it."""
    return sorted((volume / ".trashd" / "u").glob("*/*/*/record.json"))


@pytest.mark.parametrize("name", LIVE)
def test_recovery_never_takes_what_a_living_command_holds(volume: Path, name: str) -> None:
    scene = LIVE[name]
    for n in itertools.count():
        before = scene.set_up(volume)
        stopped = stop_at(scene, volume, n)
        is_stopped = stopped.is_stopped()
        try:
            held = containers(volume)
            told = recover_all(volume)
            left = containers(volume)
        finally:
            code = stopped.go_on()
        assert told == []
        assert set(held) <= set(left), f"stopped before call {n}"
        assert code == WON, f"stopped before call {n}"
        settle(volume)
        assert_nothing_lost(scene, volume, before)
        if not is_stopped:
            return


def test_recovery_never_takes_the_reserve_that_a_living_swap_uses(volume: Path) -> None:
    scene = Scene(make_victim, lambda where, kernel: swap(home(where), kernel), is_gapless=True)
    for n in itertools.count():
        before = scene.set_up(volume)
        with full(volume):
            stopped = stop_at(scene, volume, n)
            is_stopped = stopped.is_stopped()
            try:
                recover_all(volume)
            finally:
                code = stopped.go_on()
            assert code == WON, f"stopped before call {n}"
        settle(volume)
        assert_nothing_lost(scene, volume, before)
        if not is_stopped:
            return


def use(volume: Path) -> None:
    """Any command of the caller: his folder is found, or made."""
    with own(volume):
        pass


def test_two_first_commands_of_a_user_share_one_folder(volume: Path) -> None:
    scene = Scene(make_victim, lambda where, kernel: swap(home(where), kernel), uid=USER, is_gapless=True)
    for n in itertools.count():
        before = scene.set_up(volume)
        stopped = stop_at(scene, volume, n)
        is_stopped = stopped.is_stopped()
        try:
            as_user(USER, lambda: use(volume))
        finally:
            code = stopped.go_on()
        assert code == WON, f"stopped before call {n}"
        assert sorted(os.listdir(volume / ".trashd" / "u")) == ["0", str(USER)], f"stopped before call {n}"
        settle(volume)
        assert_nothing_lost(scene, volume, before)
        if not is_stopped:
            return
