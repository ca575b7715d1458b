"""What is listed fits the terminal, whatever paths are like; nothing is left out where no person reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.make_trees import make_tree
from tests.support.terminals import Terminal
from tests.support.trashd_command import done_well, swapped

pytestmark = pytest.mark.needs("root")

NOTE = "a note that is long enough to fill a line of its own, and then some"


@pytest.fixture
def deep(volume: Path) -> Path:
    """An orphan's origin that is longer than a line, and another one's that is not."""
    deep = volume / "/".join(["long-" * 20] * 2) / "the-end"
    deep.parent.mkdir(parents=True)
    swapped(make_tree(deep, {"file": "content"}), "--note", NOTE)
    return deep


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("command", ["list", "du"])
@pytest.mark.parametrize("columns", [60, 80, 132])
def test_no_line_is_longer_than_the_terminal(volume: Path, command: str, columns: int) -> None:
    terminal = Terminal(command, "--volume", volume, COLUMNS=str(columns))
    assert terminal.end() == 0
    lines = [line for line in terminal.seen.replace("\r", "").splitlines() if not line.startswith("trashd: ")]
    assert len(lines) > 1
    assert max(map(len, lines)) <= columns
    assert any(line.endswith("the-end") for line in lines)


def test_a_note_is_told_where_there_is_room(volume: Path, deep: Path) -> None:
    terminal = Terminal("list", "--volume", volume, COLUMNS="1000")
    assert terminal.end() == 0
    assert f"{deep}  # {NOTE}" in terminal.seen


def test_a_pipe_gets_all_of_it(volume: Path, deep: Path) -> None:
    assert done_well("list", "--volume", volume).out.endswith(f"{deep}  # {NOTE}\n")
    assert str(deep) in done_well("du", "--volume", volume).out
