"""A sweep's trash action, its restore and their recovery, killed, failing or met at any call: each file is once."""

from __future__ import annotations

import errno
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from fusefs.core.errors import TrashdError
from fusefs.linux.kernel import Kernel
from tests.support.acts import LATE, TREE, killed_after, only_id
from tests.support.gather import gather
from tests.support.scenes import (
    LOST,
    USER,
    WON,
    Act,
    Before,
    Prepare,
    Scene,
    assert_nothing_lost,
    changing,
    deaths,
    home,
    look,
    orphans,
    outcome,
    settle,
    stop_at,
)
from tests.support.store import DyingAt, FailingAt, in_child, numbered_calls, recover_all, restore
from tests.support.tree import Dir, make_tree
from tests.support.volumes import loop_volume, tmpfs_volume

pytestmark = pytest.mark.needs("root")

NEW = b"new"
CONTENT = sha256(NEW).hexdigest()
SOME = ("a", "sub/leaf", "empty")
ALL = ("a", "empty", "sub/leaf", "sub")
"""The last one was made in the orphan before: what is in it joins that."""


def make_directory(volume: Path) -> None:
    make_tree(home(volume), Dir(TREE, mode=0o750))


def _sweep(volume: Path, kernel: Kernel, names: tuple[str, ...] = SOME) -> object:
    return gather(home(volume), names, kernel)


def sweep_some(volume: Path) -> None:
    make_directory(volume)
    gather(home(volume), SOME)


def write_over(volume: Path) -> None:
    """Swept, and something else has one of the names."""
    sweep_some(volume)
    (home(volume) / "sub/leaf").write_bytes(LATE)


def remove_inside(volume: Path) -> None:
    """Swept whole, and a directory of it is gone, as cleaners do."""
    make_directory(volume)
    gather(home(volume), ("a", "sub/leaf", "sub/b"))
    (home(volume) / "sub").rmdir()


def remove_it(volume: Path) -> None:
    """Swept whole, and the directory itself is gone."""
    make_directory(volume)
    gather(home(volume), ALL)
    home(volume).rmdir()


def _restore(volume: Path, kernel: Kernel, inside: bytes | None = None, to: str | None = None) -> object:
    return restore(volume, only_id(volume), kernel, inside, None if to is None else home(volume).with_name(to))


def _recover(volume: Path, kernel: Kernel) -> object:
    return recover_all(volume, kernel)


def scene(prepare: Prepare, act: Act, uid: int = 0, by: int | None = None, *, is_gapless: bool = True) -> Scene:
    return Scene(prepare, act, uid=uid, by=by, is_gapless=is_gapless, is_split=True)


SCENES = {
    "sweep": scene(make_directory, _sweep),
    "sweep-all": scene(make_directory, partial(_sweep, names=ALL)),
    "sweep-nothing": scene(make_directory, partial(_sweep, names=("nothing", "sub/nothing"))),
    "sweep-user": scene(make_directory, _sweep, USER),
    "merge": scene(sweep_some, _restore),
    "merge-taken": scene(write_over, _restore),
    "merge-missing": scene(remove_inside, _restore),
    "merge-whole": scene(remove_it, _restore, is_gapless=False),
    "merge-inside": scene(remove_inside, partial(_restore, inside=b"sub/leaf")),
    "merge-to": scene(sweep_some, partial(_restore, to="elsewhere")),
    "merge-user": scene(write_over, _restore, USER),
    "merge-by-root": scene(write_over, _restore, USER, 0),
    "recover-sweep": scene(killed_after(make_directory, _sweep, "renameat2", 2), _recover),
    "recover-merge": scene(killed_after(write_over, _restore, "renameat2", 2), _recover),
}


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


def assert_law(scene: Scene, volume: Path) -> None:
    for n, before in deaths(scene, volume):
        try:
            settle(volume)
            assert_nothing_lost(scene, volume, before)
        except BaseException as error:
            error.add_note(f"killed before call {n}")
            raise


@pytest.mark.parametrize("name", SCENES)
def test_each_file_is_once_after_a_kill_before_any_call(volume: Path, name: str) -> None:
    assert_law(SCENES[name], volume)


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", ["sweep-all", "merge-taken"])
def test_each_file_is_once_after_a_kill_before_any_call_on_ext4(name: str) -> None:
    with loop_volume("ext4", 16) as ext4:
        assert_law(SCENES[name], ext4)


@pytest.mark.parametrize("name", ["sweep-all", "merge-taken"])
def test_each_file_is_once_after_a_second_kill_in_recovery(volume: Path, name: str) -> None:
    scene = SCENES[name]
    scene.set_up(volume)
    for i, n in enumerate(changing(scene.calls(volume))):
        scene.set_up(volume)
        in_child(partial(scene.run, volume, DyingAt(n)))
        for m in changing(numbered_calls(partial(recover_all, volume)))[i % 3 :: 3]:
            before = scene.set_up(volume)
            in_child(partial(scene.run, volume, DyingAt(n)))
            in_child(partial(recover_all, volume, Kernel(DyingAt(m))))
            settle(volume)
            assert_nothing_lost(scene, volume, before)


def test_killed_sweep_is_completed_by_the_same_again(volume: Path) -> None:
    for n, before in deaths(SCENES["sweep-all"], volume):
        assert outcome(partial(_sweep, volume, Kernel(), names=ALL)) == WON, n
        assert os.listdir(home(volume)) == [], n
        settle(volume)
        assert_nothing_lost(SCENES["sweep-all"], volume, before)


def test_killed_restore_is_completed_by_the_same_again(volume: Path) -> None:
    for n, _before in deaths(SCENES["merge"], volume):
        settle(volume)
        if orphans(volume):
            assert outcome(partial(_restore, volume, Kernel())) == WON, n
        assert sorted(path.name for path in home(volume).rglob("*")) == ["a", "b", "empty", "leaf", "sub"], n
        settle(volume)
        assert orphans(volume) == [], n


FAULTS = [
    *((name, errno.EIO) for name in ("sweep-all", "merge-taken", "merge-missing", "merge-inside")),
    *(("sweep-all", number) for number in (errno.ENOSPC, errno.EXDEV)),
    *(("merge-taken", number) for number in (errno.ENOSPC, errno.EACCES)),
]


@pytest.mark.parametrize(("name", "number"), FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_each_file_is_once_when_any_call_fails(volume: Path, name: str, number: int) -> None:
    scene = SCENES[name]
    for n in itertools.count():
        before = scene.set_up(volume)
        gate = FailingAt(n, number)
        n_fds = len(os.listdir("/proc/self/fd"))
        with suppress(TrashdError, OSError):
            scene.run(volume, gate)
        try:
            assert len(os.listdir("/proc/self/fd")) == n_fds
            settle(volume)
            assert_nothing_lost(scene, volume, before)
        except BaseException as error:
            error.add_note(f"at call {n}, {gate.failed}")
            raise
        if gate.failed is None:
            return


def stopped_before_each(scene: Scene, volume: Path, meanwhile: Callable[[], object]) -> Iterator[tuple[Before, int]]:
    """What was there before, and the outcome of an act that was stopped before a call while something else ran."""
    scene.set_up(volume)
    for n in changing(scene.calls(volume)):
        before = scene.set_up(volume)
        stopped = stop_at(scene, volume, n)
        try:
            meanwhile()
        finally:
            code = stopped.go_on()
        try:
            yield before, code
        except BaseException as error:
            error.add_note(f"stopped before call {n}")
            raise


RIVALS = {
    "sweep-sweep": ("sweep-all", "sweep-all"),
    "sweep-some": ("sweep", "sweep-all"),
    "merge-merge": ("merge", "merge"),
    "merge-inside": ("merge", "merge-inside"),
}


@pytest.mark.parametrize("name", RIVALS)
def test_two_at_once_leave_each_file_once(volume: Path, name: str) -> None:
    first, second = (SCENES[one] for one in RIVALS[name])
    codes: list[int] = []
    for before, code in stopped_before_each(
        first, volume, lambda: codes.append(outcome(lambda: second.act(volume, Kernel())))
    ):
        assert {code, codes.pop()} <= {WON, LOST}
        settle(volume)
        assert_nothing_lost(first, volume, before)


@pytest.mark.parametrize("name", ["sweep", "merge-taken"])
def test_recovery_leaves_a_living_one_alone(volume: Path, name: str) -> None:
    told: list[str] = []
    for before, code in stopped_before_each(SCENES[name], volume, lambda: told.extend(recover_all(volume))):
        assert (told, code) == ([], WON)
        settle(volume)
        assert_nothing_lost(SCENES[name], volume, before)


def test_hard_links_stay_links_of_one_file(volume: Path) -> None:
    def make_linked(path: Path) -> None:
        make_directory(path)
        os.link(home(path) / "a", home(path) / "sub/again")

    linked = scene(make_linked, partial(_sweep, names=("a", "sub/leaf")))
    for _n, before in deaths(linked, volume):
        settle(volume)
        assert_nothing_lost(linked, volume, before)
        found = [place for place in (home(volume) / "a", *(tree / "a" for tree in orphans(volume))) if place.exists()]
        assert [one.stat().st_nlink for one in found] == [2]


def test_new_file_of_a_name_that_is_being_restored_is_never_replaced(volume: Path) -> None:
    made: list[bool] = []

    def make() -> None:
        made.append(not os.path.lexists(home(volume) / "a"))
        if made[-1]:
            (home(volume) / "a").write_bytes(NEW)

    for before, code in stopped_before_each(SCENES["merge"], volume, make):
        assert code == WON
        settle(volume)
        assert look(volume).contents - before.contents == Counter([CONTENT] if made[-1] else [])
        assert before.contents - look(volume).contents == Counter()
    assert set(made) == {True, False}
