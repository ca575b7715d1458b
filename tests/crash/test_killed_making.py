"""Killed while a store, a user's folder or a reserve is made or used: the next command finishes or begins again."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.store.check_swap import preflight
from tests.support.crash_scenarios import (
    HOME,
    USER,
    CrashScenario,
    assert_nothing_lost,
    changing,
    home,
    look,
    settle,
    user_folders,
    wipe,
)
from tests.support.make_trees import make_tree, snapshot
from tests.support.other_users import as_user, become
from tests.support.real_filesystems import full, tmpfs_volume
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import DyingAt, assert_silent, init, numbered_calls, recover_all, swap, use
from tests.support.verb_scenarios import TREE, make_victim

pytestmark = pytest.mark.needs("root")


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with tmpfs_volume("2m", ["nr_inodes=300"]) as path:
        yield path


def entries_of(volume: Path) -> list[str]:
    return sorted(path.name for path in volume.iterdir())


@pytest.mark.long
def test_init_killed_before_any_call_is_finished_by_the_next_init(volume: Path) -> None:
    wipe(volume)
    for n in changing(numbered_calls(partial(init, volume))):
        wipe(volume)
        code = code_of_child(partial(init, volume, Kernel(DyingAt(n))))
        init(volume)
        assert recover_all(volume) == []
        assert entries_of(volume) == [".trashd"], f"killed before call {n}"
        assert_silent(volume)
    assert code == 0


@pytest.mark.long
def test_first_swap_without_a_store_killed_before_any_call_loses_nothing(volume: Path) -> None:
    def set_up() -> None:
        wipe(volume)
        (volume / HOME).mkdir()
        make_victim(volume)

    set_up()
    for n in changing(numbered_calls(partial(swap, home(volume)))):
        set_up()
        tree = snapshot(home(volume))
        code = code_of_child(partial(swap, home(volume), Kernel(DyingAt(n))))
        assert home(volume).is_dir()
        init(volume)
        settle(volume)
        after = look(volume)
        assert after.trees == {tree: 1}, f"killed before call {n}"
        assert after.head == tree[0]
        assert entries_of(volume) == [".trashd", HOME]
    assert code == 0


@pytest.mark.long
def test_nothing_is_left_of_a_check_without_a_store_killed_before_any_call(volume: Path) -> None:
    def set_up() -> None:
        wipe(volume)
        (volume / HOME).mkdir()
        make_victim(volume)

    def check(kernel: Kernel) -> int:
        return preflight(kernel, bytes(home(volume))).exit_code

    set_up()
    tree = snapshot(home(volume))
    for n in changing(numbered_calls(check)):
        set_up()
        code = code_of_child(partial(check, Kernel(DyingAt(n))))
        assert snapshot(home(volume)) == tree
        init(volume)
        settle(volume)
        assert [entries_of(path) for path in (volume, volume / HOME)] == [[".trashd", HOME], [home(volume).name]]
    assert code == 0


def test_first_swap_of_a_user_killed_before_any_call_leaves_one_folder_of_his(volume: Path) -> None:
    def set_up() -> None:
        wipe(volume)
        init(volume)
        make_tree(volume / HOME, {"job": TREE})
        for path in (volume / HOME, *(volume / HOME).rglob("*")):
            os.chown(path, USER, USER)

    set_up()
    for n in changing(as_user(USER, partial(numbered_calls, partial(swap, home(volume))))):
        set_up()
        tree = snapshot(home(volume))

        def die(n: int = n) -> None:
            become(USER)
            swap(home(volume), Kernel(DyingAt(n)))

        code = code_of_child(die)
        as_user(USER, partial(use, volume))
        settle(volume)
        assert look(volume).trees == {tree: 1}, f"killed before call {n}"
        assert sorted(path.name for path in user_folders(volume)) == ["0", str(USER)]
    assert code == 0


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-rename"])
def test_swap_by_the_reserve_killed_before_any_call_loses_nothing(volume: Path, exchange: bool) -> None:
    scene = CrashScenario(
        make_victim, lambda where, kernel: swap(home(where), kernel), exchange=exchange, is_gapless=True
    )
    scene.set_up(volume)
    with full(volume):
        calls = scene.calls(volume)
    for n in changing(calls):
        before = scene.set_up(volume)
        with full(volume):
            code = code_of_child(partial(scene.run, volume, DyingAt(n)))
            assert code in (0, DyingAt.EXIT_CODE)
            assert exchange is False or home(volume).is_dir()
            # Recovery needs no space either.
            recover_all(volume)
            assert_nothing_lost(scene, volume, before)
        settle(volume)
        assert_nothing_lost(scene, volume, before)
    assert code == 0
