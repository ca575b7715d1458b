"""Waiting for space: it ends, it does not end early, and what is missing is explained to the last byte."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.freed_space import (
    SpaceCourse,
    SpaceKeeper,
    SpaceKept,
    Survey,
    Waited,
    WaitStep,
    begin,
    conclude,
    decide,
    describe_unknown,
    foreseen,
    look,
    taken_bytes,
    tolerance_bytes,
    total,
)

MIB = 1 << 20
PATIENCE_S = 30.0
BYTES = st.integers(0, 1 << 50)
KINDS = st.sampled_from([SpaceKeeper.OPEN, SpaceKeeper.LINKS, SpaceKeeper.LEFT, SpaceKeeper.SHARED])
REASONS = st.lists(st.builds(SpaceKept, KINDS, BYTES, st.just("why")), max_size=5)
SURVEYS = st.builds(Survey, BYTES, BYTES, BYTES, BYTES, BYTES, st.booleans())


def course_of(*free_mib: int, before_mib: int = 100, expected_mib: int = 64) -> SpaceCourse:
    """Free space seen once a second."""
    course = begin(before_mib * MIB, 0)
    for at_s, free in enumerate(free_mib):
        course = look(course, expected_mib * MIB, free * MIB, float(at_s))
    return course


def step(course: SpaceCourse, now_s: float, *reasons: SpaceKept) -> WaitStep:
    return decide(course, 64 * MIB, reasons, now_s, PATIENCE_S)


def test_all_that_came_is_done() -> None:
    assert step(course_of(164), 0) is WaitStep.DONE


def test_nearly_all_is_all() -> None:
    assert step(course_of(163), 0) is WaitStep.DONE


def test_what_a_reason_explains_is_not_waited_for() -> None:
    assert step(course_of(124), 0) is WaitStep.KEEP_WAITING
    assert step(course_of(124), 0, SpaceKept(SpaceKeeper.OPEN, 40 * MIB, "")) is WaitStep.DONE


def test_growth_renews_the_patience() -> None:
    assert step(course_of(110), 29) is WaitStep.KEEP_WAITING
    assert step(course_of(110), 30) is WaitStep.GIVE_UP
    assert step(course_of(110, 120), 30) is WaitStep.KEEP_WAITING


def test_a_trickle_is_no_growth_but_adds_up() -> None:
    course = begin(0, 0)
    for at_s in range(20):
        course = look(course, 64 * MIB, at_s * (10 << 10), float(at_s))
    assert course.grown_at_s > 0
    course = look(course, 64 * MIB, course.grown + 1, 100.0)
    assert course.grown_at_s < 20


def test_what_is_only_maybe_shared_is_waited_for_but_not_long() -> None:
    shared = SpaceKept(SpaceKeeper.SHARED, 64 * MIB, "")
    assert step(course_of(100), 2.9, shared) is WaitStep.KEEP_WAITING
    assert step(course_of(100), 3.0, shared) is WaitStep.GIVE_UP


def test_what_came_and_was_used_again_by_others_has_come() -> None:
    course = course_of(164, 90)
    assert step(course, 1) is WaitStep.DONE
    assert conclude(course, 64 * MIB, [], "").is_complete


def test_conclusion_names_what_is_missing() -> None:
    links, shared = SpaceKept(SpaceKeeper.LINKS, 8 * MIB, "links"), SpaceKept(SpaceKeeper.SHARED, 99 * MIB, "shared")
    waited = conclude(course_of(110), 64 * MIB, [shared, links], "who knows")
    assert waited == Waited(10 * MIB, 64 * MIB, (links, shared._replace(n_bytes=46 * MIB)), False)
    waited = conclude(course_of(110), 64 * MIB, [links], "who knows")
    assert waited.reasons == (links, SpaceKept(SpaceKeeper.UNKNOWN, 46 * MIB, "who knows"))


def test_no_reason_is_told_for_what_came_all_the_same() -> None:
    assert conclude(course_of(164), 64 * MIB, [SpaceKept(SpaceKeeper.SHARED, 64 * MIB, "")], "") == Waited(
        64 * MIB, 64 * MIB, (), True
    )


def test_a_volume_that_others_filled_has_got_nothing() -> None:
    waited = conclude(course_of(50), 64 * MIB, [], "others")
    assert (waited.came_bytes, waited.reasons) == (0, (SpaceKept(SpaceKeeper.UNKNOWN, 64 * MIB, "others"),))


@given(BYTES, st.lists(BYTES, max_size=20), BYTES, REASONS, st.floats(0, 1e6), st.floats(0, 1e3))
def test_decision_is_total_and_done_means_explained(
    before: int, samples: list[int], expected: int, reasons: list[SpaceKept], now_s: float, patience_s: float
) -> None:
    course = begin(before, 0.0)
    for at_s, free in enumerate(samples):
        course = look(course, expected, free, float(at_s))
    if decide(course, expected, reasons, now_s, patience_s) is WaitStep.DONE:
        told = conclude(course, expected, reasons, "unknown")
        assert all(reason.kind is not SpaceKeeper.UNKNOWN for reason in told.reasons)


@given(st.integers(0, 64 * MIB), st.lists(st.integers(0, 64 * MIB), min_size=400, max_size=400))
def test_waiting_ends_whatever_others_do(before: int, samples: list[int]) -> None:
    """Each renewal of the patience needs a step of growth, and a volume has only so many."""
    course, at_s, n_renewed = begin(before, 0.0), 0.0, 0
    for free in samples:
        at_s += PATIENCE_S
        after = look(course, 64 * MIB, free, at_s)
        n_renewed += after.grown_at_s > course.grown_at_s
        course = after
    assert n_renewed <= 64 * MIB // (tolerance_bytes(64 * MIB) // 16) + 1
    assert decide(course, 128 * MIB, [], course.grown_at_s + PATIENCE_S, PATIENCE_S) is WaitStep.GIVE_UP


@given(BYTES, st.lists(BYTES, max_size=5), BYTES, REASONS)
def test_conclusion_accounts_for_every_byte(
    before: int, samples: list[int], expected: int, reasons: list[SpaceKept]
) -> None:
    course = begin(before, 0.0)
    for free in samples:
        course = look(course, expected, free, 1.0)
    waited = conclude(course, expected, reasons, "unknown")
    missing = expected - waited.came_bytes - sum(reason.n_bytes for reason in waited.reasons)
    assert missing <= tolerance_bytes(expected)
    assert waited.is_complete == (expected - waited.came_bytes <= tolerance_bytes(expected))
    assert not (waited.is_complete and waited.reasons)
    shared = [reason for reason in waited.reasons if reason.kind in (SpaceKeeper.SHARED, SpaceKeeper.UNKNOWN)]
    assert all(reason.n_bytes > 0 for reason in shared)


@given(st.lists(SURVEYS, max_size=4))
def test_total_adds_up(surveys: list[Survey]) -> None:
    whole = total(surveys)
    assert whole.n_bytes == sum(one.n_bytes for one in surveys)
    assert whole.n_failed == sum(one.n_failed for one in surveys)
    assert whole.is_at_least == any(one.is_at_least for one in surveys)


@given(SURVEYS, BYTES, REASONS)
def test_values_survive_the_way_through_a_child(survey: Survey, came: int, reasons: list[SpaceKept]) -> None:
    assert msgspec.json.decode(msgspec.json.encode(survey), type=Survey) == survey
    waited = Waited(came, survey.n_bytes, tuple(reasons), False)
    assert msgspec.json.decode(msgspec.json.encode(waited), type=Waited) == waited


def test_reasons_foreseen_are_those_that_keep_something() -> None:
    assert foreseen(Survey(9, 99, 0, 0, 0, False), 0) == []
    kinds = [reason.kind for reason in foreseen(Survey(9, 99, 1, 2, 0, False), 3)]
    assert kinds == [SpaceKeeper.LINKS, SpaceKeeper.LEFT, SpaceKeeper.SHARED]
    (links,) = foreseen(Survey(9, 99, 1, 0, 0, True), 0)
    assert "more" in links.detail


def test_a_guess_names_who_could_have_seen_more() -> None:
    assert "root" in describe_unknown(is_local=True, sees_all=False)
    assert "root" not in describe_unknown(is_local=True, sees_all=True)
    assert "server" in describe_unknown(is_local=False, sees_all=True)


def test_small_files_take_their_size_where_they_lie_in_the_metadata() -> None:
    assert taken_bytes(700, 8, 4096, 2048) == 700
    assert taken_bytes(700, 8, 4096, 0) == 4096
    assert taken_bytes(700, 4096, 4096, 2048) == 2 * MIB
    assert taken_bytes(0, 8, 4096, 2048) == 4096
    assert taken_bytes(1 << 40, 16, 4096, 2048) == 8192
