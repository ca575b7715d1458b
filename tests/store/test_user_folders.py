"""A user's folder: how it comes to be, what counts as one, and what a look at planted names costs."""

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.names import parse_uid_name
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import FOLDERS
from fusefs.store.user_folders import open_user_folder
from tests.support.acls import ACCESS, DEFAULT, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.covering_sets import share_of
from tests.support.crash_scenarios import changing
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import (
    ActingAt,
    Counting,
    DyingAt,
    assert_silent,
    entries,
    folder_of,
    forked,
    init,
    numbered_calls,
    opened,
    own,
    problems,
    recover_all,
)
from tests.support.two_users_store import ALICE, BOB, OPEN_TO_BOB, PARTS, alices_volume, folders, make, modes, throw

pytestmark = pytest.mark.needs("root")


VOLUME = alices_volume


# What counts


@pytest.mark.parametrize("name", [b"0", b"1001", b"4294967294", b"1001.0123456789ab", b"0.ffffffffffff"])
def test_names_of_folders(name: bytes) -> None:
    assert parse_uid_name(name) == int(name.partition(b".")[0])


@pytest.mark.parametrize(
    "name",
    [
        *(
            b"",
            b".",
            b"01",
            b"00",
            b"+1",
            b"-1",
            b" 1",
            b"1 ",
            b"1_0",
            "\u0661".encode(),
            b"4294967295",
            b"99999999999",
        ),
        *(b"1001.", b"1001.0123456789a", b"1001.0123456789abc", b"1001.0123456789aB", b"1001.0123456789ab.planted"),
        *(b"1001.0123456789a.", b".new-1001.0123456789ab", b"1001.0123456789ag", b"1" * 5000),
    ],
)
def test_other_names(name: bytes) -> None:
    assert parse_uid_name(name) is None


INEXACT = [0o000, 0o500, 0o600, 0o701, 0o710, 0o750, 0o755, 0o770, 0o777, 0o1700, 0o2700, 0o4700, 0o2775]


@pytest.mark.parametrize("mode", INEXACT)
@pytest.mark.parametrize("part", ["", "orphans", "drop", "reserve"])
def test_what_is_not_exactly_0700_is_no_folder_and_stays_so(volume: Path, part: str, mode: int) -> None:
    planted = as_user(ALICE, lambda: throw(volume))
    (planted / part).chmod(mode)
    before = snapshot(planted, with_times=True)
    with opened(volume) as store:
        assert open_user_folder(store, ALICE) is None
    other = as_user(ALICE, lambda: throw(volume))
    assert parse_uid_name(os.fsencode(other.name)) == ALICE
    assert other != planted
    assert as_user(ALICE, lambda: throw(volume)) == other
    recover_all(volume)
    [problem] = problems(volume)
    assert f"its mode is {mode:04o} instead of 0700" in problem.what
    assert snapshot(planted, with_times=True) == before


@pytest.mark.parametrize("part", ["", "stage", "quarantine", "pointers"])
def test_what_another_owns_is_no_folder(volume: Path, part: str) -> None:
    planted = as_user(ALICE, lambda: throw(volume))
    os.chown(planted / part, BOB, BOB)
    assert as_user(ALICE, lambda: throw(volume)) != planted
    [problem] = problems(volume)
    assert "belongs to uid 1002" in problem.what


@pytest.mark.parametrize("part", ["", "orphans", "reserve"])
def test_what_an_acl_opens_to_others_is_no_folder(volume: Path, part: str) -> None:
    planted = as_user(ALICE, lambda: throw(volume))
    os.setxattr(planted / part, ACCESS, acl(*OPEN_TO_BOB))
    assert as_user(ALICE, lambda: throw(volume)) != planted
    assert len(problems(volume)) == 1


def test_an_acl_whose_mask_is_empty_opens_nothing(volume: Path) -> None:
    folder = as_user(ALICE, lambda: throw(volume))
    os.setxattr(folder, ACCESS, acl(*OPEN_TO_BOB))
    folder.chmod(0o700)
    with pytest.raises(PermissionError):
        as_user(BOB, lambda: os.listdir(folder))
    assert as_user(ALICE, lambda: throw(volume)) == folder
    assert_silent(volume)


def test_a_default_acl_opens_nothing_of_what_is_made_in_a_folder(volume: Path) -> None:
    folder = as_user(ALICE, lambda: throw(volume))
    for part in ("", *PARTS):
        os.setxattr(folder / part, DEFAULT, acl(*OPEN_TO_BOB))
    assert as_user(ALICE, lambda: throw(volume)) == folder
    for path in (folder / "orphans").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert_silent(volume)


@pytest.mark.parametrize("part", ["", "orphans"])
def test_what_is_mounted_over_is_no_folder(volume: Path, part: str) -> None:
    planted = as_user(ALICE, lambda: throw(volume))
    make_tree(volume / "over", Dir(mode=0o700, owner=(ALICE, ALICE)))
    with bind_mount(volume / "over", planted / part):
        assert as_user(ALICE, lambda: throw(volume)) != planted
        [problem] = problems(volume)
        assert "mounted over" in problem.what


def test_of_two_folders_the_plain_one_is_used_and_the_other_told(volume: Path) -> None:
    planted = as_user(ALICE, lambda: throw(volume))
    planted.chmod(0o750)
    other = as_user(ALICE, lambda: throw(volume))
    planted.chmod(0o700)
    assert as_user(ALICE, lambda: throw(volume)) == planted
    assert {os.fsdecode(entry.path).split("/")[-3] for entry in entries(volume)} == {planted.name}
    [problem] = problems(volume)
    assert problem.where == str(other)
    assert f"new/{ALICE} is used" in problem.what


# What a look costs


def plant_many(volume: Path, n_names: int) -> None:
    """Names like folders, all of one user's making."""

    def act() -> None:
        users = volume / ".trashd/new"
        (users / "file").touch()
        for n in range(n_names // 5):
            (users / f"{20_000 + n}").mkdir()
            (users / f"{BOB}.{n:012x}").mkdir()
            (users / f"{ALICE}.{n:012x}").mkdir(0o700)
            os.link(users / "file", users / f"{70_000 + n}")
            (users / f"{90_000 + n}").symlink_to("0")

    as_user(BOB, act)


def test_thousands_of_planted_names_are_told_in_a_few_lines(volume: Path) -> None:
    plant_many(volume, 500)
    found_problems = problems(volume)
    assert len(found_problems) == 4
    assert "more names of uid 1002" in found_problems[-1].what


def test_a_look_of_roots_makes_nothing_in_a_folder_that_nobody_used(volume: Path) -> None:
    as_user(ALICE, lambda: folder_of(volume, ALICE).mkdir(0o700))
    recover_all(volume)
    entries(volume)
    assert_silent(volume)
    assert os.listdir(folder_of(volume, ALICE)) == []
    as_user(ALICE, lambda: throw(volume))
    assert folders(volume) == [str(ALICE)]


def test_a_look_of_roots_fills_no_reserve_of_a_folder_that_nobody_used(volume: Path) -> None:
    as_user(ALICE, lambda: make(volume))
    recover_all(volume)
    assert_silent(volume)
    assert os.listdir(folder_of(volume, ALICE) / "reserve") == []


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
