"""What a shell is told that completes a command line."""

from pathlib import Path

import pytest

from tests.support.foreground_mount import until
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init
from tests.support.trashd_command import swapped, trashd

USER = 65_534


@pytest.mark.parametrize(
    ("typed", "offered"), [("trashd sw", "plain,sweep"), ("trashd swap --keep-", "plain,--keep-for")]
)
def test_a_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    assert offered in completed(typed)


def test_an_old_name_of_a_command_is_not_offered() -> None:
    assert completed("trashd rea") == ["plain,reap"]


@pytest.mark.parametrize("typed", ["trashd swap d", "trashd list --volume d", "trashd mount d"])
def test_a_shell_completes_paths_by_itself(typed: str) -> None:
    assert completed(typed) == ["file,d"]


@pytest.mark.needs("root")
@pytest.mark.parametrize("command", ["restore", "keep", "reap", "holders"])
def test_a_shell_completes_the_callers_own_ids_by_either_end(volume: Path, command: str) -> None:
    identifier = swapped(make_tree(volume / "job", {"file": ""}))["id"]
    end = identifier[-12:]
    # What is not found in a moment is not offered: a shell asks again.
    assert until(lambda: f"plain,{identifier}" in completed(f"trashd {command} {identifier[:-4]}"))
    assert until(lambda: completed(f"trashd {command} {end[:8]}") == [f"plain,{end}"])
    told = as_user(USER, lambda: completed(f"trashd {command} {end[:8]}"))
    assert f"plain,{end}" not in told


@pytest.mark.needs("root")
def test_a_path_is_a_path_wherever_an_id_may_be_meant(volume: Path) -> None:
    swapped(make_tree(volume / "job", {"file": ""}))
    for typed in ("./2", "2/", "job"):
        assert completed(f"trashd restore {typed}") == [f"file,{typed}"]


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize("is_listed", [False, True], ids=["mounted", "registered"])
def test_a_mount_that_never_answers_keeps_no_shell_waiting(*, is_listed: bool) -> None:
    with tmpfs_volume() as other:
        dead = other / "dead"
        dead.mkdir()
        if is_listed:
            init(dead)
        with silent_fuse(dead, 0):
            completed("trashd restore 2")  # what asks it waits for the end of the block, and may hold nothing of ours


def completed(typed: str) -> list[str]:
    """What trashd answers a shell that asks what could follow."""
    done = trashd(_TRASHD_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD=str(typed.count(" ")))
    assert done.code == 0
    return done.out.splitlines()
