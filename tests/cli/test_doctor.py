"""`trashd doctor --rescue` and `--forget` as people type them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.pty_session import Terminal
from tests.support.store_calls import assert_silent
from tests.support.trashd_command import Done, done_well, swapped, trashd

pytestmark = pytest.mark.needs("root")

USER = 65_534


def broken(volume: Path) -> str:
    """The id of an orphan whose record is cut short."""
    identifier: str = swapped(make_tree(volume / "victim", {"file": "content"}))["id"]
    os.truncate(volume / ".trashd/u/0/orphans" / identifier / "record.json", 40)
    return identifier


def test_what_the_hint_says_takes_it_out(volume: Path) -> None:
    identifier = broken(volume)
    for words in (("restore", identifier), ("reap", "--now", identifier)):
        done = trashd(*words, "--volume", volume)
        assert done.code == 7
        assert "trashd doctor --rescue ID --to PATH" in done.err
    done = done_well("doctor", "--rescue", identifier[-12:], "--to", volume / "rescued", volume)
    assert done.out.splitlines()[-1] == f"  now {volume}/rescued (record.json, tree)"
    assert (volume / "rescued/tree/file").read_text() == "content"
    assert done_well("doctor", volume).out == ""


def test_it_is_found_without_a_volume(volume: Path) -> None:
    identifier = broken(volume)
    done_well("doctor", "--rescue", identifier, "--to", "rescued", cwd=volume)
    assert (volume / "rescued/tree/file").read_text() == "content"


def test_what_is_given_up_goes_with_the_next_reap(volume: Path) -> None:
    identifier = broken(volume)
    done = done_well("doctor", "--forget", identifier, "--yes", volume)
    assert "trashd reap " in done.out
    done_well("reap", "--volume", volume)
    assert done_well("list", "--volume", volume).out == ""
    assert done_well("doctor", volume).out == ""


def test_it_is_given_up_after_a_question(volume: Path) -> None:
    identifier = broken(volume)
    for answer, code in (("n\n", 3), ("y\n", 0)):
        terminal = Terminal("doctor", "--forget", identifier, volume)
        terminal.wait_for("[y/N]")
        assert identifier in terminal.seen
        terminal.type(answer)
        assert terminal.end() == code


def test_nobody_is_asked_where_nobody_is(volume: Path) -> None:
    identifier = broken(volume)
    done = trashd("doctor", "--forget", identifier, volume)
    assert done.code == 2
    assert "--yes" in done.err
    done_well("doctor", "--forget", identifier, "--yes", volume)


def test_nothing_is_taken_where_something_is(volume: Path) -> None:
    identifier = broken(volume)
    done = trashd("doctor", "--rescue", identifier, "--to", volume / "victim", volume)
    assert done.code == 9
    assert os.listdir(volume / "victim") == []
    done_well("doctor", "--forget", identifier, "--yes", volume)


@pytest.mark.parametrize(
    "words",
    [
        ("--rescue", "x"),
        ("--to", "x"),
        ("--yes",),
        ("--rescue", "x", "--to", "y", "--repair"),
        ("--forget", "x", "--repair"),
    ],
    ids=" ".join,
)
def test_words_that_make_no_sense_are_refused(volume: Path, words: tuple[str, ...]) -> None:
    assert trashd("doctor", "--json", *words, volume).code == 2


@pytest.mark.parametrize("to", ["/", "..", "x/."])
def test_a_path_that_is_no_name_is_refused(volume: Path, to: str) -> None:
    identifier = broken(volume)
    assert trashd("doctor", "--rescue", identifier, "--to", to, volume, cwd=volume).code == 2
    done_well("doctor", "--forget", identifier, "--yes", volume)


def test_on_a_terminal_it_says_that_all_is_well(volume: Path) -> None:
    terminal = Terminal("doctor", volume)
    assert (terminal.end(), terminal.seen.strip()) == (0, f"{volume}: all is well")
    assert done_well("doctor", volume).out == ""


def test_without_a_volume_every_store_and_the_configuration_are_looked_at(volume: Path) -> None:
    """As a user: root's are the machine's."""
    volume.chmod(0o777)
    home, config = volume / "home", volume / "home/config/trashd/config.toml"
    config.parent.mkdir(parents=True)
    for path in (home, *home.rglob("*")):
        os.chown(path, USER, USER)

    def doctor() -> Done:
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
    assert_silent(volume)
