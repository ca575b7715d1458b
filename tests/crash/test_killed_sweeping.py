"""A sweep's trash action, its restore and their recovery, killed, failing or met at any call: each file is once."""

import errno
import os
from collections import Counter
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
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
    changing,
    home,
    look,
    orphans,
    outcome,
    settle,
    settle_without_loss,
)
from tests.support.real_filesystems import loop_volume
from tests.support.store_verbs import recover_all
from tests.support.trash_without_walk import gather
from tests.support.verb_scenarios import LATE, killed_after, make_victim, recover, restore_it

pytestmark = pytest.mark.needs("root")

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


SCENES = {
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


@pytest.mark.parametrize("name", SCENES)
def test_each_file_is_once_after_a_kill_before_any_call(volume: Path, name: str) -> None:
    hold_when_killed(SCENES[name], volume, partial(settle_without_loss, SCENES[name], volume))


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", ["sweep-all", "merge-taken"])
def test_each_file_is_once_after_a_kill_before_any_call_on_ext4(name: str) -> None:
    with loop_volume("ext4", 16) as ext4:
        hold_when_killed(SCENES[name], ext4, partial(settle_without_loss, SCENES[name], ext4))


@pytest.mark.parametrize("name", ["sweep-all", "merge-taken"])
def test_each_file_is_once_after_a_second_kill_in_recovery(volume: Path, name: str) -> None:
    hold_when_killed_twice(SCENES[name], volume, partial(settle_without_loss, SCENES[name], volume))


def test_killed_sweep_is_completed_by_the_same_again(volume: Path) -> None:
    def law(before: VolumeContents) -> None:
        assert outcome(partial(_sweep, volume, Kernel(), names=ALL)) == WON
        assert os.listdir(home(volume)) == []
        settle_without_loss(SCENES["sweep-all"], volume, before)

    hold_when_killed(SCENES["sweep-all"], volume, law)


def test_killed_restore_is_completed_by_the_same_again(volume: Path) -> None:
    def law(_before: VolumeContents) -> None:
        settle(volume)
        if orphans(volume):
            assert outcome(partial(restore_it, volume, Kernel())) == WON
        assert sorted(path.name for path in home(volume).rglob("*")) == ["a", "b", "empty", "leaf", "sub"]
        settle(volume)
        assert orphans(volume) == []

    hold_when_killed(SCENES["merge"], volume, law)


FAULTS = spread(
    [
        *product(["sweep-all"], [errno.EIO, errno.ENOSPC, errno.EXDEV]),
        *product(["merge-taken"], [errno.EIO, errno.ENOSPC, errno.EACCES]),
        ("merge-missing", errno.EIO),
        ("merge-inside", errno.EIO),
    ]
)


@pytest.mark.parametrize(("name", "number"), FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_each_file_is_once_when_any_call_fails(volume: Path, name: str, number: int) -> None:
    settle_it = partial(settle_without_loss, SCENES[name], volume)
    hold_when_failing(SCENES[name], volume, number, settle_it, FAULTS[name, number])


RIVALS = {
    "sweep-sweep": ("sweep-all", "sweep-all"),
    "sweep-some": ("sweep", "sweep-all"),
    "merge-merge": ("merge", "merge"),
    "merge-inside": ("merge", "merge-inside"),
}


@pytest.mark.parametrize("name", RIVALS)
def test_two_at_once_leave_each_file_once(volume: Path, name: str) -> None:
    first, second = (SCENES[one] for one in RIVALS[name])

    def law(before: VolumeContents, of_first: int, of_second: int) -> None:
        assert {of_first, of_second} <= {WON, LOST}
        settle_without_loss(first, volume, before)

    hold_when_stopped(first, volume, lambda: outcome(lambda: second.act(volume, Kernel())), law, moments=changing)


@pytest.mark.parametrize("name", ["sweep", "merge-taken"])
def test_recovery_leaves_a_living_one_alone(volume: Path, name: str) -> None:
    def law(before: VolumeContents, code: int, told: list[str]) -> None:
        assert (told, code) == ([], WON)
        settle_without_loss(SCENES[name], volume, before)

    hold_when_stopped(SCENES[name], volume, lambda: recover_all(volume), law, moments=changing)


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
        assert look(volume).contents - before.contents == Counter([CONTENT] if is_new else [])
        assert before.contents - look(volume).contents == Counter()

    hold_when_stopped(SCENES["merge"], volume, make, law, moments=changing)
    assert made == {True, False}
