"""`trashd doctor` as people type it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.make_trees import make_tree, owned
from tests.support.other_users import as_user
from tests.support.terminals import Terminal
from tests.support.trashd_command import CommandResult, done_well, swapped, trashd

pytestmark = pytest.mark.needs("root")

USER = 65_534


@pytest.mark.parametrize("words", [("--ended", "x"), ("--wait",)], ids=" ".join)
def test_options_of_a_repair_are_refused_without_it(volume: Path, words: tuple[str, ...]) -> None:
    assert trashd("doctor", "--json", *words, volume).code == 2


@pytest.mark.parametrize("words", [("--rescue", "x", "--to", "y"), ("--forget=x",)], ids=" ".join)
def test_removed_options_are_unknown_and_their_hint_is_mv(volume: Path, words: tuple[str, ...]) -> None:
    done = trashd("doctor", *words, volume)
    assert done.code == 2
    assert "  hint: mv CONTAINER " in done.err


def test_on_a_terminal_it_says_that_all_is_well(volume: Path) -> None:
    terminal = Terminal("doctor", volume)
    assert (terminal.end(), terminal.seen.strip()) == (0, f"{volume}: all is well")
    assert done_well("doctor", volume).out == ""


def test_without_a_volume_every_store_and_the_configuration_are_looked_at(volume: Path) -> None:
    """As a user: root's are the machine's."""
    volume.chmod(0o777)
    home, config = volume / "home", volume / "home/config/trashd/config.toml"
    config.parent.mkdir(parents=True)
    owned(home, USER)

    def doctor() -> CommandResult:
        return trashd("doctor", cwd=home, HOME=str(home), XDG_CONFIG_HOME=str(home / "config"))

    taken = as_user(USER, lambda: swapped(make_tree(home / "victim", {"file": "content"})))
    well = as_user(USER, doctor)
    assert (well.code, well.out) == (0, "")
    record = Path(taken["store"]) / "orphans" / taken["id"] / "record.json"
    whole = record.read_bytes()
    os.truncate(record, 40)
    config.write_text("nonsense = 1\n")
    ill = as_user(USER, doctor)
    assert ill.code == 1
    assert taken["id"] in ill.out
    assert f"{config}: nonsense: " in ill.out
    record.write_bytes(whole)
