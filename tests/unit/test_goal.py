"""The goal of a wait: parsed as the user typed it, and made bytes of for trees of a size."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.space_goal import DONE, TOLERANCE_BYTES, SpaceGoal, parse_goal

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("done", DONE),
        ("DONE", DONE),
        ("50%", SpaceGoal("50%", share=0.5)),
        ("12.5%", SpaceGoal("12.5%", share=0.125)),
        ("100%", SpaceGoal("100%", share=1.0)),
        ("100G", SpaceGoal("100g", n_bytes=100 << 30)),
        ("1.5GiB", SpaceGoal("1.5gib", n_bytes=3 << 29)),
        ("4096", SpaceGoal("4096", n_bytes=4096)),
        ("inodes:1M", SpaceGoal("inodes:1m", n_inodes=1_000_000)),
        ("inodes:1500", SpaceGoal("inodes:1500", n_inodes=1500)),
        ("inodes:2.5k", SpaceGoal("inodes:2.5k", n_inodes=2500)),
    ],
)
def test_a_goal_is_read_as_it_is_typed(text: str, goal: SpaceGoal) -> None:
    assert parse_goal(text) == goal


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0%",
        "101%",
        "-5%",
        "%",
        "x",
        "0",
        "-1G",
        "inodes:",
        "inodes:0",
        "inodes:x",
        "inodes:5%",
        "inodes:0.1",
        "5%%",
    ],
)
def test_nonsense_is_told_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="write "):
        parse_goal(text)


@given(st.text(max_size=30))
def test_whatever_is_typed_is_a_goal_or_a_message(text: str) -> None:
    with suppress(ValueError):
        goal = parse_goal(text)
        assert [goal.share, goal.n_bytes, goal.n_inodes].count(None) >= 2


def test_a_share_is_of_what_the_trees_took() -> None:
    assert parse_goal("50%").of(64 * MIB) == SpaceGoal("50%", n_bytes=32 * MIB)


def test_the_whole_tolerates_what_metadata_keeps() -> None:
    assert parse_goal("100%").of(4 * MIB).n_bytes == 4 * MIB - TOLERANCE_BYTES
    assert parse_goal("100%").of(1000 * MIB).n_bytes == 980 * MIB
    assert parse_goal("100%").of(0).n_bytes == 0


@pytest.mark.parametrize("text", ["done", "1M", "inodes:10"])
def test_any_other_goal_is_the_same_for_every_tree(text: str) -> None:
    assert parse_goal(text).of(64 * MIB) == parse_goal(text)


def test_only_done_needs_the_end_of_the_trees() -> None:
    assert DONE.is_done()
    assert not any(parse_goal(text).is_done() for text in ("1%", "1M", "inodes:1"))
