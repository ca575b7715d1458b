"""`swap --keep`, its restore and their recovery, killed or failing at any call: all of it or nothing, and no loss."""

import errno
import os
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.stage import SwapOptions
from tests.support.crash_invariants import hold_when_failing, hold_when_killed, spread
from tests.support.crash_scenarios import (
    USER,
    CrashScenario,
    VolumeContents,
    assert_nothing_half_done,
    home,
    orphans,
    settle,
)
from tests.support.real_filesystems import loop_volume
from tests.support.store_verbs import swap
from tests.support.verb_scenarios import LATE, killed_after, make_read_only, make_victim, recover, restore_it

pytestmark = pytest.mark.needs("root")

KEEP = SwapOptions(keep=("a", "sub"))
Contents = dict[str, bytes | None]
Look = tuple[Contents, tuple[Contents, ...]]
"""What is at the name, and in each orphan."""

WHOLE: Contents = {"a": b"first", "empty": None, "sub": None, "sub/leaf": b"second", "sub/b": b"third"}
KEPT: Contents = {"a": b"first", "sub": None, "sub/leaf": b"second", "sub/b": b"third"}
REST: Contents = {"a": b"first", "empty": None}
HOME: Look = (WHOLE, ())
SWAPPED: Look = (KEPT, (REST,))
WRITTEN: Look = ({**KEPT, "late": LATE}, (REST,))
RESCUED: Look = (WHOLE, ({"late": LATE},))


def contents(path: Path) -> Contents:
    return {str(one.relative_to(path)): None if one.is_dir() else one.read_bytes() for one in sorted(path.rglob("*"))}


def look(volume: Path) -> Look:
    trees = orphans(volume)
    for tree in trees:
        if (tree / "a").exists() and (home(volume) / "a").exists():
            assert (tree / "a").samefile(home(volume) / "a")
            assert (tree / "a").stat().st_nlink == 2
    return contents(home(volume)), tuple(contents(tree) for tree in trees)


def keep(volume: Path, kernel: Kernel) -> object:
    return swap(home(volume), kernel, KEEP)


def keep_for_owner(volume: Path, kernel: Kernel) -> object:
    return swap_for_owner(kernel, os.fsencode(home(volume)), KEEP)


def make_orphan(volume: Path) -> None:
    make_victim(volume)
    keep(volume, Kernel())


def make_read_only_orphan(volume: Path) -> None:
    make_read_only(volume)
    keep(volume, Kernel())


def write_late(volume: Path) -> None:
    make_orphan(volume)
    (home(volume) / "late").write_bytes(LATE)


SCENES: dict[str, tuple[CrashScenario, tuple[Look, ...]]] = {
    "swap": (CrashScenario(make_victim, keep, is_gapless=True), (HOME, SWAPPED)),
    "swap-lent": (CrashScenario(make_read_only, keep, uid=USER, is_gapless=True), (HOME, SWAPPED)),
    "swap-two-rename": (CrashScenario(make_victim, keep, exchange=False), (HOME, SWAPPED)),
    "swap-two-rename-lent": (CrashScenario(make_read_only, keep, uid=USER, exchange=False), (HOME, SWAPPED)),
    "swap-for-owner": (CrashScenario(make_read_only, keep_for_owner, uid=USER, by=0, is_gapless=True), (HOME, SWAPPED)),
    "swap-for-owner-two-rename": (
        CrashScenario(make_read_only, keep_for_owner, uid=USER, by=0, exchange=False),
        (HOME, SWAPPED),
    ),
    "restore": (CrashScenario(make_orphan, restore_it, is_gapless=True), (SWAPPED, HOME)),
    "restore-late": (CrashScenario(write_late, restore_it, is_gapless=True), (WRITTEN, RESCUED)),
    "restore-lent": (CrashScenario(make_read_only_orphan, restore_it, uid=USER, is_gapless=True), (SWAPPED, HOME)),
    "restore-two-rename": (CrashScenario(write_late, restore_it, exchange=False), (WRITTEN, RESCUED)),
    "recover-staged": (CrashScenario(killed_after(make_victim, keep, "link", 2), recover, is_gapless=True), (HOME,)),
    "recover-swap": (CrashScenario(killed_after(make_victim, keep, "exchange"), recover, is_gapless=True), (SWAPPED,)),
    "recover-gap": (CrashScenario(killed_after(make_victim, keep, "rename"), recover, exchange=False), (SWAPPED,)),
    "recover-restore": (
        CrashScenario(killed_after(write_late, restore_it, "exchange"), recover, is_gapless=True),
        (RESCUED,),
    ),
}
FAULTS = spread(
    [
        ("swap", errno.EIO), ("swap", errno.ENOSPC), ("swap-lent", errno.EACCES), ("swap-two-rename", errno.EIO),
        ("restore-late", errno.EIO), ("restore-two-rename", errno.ENOSPC), ("recover-swap", errno.EIO),
    ]
)  # fmt: skip


def assert_kept(scene: CrashScenario, volume: Path) -> None:
    """The file is in view at every moment at which the name resolves; without a gap it always does."""
    if scene.is_gapless or home(volume).exists():
        assert (home(volume) / "a").read_bytes() == b"first"


def all_or_nothing(name: str, volume: Path, _before: VolumeContents) -> None:
    scene, allowed = SCENES[name]
    assert_kept(scene, volume)
    settle(volume)
    assert look(volume) in allowed
    mode = home(volume).stat().st_mode
    assert all(tree.stat().st_mode == mode for tree in orphans(volume))


@pytest.mark.parametrize("name", SCENES)
def test_a_kill_before_any_call_keeps_all_or_undoes_all(volume: Path, name: str) -> None:
    hold_when_killed(SCENES[name][0], volume, partial(all_or_nothing, name, volume))


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", ["swap", "restore-late"])
def test_a_kill_before_any_call_keeps_all_or_undoes_all_on_ext4(name: str) -> None:
    with loop_volume("ext4", 16) as ext4:
        hold_when_killed(SCENES[name][0], ext4, partial(all_or_nothing, name, ext4))


@pytest.mark.parametrize(("name", "number"), FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_nothing_is_lost_when_any_call_fails(volume: Path, name: str, number: int) -> None:
    scene, _allowed = SCENES[name]

    def law(_before: VolumeContents) -> None:
        assert_kept(scene, volume)
        settle(volume)
        assert_nothing_lost(look(volume))

    hold_when_failing(scene, volume, number, law, FAULTS[name, number])


def assert_nothing_lost(found: Look) -> None:
    """Each content is somewhere; nothing but the linked file is twice; what is kept is in view, or said to be not."""
    at_home, stored = found
    for path, content in WHOLE.items():
        places = [one for one in (at_home, *stored) if path in one]
        assert all(one[path] == content for one in places)
        assert 1 <= len(places) <= (2 if path == "a" else 1), path
    assert "a" in at_home


def test_kill_leaves_nothing_in_the_store_that_nobody_asked_for(volume: Path) -> None:
    scene, _allowed = SCENES["recover-staged"]
    scene.set_up(volume)
    settle(volume)
    assert_nothing_half_done(volume)
    assert (home(volume) / "a").stat().st_nlink == 1
