"""Two commands on one victim or one orphan: one stops at every call in turn, the other runs to its end meanwhile."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.crash_invariants import hold_when_stopped
from tests.support.crash_scenarios import (
    BROKEN,
    LOST,
    USER,
    WON,
    CrashScenario,
    VolumeContents,
    assert_nothing_lost,
    home,
    orphans,
    outcome,
    places,
    settle,
    settle_without_loss,
    user_folders,
)
from tests.support.make_trees import snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import full, tmpfs_volume
from tests.support.store_verbs import recover_all, swap, use
from tests.support.verb_scenarios import (
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

pytestmark = pytest.mark.needs("root")


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with tmpfs_volume("2m", ["nr_inodes=300"]) as path:
        yield path


def race(
    first: CrashScenario, second: CrashScenario, volume: Path, law: Callable[[VolumeContents, int, int], object]
) -> None:
    """The law gets the outcomes of both: the first was stopped before a call while the second ran."""
    hold_when_stopped(first, volume, lambda: outcome(lambda: second.act(volume, Kernel())), law)


ON_ONE_VICTIM = {
    "swap-swap": (SWAP, SWAP),
    "swap-rm": (SWAP, REMOVE),
    "rm-swap": (REMOVE, SWAP),
    "rm-rm": (REMOVE, REMOVE),
    "swap-swap-two-rename": (SWAP_TWICE, SWAP_TWICE),
}


@pytest.mark.parametrize("name", ON_ONE_VICTIM)
def test_one_victim_becomes_one_orphan_whoever_wins(volume: Path, name: str) -> None:
    def law(before: VolumeContents, *outcomes: int) -> None:
        assert WON in outcomes, outcomes
        assert BROKEN not in outcomes, outcomes
        settle(volume)
        [tree] = before.trees
        assert [snapshot(path) for path in orphans(volume)].count(tree) == 1, outcomes
        assert [snapshot(path) for path in places(volume)].count(tree) == 1, outcomes

    race(*ON_ONE_VICTIM[name], volume, law)


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

    def law(before: VolumeContents, *outcomes: int) -> None:
        assert sorted(outcomes) == [WON, LOST]
        settle(volume)
        winner = first if outcomes[0] == WON else second
        if winner.is_reap:
            assert snapshot(home(volume))[0] == before.head, outcomes
            assert orphans(volume) == [], outcomes
        else:
            assert_nothing_lost(first, volume, before)
            assert len(snapshot(home(volume))) > 1, outcomes

    race(first, second, volume, law)


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

    def law(before: VolumeContents, *outcomes: int) -> None:
        assert WON in outcomes, outcomes
        assert BROKEN not in outcomes, outcomes
        settle(volume)
        both = zip((first, second), outcomes, strict=True)
        gone = [scene for scene, code in both if code == WON and scene is not KEEP]
        assert len(orphans(volume)) == (0 if gone else 1), outcomes
        if not any(scene.is_reap for scene in gone):
            assert_nothing_lost(first, volume, before)

    race(first, second, volume, law)


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
    return sorted((volume / ".trashd").glob("[un]*/*/*/*/record.json"))


@pytest.mark.parametrize("name", LIVE)
def test_recovery_never_takes_what_a_living_command_holds(volume: Path, name: str) -> None:
    scene = LIVE[name]

    def recover() -> tuple[list[Path], list[str], list[Path]]:
        return containers(volume), recover_all(volume), containers(volume)

    def law(before: VolumeContents, code: int, found: tuple[list[Path], list[str], list[Path]]) -> None:
        held, told, left = found
        assert (told, code) == ([], WON)
        assert set(held) <= set(left)
        settle_without_loss(scene, volume, before)

    hold_when_stopped(scene, volume, recover, law)


def test_recovery_never_takes_the_reserve_that_a_living_swap_uses(volume: Path) -> None:
    scene = CrashScenario(make_victim, lambda where, kernel: swap(home(where), kernel), is_gapless=True)

    def law(before: VolumeContents, code: int, _told: list[str]) -> None:
        assert code == WON
        settle_without_loss(scene, volume, before)

    hold_when_stopped(scene, volume, lambda: recover_all(volume), law, within=full)


@pytest.mark.long
def test_two_first_commands_of_a_user_share_one_folder(volume: Path) -> None:
    scene = CrashScenario(make_victim, lambda where, kernel: swap(home(where), kernel), uid=USER, is_gapless=True)

    def law(before: VolumeContents, code: int, _none: None) -> None:
        assert code == WON
        assert sorted(path.name for path in user_folders(volume)) == ["0", str(USER)]
        settle_without_loss(scene, volume, before)

    hold_when_stopped(scene, volume, lambda: as_user(USER, lambda: use(volume)), law)
