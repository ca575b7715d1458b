"""Help is found by whoever looks for it, and a mistyped command is nearly enough."""

from __future__ import annotations

import pytest

from fusefs.cli.group import REMOVED
from tests.support.trashd_command import done_well, trashd


@pytest.mark.parametrize(
    ("typed", "meant"), [("swp", "swap"), ("lst", "list"), ("restor", "restore"), ("empty", "reap")]
)
def test_who_mistypes_a_command_is_told_what_may_be_meant(typed: str, meant: str) -> None:
    done = trashd(typed)
    assert done.code == 2
    assert f"Did you mean {meant}" in done.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("service instal", "install"), ("plan shwo", "show"), ("config shw", "show")],
)
def test_who_mistypes_a_groups_command_is_told_too(typed: str, meant: str) -> None:
    done = trashd(*typed.split())
    assert done.code == 2
    assert "Did you mean" in done.err
    assert meant in done.err.splitlines()[-1]


@pytest.mark.parametrize(("command", "option"), sorted(REMOVED))
def test_an_option_that_is_gone_is_unknown_and_a_hint_replaces_it(command: str, option: str) -> None:
    done = trashd(*command.split(), option)
    assert done.code == 2
    assert f"hint: {REMOVED[command, option]}" in done.err


def test_what_is_like_nothing_is_no_command() -> None:
    done = trashd("xyzzy")
    assert (done.code, "Did you mean" in done.err) == (2, False)


@pytest.mark.parametrize("words", [(), ("swap",), ("service", "install")])
def test_help_is_a_command_too(words: tuple[str, ...]) -> None:
    assert done_well("help", *words).out == done_well(*words, "--help").out


def test_the_version_is_told_by_either_option() -> None:
    assert done_well("-V").out == done_well("--version").out
