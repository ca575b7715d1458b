"""What a shell is told that completes a command line."""

import pytest

from tests.support.trashd_command import trashd


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


def completed(typed: str) -> list[str]:
    """What trashd answers a shell that asks what could follow."""
    done = trashd(_TRASHD_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD=str(typed.count(" ")))
    assert done.code == 0
    return done.out.splitlines()
