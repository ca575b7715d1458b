"""Killed before any system call of any verb, and while a store is made: the next command loses nothing."""

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.names import parse_uid_name
from fusefs.linux.kernel import Kernel
from fusefs.store.check_swap import check_swap
from tests.support.crash_invariants import hold_when_killed, hold_when_killed_twice
from tests.support.crash_scenarios import (
    HOME,
    USER,
    CrashScenario,
    VolumeContents,
    assert_nothing_lost,
    assert_settled,
    changing,
    end_of,
    home,
    read_contents,
    settle,
    settle_without_loss,
    user_folders,
    wipe,
)
from tests.support.make_trees import make_tree, snapshot
from tests.support.other_users import as_user, become
from tests.support.real_filesystems import full, loop_volume, tmpfs_volume
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import DyingAt, assert_silent, in_child, init, numbered_calls, recover_all, swap, use
from tests.support.verb_scenarios import CHECKS, SCENES, TREE, make_victim, only_id

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
        assert not [path for area in areas for path in area.iterdir() if parse_uid_name(os.fsencode(path.name)) is None]

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


@pytest.fixture(scope="module")
def small_volume() -> Iterator[Path]:
    with tmpfs_volume("2m", ["nr_inodes=300"]) as path:
        yield path


def entries_of(small_volume: Path) -> list[str]:
    return sorted(path.name for path in small_volume.iterdir())


@pytest.mark.long
def test_init_killed_before_any_call_is_finished_by_the_next_init(small_volume: Path) -> None:
    wipe(small_volume)
    for n in changing(numbered_calls(partial(init, small_volume))):
        wipe(small_volume)
        code = code_of_child(partial(init, small_volume, Kernel(DyingAt(n))))
        init(small_volume)
        assert recover_all(small_volume) == []
        assert entries_of(small_volume) == [".trashd"], f"killed before call {n}"
        assert_silent(small_volume)
    assert code == 0


@pytest.mark.long
def test_first_swap_without_a_store_killed_before_any_call_loses_nothing(small_volume: Path) -> None:
    def set_up() -> None:
        wipe(small_volume)
        (small_volume / HOME).mkdir()
        make_victim(small_volume)

    set_up()
    for n in changing(numbered_calls(partial(swap, home(small_volume)))):
        set_up()
        tree = snapshot(home(small_volume))
        code = code_of_child(partial(swap, home(small_volume), Kernel(DyingAt(n))))
        assert home(small_volume).is_dir()
        init(small_volume)
        settle(small_volume)
        after = read_contents(small_volume)
        assert after.trees == {tree: 1}, f"killed before call {n}"
        assert after.head == tree[0]
        assert entries_of(small_volume) == [".trashd", HOME]
    assert code == 0


@pytest.mark.long
def test_nothing_is_left_of_a_check_without_a_store_killed_before_any_call(small_volume: Path) -> None:
    def set_up() -> None:
        wipe(small_volume)
        (small_volume / HOME).mkdir()
        make_victim(small_volume)

    def check(kernel: Kernel) -> int:
        return check_swap(kernel, bytes(home(small_volume))).exit_code

    set_up()
    tree = snapshot(home(small_volume))
    for n in changing(numbered_calls(check)):
        set_up()
        code = code_of_child(partial(check, Kernel(DyingAt(n))))
        assert snapshot(home(small_volume)) == tree
        init(small_volume)
        settle(small_volume)
        assert [entries_of(path) for path in (small_volume, small_volume / HOME)] == [
            [".trashd", HOME],
            [home(small_volume).name],
        ]
    assert code == 0


def test_first_swap_of_a_user_killed_before_any_call_leaves_one_folder_of_his(small_volume: Path) -> None:
    def set_up() -> None:
        wipe(small_volume)
        init(small_volume)
        make_tree(small_volume / HOME, {"job": TREE})
        for path in (small_volume / HOME, *(small_volume / HOME).rglob("*")):
            os.chown(path, USER, USER)

    set_up()
    for n in changing(as_user(USER, partial(numbered_calls, partial(swap, home(small_volume))))):
        set_up()
        tree = snapshot(home(small_volume))

        def die(n: int = n) -> None:
            become(USER)
            swap(home(small_volume), Kernel(DyingAt(n)))

        code = code_of_child(die)
        as_user(USER, partial(use, small_volume))
        settle(small_volume)
        assert read_contents(small_volume).trees == {tree: 1}, f"killed before call {n}"
        assert sorted(path.name for path in user_folders(small_volume)) == ["0", str(USER)]
    assert code == 0


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-rename"])
def test_swap_by_the_reserve_killed_before_any_call_loses_nothing(small_volume: Path, exchange: bool) -> None:
    scene = CrashScenario(
        make_victim, lambda where, kernel: swap(home(where), kernel), exchange=exchange, is_gapless=True
    )
    scene.set_up(small_volume)
    with full(small_volume):
        calls = scene.calls(small_volume)
    for n in changing(calls):
        before = scene.set_up(small_volume)
        with full(small_volume):
            code = code_of_child(partial(scene.run, small_volume, DyingAt(n)))
            assert code in (0, DyingAt.EXIT_CODE)
            assert exchange is False or home(small_volume).is_dir()
            # Recovery needs no space either.
            recover_all(small_volume)
            assert_nothing_lost(scene, small_volume, before)
        settle(small_volume)
        assert_nothing_lost(scene, small_volume, before)
    assert code == 0


_CHANGING_NAME = re.compile(r"\d{8}T[\d.]+Z|[0-9a-f]{8,}")


def list_tree(volume: Path) -> list[tuple[str, int, int, bool]]:
    """List what is on a volume, without what is another one each time."""
    stats = [(_CHANGING_NAME.sub("X", str(path)), path.lstat()) for path in volume.rglob("*")]
    return sorted((name, st.st_mode, st.st_uid, st.st_size > 0) for name, st in stats)


def end_unwound(scene: CrashScenario, volume: Path, n: int) -> int:
    end = code_of_child if scene.by is None else end_of
    return end(partial(scene.run, volume, DyingAt(n)))


@pytest.mark.every
@pytest.mark.parametrize("name", SCENES)
def test_a_command_that_unwinds_leaves_what_a_killed_one_leaves(volume: Path, name: str) -> None:
    scene = SCENES[name]
    scene.set_up(volume)
    for n in changing(scene.calls(volume)):
        scene.set_up(volume)
        killed = in_child(partial(scene.run, volume, DyingAt(n))), list_tree(volume)
        scene.set_up(volume)
        assert (end_unwound(scene, volume, n), list_tree(volume)) == killed, f"call {n}"


REPO = Path(__file__).resolve().parents[2]
RENAMES = ("renameat2", "renameat", "rename")
TRASHD = (sys.executable, "-m", "fusefs.cli.main")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"}


def kill_at_rename(call: str, k: int, *arguments: str) -> bool:
    """Run the command; whether it was killed as it entered its k-th rename by that system call."""
    strace = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject={call}:signal=KILL:when={k}")
    done = subprocess.run([*strace, *TRASHD, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def repair(volume: Path) -> subprocess.CompletedProcess[str]:
    command = [*TRASHD, "doctor", "--repair", str(volume)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def arguments_of(verb: str, volume: Path) -> list[str]:
    match verb:
        case "restore":
            return ["restore", "--volume", str(volume), only_id(volume)]
        case _:
            return [verb, str(home(volume))]


def assert_law(scene: CrashScenario, volume: Path, verb: str) -> int:
    n_killed = 0
    for call in RENAMES:
        for k in itertools.count(1):
            before = scene.set_up(volume)
            if not kill_at_rename(call, k, *arguments_of(verb, volume)):
                break
            n_killed += 1
            assert not scene.is_gapless or home(volume).is_dir()
            done = repair(volume)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), f"killed at {call} {k}"
            assert_settled(volume)
            assert_nothing_lost(scene, volume, before)
    return n_killed


@pytest.mark.needs("strace")
@pytest.mark.parametrize(
    ("verb", "name", "n_renames"),
    [
        ("swap", "swap", 2),
        ("swap", "swap-two-rename", 3),
        ("rm", "rm", 2),
        ("restore", "restore-late", 5),
        ("restore", "restore-two-rename-late", 6),
    ],
)
def test_sigkill_at_any_rename_is_repaired_by_doctor(volume: Path, verb: str, name: str, n_renames: int) -> None:
    assert assert_law(SCENES[name], volume, verb) == n_renames
