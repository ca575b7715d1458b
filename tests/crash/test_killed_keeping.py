"""`swap --keep` and a sweep's trash action, killed or failing at any call: all or nothing, and each file is once."""

import errno
import os
from collections import Counter
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.stage import SwapOptions
from tests.support.crash_invariants import (
    hold_when_failing,
    hold_when_killed,
    hold_when_killed_twice,
    hold_when_stopped,
    spread,
)
from tests.support.crash_scenarios import (
    LOST,
    USER,
    WON,
    Act,
    CrashScenario,
    Prepare,
    VolumeContents,
    assert_nothing_half_done,
    changing,
    home,
    orphans,
    outcome,
    read_contents,
    settle,
    settle_without_loss,
)
from tests.support.real_filesystems import loop_volume
from tests.support.store_verbs import recover_all, swap
from tests.support.trash_without_walk import gather
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


def look_at_both(volume: Path) -> Look:
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


KEEPING: dict[str, tuple[CrashScenario, tuple[Look, ...]]] = {
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
KEEPING_FAULTS = spread(
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
    scene, allowed = KEEPING[name]
    assert_kept(scene, volume)
    settle(volume)
    assert look_at_both(volume) in allowed
    mode = home(volume).stat().st_mode
    assert all(tree.stat().st_mode == mode for tree in orphans(volume))


@pytest.mark.parametrize("name", KEEPING)
def test_a_kill_before_any_call_keeps_all_or_undoes_all(volume: Path, name: str) -> None:
    hold_when_killed(KEEPING[name][0], volume, partial(all_or_nothing, name, volume))


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", ["swap", "restore-late"])
def test_a_kill_before_any_call_keeps_all_or_undoes_all_on_ext4(name: str) -> None:
    with loop_volume("ext4", 16) as ext4:
        hold_when_killed(KEEPING[name][0], ext4, partial(all_or_nothing, name, ext4))


@pytest.mark.parametrize(("name", "number"), KEEPING_FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_nothing_is_lost_when_any_call_fails(volume: Path, name: str, number: int) -> None:
    scene, _allowed = KEEPING[name]

    def law(_before: VolumeContents) -> None:
        assert_kept(scene, volume)
        settle(volume)
        assert_nothing_lost(look_at_both(volume))

    hold_when_failing(scene, volume, number, law, KEEPING_FAULTS[name, number])


def assert_nothing_lost(found: Look) -> None:
    """Each content is somewhere; nothing but the linked file is twice; what is kept is in view, or said to be not."""
    at_home, stored = found
    for path, content in WHOLE.items():
        places = [one for one in (at_home, *stored) if path in one]
        assert all(one[path] == content for one in places)
        assert 1 <= len(places) <= (2 if path == "a" else 1), path
    assert "a" in at_home


def test_kill_leaves_nothing_in_the_store_that_nobody_asked_for(volume: Path) -> None:
    scene, _allowed = KEEPING["recover-staged"]
    scene.set_up(volume)
    settle(volume)
    assert_nothing_half_done(volume)
    assert (home(volume) / "a").stat().st_nlink == 1


NEW = b"new"
CONTENT = sha256(NEW).hexdigest()
SOME = ("a", "sub/leaf", "empty")
ALL = ("a", "empty", "sub/leaf", "sub")
"""The last one was made in the orphan before: what is in it joins that."""


def _sweep(volume: Path, kernel: Kernel, names: tuple[str, ...] = SOME) -> object:
    return gather(home(volume), names, kernel)


def sweep_some(volume: Path) -> None:
    make_victim(volume)
    gather(home(volume), SOME)


def write_over(volume: Path) -> None:
    """Swept, and something else has one of the names."""
    sweep_some(volume)
    (home(volume) / "sub/leaf").write_bytes(LATE)


def remove_inside(volume: Path) -> None:
    """Swept whole, and a directory of it is gone, as cleaners do."""
    make_victim(volume)
    gather(home(volume), ("a", "sub/leaf", "sub/b"))
    (home(volume) / "sub").rmdir()


def remove_it(volume: Path) -> None:
    """Swept whole, and the directory itself is gone."""
    make_victim(volume)
    gather(home(volume), ALL)
    home(volume).rmdir()


def scene(prepare: Prepare, act: Act, uid: int = 0, by: int | None = None, *, is_gapless: bool = True) -> CrashScenario:
    return CrashScenario(prepare, act, uid=uid, by=by, is_gapless=is_gapless, is_split=True)


SWEEPING = {
    "sweep": scene(make_victim, _sweep),
    "sweep-all": scene(make_victim, partial(_sweep, names=ALL)),
    "sweep-nothing": scene(make_victim, partial(_sweep, names=("nothing", "sub/nothing"))),
    "sweep-user": scene(make_victim, _sweep, USER),
    "merge": scene(sweep_some, restore_it),
    "merge-taken": scene(write_over, restore_it),
    "merge-missing": scene(remove_inside, restore_it),
    "merge-whole": scene(remove_it, restore_it, is_gapless=False),
    "merge-inside": scene(remove_inside, partial(restore_it, inside=b"sub/leaf")),
    "merge-to": scene(sweep_some, partial(restore_it, to="elsewhere")),
    "merge-user": scene(write_over, restore_it, USER),
    "merge-by-root": scene(write_over, restore_it, USER, 0),
    "recover-sweep": scene(killed_after(make_victim, _sweep, "renameat2", 2), recover),
    "recover-merge": scene(killed_after(write_over, restore_it, "renameat2", 2), recover),
}


@pytest.mark.parametrize("name", SWEEPING)
def test_each_file_is_once_after_a_kill_before_any_call(volume: Path, name: str) -> None:
    hold_when_killed(SWEEPING[name], volume, partial(settle_without_loss, SWEEPING[name], volume))


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", ["sweep-all", "merge-taken"])
def test_each_file_is_once_after_a_kill_before_any_call_on_ext4(name: str) -> None:
    with loop_volume("ext4", 16) as ext4:
        hold_when_killed(SWEEPING[name], ext4, partial(settle_without_loss, SWEEPING[name], ext4))


@pytest.mark.parametrize("name", ["sweep-all", "merge-taken"])
def test_each_file_is_once_after_a_second_kill_in_recovery(volume: Path, name: str) -> None:
    hold_when_killed_twice(SWEEPING[name], volume, partial(settle_without_loss, SWEEPING[name], volume))


def test_killed_sweep_is_completed_by_the_same_again(volume: Path) -> None:
    def law(before: VolumeContents) -> None:
        assert outcome(partial(_sweep, volume, Kernel(), names=ALL)) == WON
        assert os.listdir(home(volume)) == []
        settle_without_loss(SWEEPING["sweep-all"], volume, before)

    hold_when_killed(SWEEPING["sweep-all"], volume, law)


def test_killed_restore_is_completed_by_the_same_again(volume: Path) -> None:
    def law(_before: VolumeContents) -> None:
        settle(volume)
        if orphans(volume):
            assert outcome(partial(restore_it, volume, Kernel())) == WON
        assert sorted(path.name for path in home(volume).rglob("*")) == ["a", "b", "empty", "leaf", "sub"]
        settle(volume)
        assert orphans(volume) == []

    hold_when_killed(SWEEPING["merge"], volume, law)


SWEEPING_FAULTS = spread(
    [
        *product(["sweep-all"], [errno.EIO, errno.ENOSPC, errno.EXDEV]),
        *product(["merge-taken"], [errno.EIO, errno.ENOSPC, errno.EACCES]),
        ("merge-missing", errno.EIO),
        ("merge-inside", errno.EIO),
    ]
)


@pytest.mark.parametrize(("name", "number"), SWEEPING_FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_each_file_is_once_when_any_call_fails(volume: Path, name: str, number: int) -> None:
    settle_it = partial(settle_without_loss, SWEEPING[name], volume)
    hold_when_failing(SWEEPING[name], volume, number, settle_it, SWEEPING_FAULTS[name, number])


RIVALS = {
    "sweep-sweep": ("sweep-all", "sweep-all"),
    "sweep-some": ("sweep", "sweep-all"),
    "merge-merge": ("merge", "merge"),
    "merge-inside": ("merge", "merge-inside"),
}


@pytest.mark.parametrize("name", RIVALS)
def test_two_at_once_leave_each_file_once(volume: Path, name: str) -> None:
    first, second = (SWEEPING[one] for one in RIVALS[name])

    def law(before: VolumeContents, of_first: int, of_second: int) -> None:
        assert {of_first, of_second} <= {WON, LOST}
        settle_without_loss(first, volume, before)

    hold_when_stopped(first, volume, lambda: outcome(lambda: second.act(volume, Kernel())), law, moments=changing)


@pytest.mark.parametrize("name", ["sweep", "merge-taken"])
def test_recovery_leaves_a_living_one_alone(volume: Path, name: str) -> None:
    def law(before: VolumeContents, code: int, told: list[str]) -> None:
        assert (told, code) == ([], WON)
        settle_without_loss(SWEEPING[name], volume, before)

    hold_when_stopped(SWEEPING[name], volume, lambda: recover_all(volume), law, moments=changing)


def test_hard_links_stay_links_of_one_file(volume: Path) -> None:
    def make_linked(path: Path) -> None:
        make_victim(path)
        os.link(home(path) / "a", home(path) / "sub/again")

    linked = scene(make_linked, partial(_sweep, names=("a", "sub/leaf")))

    def law(before: VolumeContents) -> None:
        settle_without_loss(linked, volume, before)
        found = [place for place in (home(volume) / "a", *(tree / "a" for tree in orphans(volume))) if place.exists()]
        assert [one.stat().st_nlink for one in found] == [2]

    hold_when_killed(linked, volume, law)


def test_new_file_of_a_name_that_is_being_restored_is_never_replaced(volume: Path) -> None:
    made: set[bool] = set()

    def make() -> bool:
        is_free = not os.path.lexists(home(volume) / "a")
        if is_free:
            (home(volume) / "a").write_bytes(NEW)
        return is_free

    def law(before: VolumeContents, code: int, is_new: bool) -> None:
        made.add(is_new)
        assert code == WON
        settle(volume)
        assert read_contents(volume).contents - before.contents == Counter([CONTENT] if is_new else [])
        assert before.contents - read_contents(volume).contents == Counter()

    hold_when_stopped(SWEEPING["merge"], volume, make, law, moments=changing)
    assert made == {True, False}
