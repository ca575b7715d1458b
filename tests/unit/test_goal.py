"""The goal of a wait: read as it is typed, reached when it is there, and called impossible only if it is."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.freed_space import SpaceCourse, SpaceKeeper, SpaceKept, Survey, Waited, WaitStep
from fusefs.core.space_goal import (
    ALL,
    SpaceCourses,
    SpaceGoal,
    conclude_goal,
    decide_goal,
    explain_impossible,
    is_reached,
    parse_goal,
    wanted_bytes,
)

MIB = 1 << 20
PATIENCE_S = 30.0
TREE = Survey(1000, 64 * MIB, 0, 0, 0, False)
BYTES = st.integers(0, 1 << 50)
SURVEYS = st.builds(Survey, BYTES, BYTES, BYTES, BYTES, st.integers(0, 1), st.booleans())
GOALS = st.one_of(
    st.just(ALL),
    st.floats(0.001, 1).map(lambda share: SpaceGoal("%", share=share)),
    st.integers(1, 1 << 50).map(lambda n: SpaceGoal("bytes", n_bytes=n)),
    st.integers(1, 1 << 50).map(lambda n: SpaceGoal("inodes", n_inodes=n)),
)


def courses(came: int, came_inodes: int | None = 0, grown_at_s: float = 0.0) -> SpaceCourses:
    """So much came since a moment at which some was free."""
    inodes = None if came_inodes is None else SpaceCourse(7, 7 + came_inodes, 7 + came_inodes, grown_at_s)
    return SpaceCourses(SpaceCourse(5, 5 + came, 5 + came, grown_at_s), inodes)


COURSES = st.builds(courses, BYTES, st.one_of(st.none(), st.integers(0, 1 << 50)))


# Typed


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("done", ALL),
        ("DONE", ALL),
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


# Reached


def test_a_part_is_of_what_the_trees_took() -> None:
    half = parse_goal("50%")
    assert wanted_bytes(half, TREE) == 32 * MIB
    assert not is_reached(half, TREE, courses(32 * MIB - 1))
    assert is_reached(half, TREE, courses(32 * MIB))


def test_an_amount_is_meant_to_the_byte() -> None:
    assert not is_reached(parse_goal("1M"), TREE, courses(MIB - 1))
    assert is_reached(parse_goal("1M"), TREE, courses(MIB))


def test_inodes_count_by_themselves() -> None:
    goal = parse_goal("inodes:10")
    assert not is_reached(goal, TREE, courses(64 * MIB, 9))
    assert is_reached(goal, TREE, courses(0, 10))
    assert not is_reached(goal, TREE, courses(64 * MIB, None))


@given(SURVEYS, COURSES)
def test_all_is_reached_by_the_end_of_the_trees_alone(survey: Survey, ways: SpaceCourses) -> None:
    assert not is_reached(ALL, survey, ways)


@given(GOALS, SURVEYS, COURSES, BYTES)
def test_more_space_never_makes_a_goal_less_reached(
    goal: SpaceGoal, survey: Survey, ways: SpaceCourses, more: int
) -> None:
    grown = ways._replace(space=ways.space._replace(highest=ways.space.highest + more))
    assert is_reached(goal, survey, grown) or not is_reached(goal, survey, ways)


# When to end


def test_what_is_reached_is_not_waited_for() -> None:
    assert decide_goal(parse_goal("50%"), TREE, courses(40 * MIB), [], 0.0, PATIENCE_S) is WaitStep.DONE


def test_a_part_is_waited_for_as_long_as_the_whole() -> None:
    some = courses(10 * MIB)
    assert decide_goal(parse_goal("50%"), TREE, some, [], PATIENCE_S - 1, PATIENCE_S) is WaitStep.KEEP_WAITING
    assert decide_goal(parse_goal("50%"), TREE, some, [], PATIENCE_S, PATIENCE_S) is WaitStep.GIVE_UP


def test_what_a_reason_keeps_is_not_waited_for() -> None:
    held = SpaceKept(SpaceKeeper.OPEN, 54 * MIB, "")
    assert decide_goal(parse_goal("50%"), TREE, courses(10 * MIB), [held], 0.0, PATIENCE_S) is WaitStep.DONE


def test_inodes_may_come_after_the_blocks_but_not_long_after() -> None:
    goal, blocks = parse_goal("inodes:1000"), courses(64 * MIB, 500)
    assert decide_goal(goal, TREE, blocks, [], 2.9, PATIENCE_S) is WaitStep.KEEP_WAITING
    assert decide_goal(goal, TREE, blocks, [], 3.0, PATIENCE_S) is WaitStep.GIVE_UP


@given(GOALS, SURVEYS, COURSES, st.floats(0, 1e6))
def test_waiting_ends_for_every_goal(goal: SpaceGoal, survey: Survey, ways: SpaceCourses, now_s: float) -> None:
    assert decide_goal(goal, survey, ways, [], now_s, 0.0) is not WaitStep.KEEP_WAITING


# What is told


def waited(came: int, *reasons: SpaceKept) -> Waited:
    return Waited(came, 64 * MIB, reasons, not reasons)


def test_all_is_reached_if_the_rest_is_kept_as_somebody_meant() -> None:
    links, held = SpaceKept(SpaceKeeper.LINKS, MIB, ""), SpaceKept(SpaceKeeper.OPEN, MIB, "")
    assert conclude_goal(ALL, TREE, courses(63 * MIB), waited(63 * MIB, links)).is_reached
    assert not conclude_goal(ALL, TREE, courses(62 * MIB), waited(62 * MIB, links, held)).is_reached


def test_what_is_missing_is_not_told_of_a_goal_that_is_reached() -> None:
    unknown = SpaceKept(SpaceKeeper.UNKNOWN, 24 * MIB, "")
    met = conclude_goal(parse_goal("50%"), TREE, courses(40 * MIB), waited(40 * MIB, unknown))
    assert (met.is_reached, met.waited.reasons) == (True, ())


def test_the_whole_is_every_part_though_a_little_is_missing() -> None:
    assert conclude_goal(parse_goal("100%"), TREE, courses(64 * MIB - 4096), waited(64 * MIB - 4096)).is_reached


def test_an_amount_that_the_whole_does_not_make_is_not_reached_and_told_so() -> None:
    met = conclude_goal(parse_goal("1G"), TREE, courses(64 * MIB), waited(64 * MIB))
    assert not met.is_reached
    assert [reason.kind for reason in met.waited.reasons] == [SpaceKeeper.LESS]
    assert "64.0 MiB" in met.waited.reasons[0].detail


# What can't be


def test_more_than_the_trees_take_can_not_come() -> None:
    reason = explain_impossible(parse_goal("1G"), TREE)
    assert reason is not None
    assert (reason.kind, reason.n_bytes) == (SpaceKeeper.LESS, (1 << 30) - 64 * MIB)
    assert explain_impossible(parse_goal("64M"), TREE) is None


def test_what_has_other_names_can_not_come() -> None:
    linked = TREE._replace(linked_bytes=40 * MIB)
    reason = explain_impossible(parse_goal("50%"), linked)
    assert reason is not None
    assert "other names outside keep 40.0 MiB" in reason.detail
    assert explain_impossible(parse_goal("30%"), linked) is None


def test_what_is_only_maybe_shared_may_come() -> None:
    assert explain_impossible(parse_goal("100%"), TREE._replace(shared_bytes=64 * MIB)) is None


def test_more_inodes_than_names_can_not_come() -> None:
    reason = explain_impossible(parse_goal("inodes:1001"), TREE)
    assert reason is not None
    assert "1,000 entries" in reason.detail
    assert explain_impossible(parse_goal("inodes:1000"), TREE) is None


@given(GOALS, SURVEYS)
def test_nothing_is_impossible_that_was_not_counted_whole(goal: SpaceGoal, survey: Survey) -> None:
    assert explain_impossible(goal, survey._replace(n_failed=1)) is None
    assert explain_impossible(goal, survey._replace(is_at_least=True)) is None


@given(SURVEYS)
def test_all_that_can_come_can_always_come(survey: Survey) -> None:
    assert explain_impossible(ALL, survey) is None
