"""A user's folder: how it comes to be: whole, exact, and one for each user, whatever else is at it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.store.layout import FOLDERS
from tests.support.acls import DEFAULT, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.covering_sets import share_of
from tests.support.crash_scenarios import changing
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import (
    ActingAt,
    Counting,
    DyingAt,
    assert_silent,
    folder_of,
    forked,
    init,
    numbered_calls,
    own,
)
from tests.support.two_users_store import ALICE, BOB, OPEN_TO_BOB, alices_volume, folders, make, modes, throw

pytestmark = pytest.mark.needs("root")

VOLUME = alices_volume


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o277, 0o777])
def test_a_folder_is_exact_whatever_the_umask(volume: Path, mask: int) -> None:
    def act() -> Path:
        os.umask(mask)
        return make(volume)

    assert modes(as_user(ALICE, act)) == {0o700}
    assert folders(volume) == [str(ALICE)]
    assert_silent(volume)


@pytest.mark.parametrize("mask", [0o000, 0o777])
def test_a_part_that_is_missing_is_made_exact(volume: Path, mask: int) -> None:
    folder = as_user(ALICE, lambda: throw(volume))

    def act() -> Path:
        os.umask(mask)
        (folder / "stage").rmdir()
        (folder / "drop").rmdir()
        os.umask(0o022)
        path = make_tree(volume / "alice/again", {})
        os.umask(mask)
        with own(volume) as mine:
            mine.open(FOLDERS[0]).close()
            mine.open(FOLDERS[5]).close()
        return path

    as_user(ALICE, act)
    assert modes(folder) == {0o700}
    assert folders(volume) == [str(ALICE)]


STINGY = [(USER_OBJ, 1, NOBODY), (USER, 7, BOB), (GROUP_OBJ, 7, NOBODY), (MASK, 7, NOBODY), (OTHER, 7, NOBODY)]
ABOVE: dict[str, Callable[[Path], None]] = {
    "setgid": lambda users: users.chmod(0o3777),
    "generous": lambda users: os.setxattr(users, DEFAULT, acl(*OPEN_TO_BOB)),
    "stingy": lambda users: os.setxattr(users, DEFAULT, acl(*STINGY)),
}


@pytest.mark.parametrize("above", ABOVE)
def test_a_folder_is_exact_whatever_the_directory_above_gives(volume: Path, above: str) -> None:
    ABOVE[above](volume / ".trashd/new")
    folder = as_user(ALICE, lambda: throw(volume))
    assert modes(folder) == {0o700}
    with pytest.raises(PermissionError):
        as_user(BOB, lambda: os.listdir(folder))
    assert folders(volume) == [str(ALICE)]
    assert_silent(volume)


def beside_planted(volume: Path) -> None:
    """Bob has Alice's name."""
    as_user(BOB, folder_of(volume, ALICE).mkdir)


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_first_command_killed_at_any_call_leaves_one_folder_to_the_next(volume: Path, is_planted: bool) -> None:
    if is_planted:
        beside_planted(volume)
    numbers = changing(as_user(ALICE, partial(numbered_calls, partial(make, volume))))
    for n in numbers:
        remove_folders(volume)
        code = as_user(ALICE, lambda n=n: code_of_child(lambda: make(volume, Kernel(DyingAt(n)))))  # type: ignore[misc]
        n_killed = len(folders(volume))
        assert n_killed <= 2 + is_planted, f"killed before call {n}"
        found = as_user(ALICE, lambda: make(volume))
        assert modes(found) == {0o700}
        assert len(folders(volume)) == 1 + is_planted or n_killed == 2 + is_planted, f"killed before call {n}"
    assert code == 0
    assert len(numbers) > 10


def test_init_sweeps_what_a_killed_first_command_left(volume: Path) -> None:
    for n in range(30, 60, 7):
        as_user(ALICE, lambda n=n: code_of_child(lambda: make(volume, Kernel(DyingAt(n)))))  # type: ignore[misc]
    assert any(name.startswith(".new-") for name in folders(volume))
    init(volume)
    assert [name for name in folders(volume) if name.startswith(".new-")] == []


def remove_folders(volume: Path) -> None:
    """Take away all that is Alice's in new/."""
    for path in (volume / ".trashd/new").iterdir():
        if path.stat().st_uid == ALICE:
            for part in path.iterdir():
                part.rmdir()
            path.rmdir()


@pytest.mark.parametrize("is_planted", [False, True])
def test_two_first_commands_of_a_user_end_in_one_folder(volume: Path, is_planted: bool) -> None:
    """The second begins at each call of the first, and goes on beside it; beside a planted one at each other call."""
    if is_planted:
        beside_planted(volume)
    n_calls = as_user(ALICE, lambda: counted(volume))
    assert n_calls > 20
    for n in share_of(range(n_calls), int(is_planted), 2):
        remove_folders(volume)
        first, second = as_user(ALICE, lambda n=n: race(volume, n))  # type: ignore[misc]
        assert first == second, f"begun at call {n}"
        assert folders(volume) == sorted({first.name, *([str(ALICE)] if is_planted else [])}), f"begun at call {n}"


def counted(volume: Path) -> int:
    remove_folders(volume)
    calls = Counting()
    make(volume, Kernel(calls))
    return len(calls.calls)


def race(volume: Path, n: int) -> tuple[Path, Path]:
    """The folders of two commands, of which the second begins before the n-th call of the first."""
    read_fd, write_fd = os.pipe()
    pids: list[int] = []

    def begin() -> None:
        pids.append(forked(lambda: os.write(write_fd, os.fsencode(make(volume)))))

    first = make(volume, Kernel(ActingAt(n, begin)))
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        second = pipe.read()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0]
    return first, Path(os.fsdecode(second))
