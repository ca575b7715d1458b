"""Clocks that are set: an age is never told too high, and everything gets old at last."""

import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.orphan_age import (
    ERAS_MAX,
    STEP_NS,
    Clock,
    Era,
    FirstSights,
    Now,
    advance_clock,
    age_ns,
    cutoff_ns,
    decode_clock,
    encode_clock,
    first_sight,
    start_clock,
)

S = 1_000_000_000
DAY = 86_400 * S
NOW = 1_800_000_000 * S
FROM_FUTURE = NOW + 1000 * 365 * DAY


class World:
    """True time, and a wall clock that may be set; the service looks at both whenever something happens."""

    def __init__(self) -> None:
        self.true_ns = NOW
        self.wall_ns = NOW
        self.clock = start_clock(self.wall_ns, self.boot_ns())

    def boot_ns(self) -> int:
        return self.true_ns - NOW + 5 * S

    def pass_by(self, ns: int) -> None:
        self.true_ns += ns
        self.wall_ns += ns
        self.look()

    def pass_unseen(self, ns: int) -> None:
        self.true_ns += ns
        self.wall_ns += ns

    def set_clock(self, by_ns: int) -> None:
        self.look()
        self.set_unseen(by_ns)
        self.look()

    def set_unseen(self, by_ns: int) -> None:
        self.wall_ns = max(0, self.wall_ns + by_ns)

    def look(self) -> None:
        self.clock = advance_clock(self.clock, self.wall_ns, self.boot_ns())

    def restart(self) -> None:
        self.clock = start_clock(self.wall_ns, self.boot_ns(), saved=decode_clock(encode_clock(self.clock)))


class Made(NamedTuple):
    """An orphan: when it was truly made, and what its record says."""

    true_ns: int
    told_ns: int


class Step(NamedTuple):
    """What happens: so much time goes by, the clock is set by so much; a new orphan; a restart.

    is_watched  the service looks before and after the clock is set, not only in the end
    """

    passes_ns: int
    set_by_ns: int
    makes: bool
    restarts: bool
    is_watched: bool = True


steps = st.lists(
    st.builds(
        Step,
        st.integers(0, 3 * DAY),
        st.one_of(st.just(0), st.integers(-100 * DAY, 100 * DAY)),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    max_size=20,
)


def play(world: World, happening: list[Step]) -> list[Made]:
    """Let it happen; the orphans that were made, an older one first."""
    made = [Made(NOW - DAY, NOW - DAY)]
    for step in happening:
        (world.pass_by if step.is_watched else world.pass_unseen)(step.passes_ns)
        if abs(step.set_by_ns) >= STEP_NS:
            if step.makes:
                made.append(Made(world.true_ns, world.wall_ns))
            (world.set_clock if step.is_watched else world.set_unseen)(step.set_by_ns)
        if step.makes:
            made.append(Made(world.true_ns, world.wall_ns))
        if not step.is_watched:
            world.look()
        if step.restarts:
            world.restart()
    return made


@given(steps)
def test_no_jump_makes_an_orphan_older_than_it_is(happening: list[Step]) -> None:
    world = World()
    for orphan in play(world, happening):
        seen_now = first_sight(world.clock, orphan.told_ns)
        assert 0 <= age_ns(world.clock, orphan.told_ns, seen_now) <= world.true_ns - orphan.true_ns


@given(steps, st.integers(0, 2 * FROM_FUTURE))
def test_what_was_seen_gets_no_older_than_the_time_that_went_by(happening: list[Step], told_ns: int) -> None:
    world = World()
    sight, at_ns = first_sight(world.clock, told_ns), world.true_ns
    play(world, happening)
    passed_ns = world.true_ns - at_ns
    assert passed_ns <= age_ns(world.clock, told_ns, sight) <= sight.age_ns + passed_ns


@given(steps, st.integers(0, 60 * DAY))
def test_no_jump_makes_a_file_older_than_it_is(happening: list[Step], span_ns: int) -> None:
    world = World()
    for file in play(world, happening):
        if file.told_ns < cutoff_ns(world.clock, span_ns):
            assert world.true_ns - file.true_ns >= span_ns


@given(steps, st.integers(0, 60 * DAY))
def test_when_nobody_set_the_clock_for_so_long_it_is_believed(happening: list[Step], span_ns: int) -> None:
    world = World()
    play(world, happening)
    world.pass_by(span_ns + S)
    assert cutoff_ns(world.clock, span_ns) == world.wall_ns - span_ns


@given(steps, st.booleans())
def test_what_noted_both_clocks_has_its_age_whoever_set_one_and_remembers_nothing(
    happening: list[Step], remembers: bool
) -> None:
    world = World()
    told_ns, boot_ns, true_ns = world.wall_ns, world.boot_ns(), world.true_ns
    play(world, happening)
    now = Now(world.wall_ns, world.boot_ns(), "boot", (world.clock,) if remembers else ())
    assert now.since(told_ns, boot_ns, "boot") == world.true_ns - true_ns


@given(steps)
def test_what_was_made_in_another_boot_has_the_age_that_is_remembered(happening: list[Step]) -> None:
    world = World()
    for orphan in play(world, happening):
        now = Now(world.wall_ns, world.boot_ns(), "boot", (world.clock,))
        assert now.since(orphan.told_ns, 1, "another boot") <= world.true_ns - orphan.true_ns


@given(steps)
def test_without_a_jump_an_age_is_exact(happening: list[Step]) -> None:
    world = World()
    for orphan in play(world, [step._replace(set_by_ns=0) for step in happening]):
        sight = first_sight(world.clock, orphan.told_ns)
        assert age_ns(world.clock, orphan.told_ns, sight) == world.true_ns - orphan.true_ns


@given(st.lists(st.tuples(st.integers(0, DAY), st.integers(-STEP_NS // 2, STEP_NS // 2)), max_size=50))
def test_small_corrections_are_no_jumps(looks: list[tuple[int, int]]) -> None:
    clock, boot_ns = start_clock(NOW, 0), 0
    for passes_ns, error_ns in looks:
        boot_ns += passes_ns
        clock = advance_clock(clock, NOW + boot_ns + error_ns, boot_ns)
    assert clock.eras == (Era(0, 0),)


@pytest.mark.parametrize("by_ns", [400 * DAY, -400 * DAY])
def test_what_was_there_before_a_jump_keeps_its_age(by_ns: int) -> None:
    world = World()
    world.set_clock(by_ns)
    assert age_ns(world.clock, NOW - DAY, first_sight(world.clock, NOW - DAY)) == DAY


def test_what_was_made_while_the_clock_was_ahead_has_its_true_age_after_it_was_set_back() -> None:
    world = World()
    world.set_clock(10 * DAY)
    told_ns = world.wall_ns
    world.pass_by(DAY)
    world.set_clock(-10 * DAY)
    world.pass_by(DAY)
    assert age_ns(world.clock, told_ns, first_sight(world.clock, told_ns)) == 2 * DAY


@pytest.mark.parametrize("by_ns", [30 * DAY, -30 * DAY])
def test_what_was_made_before_anybody_noticed_that_the_clock_was_set_has_its_age(by_ns: int) -> None:
    """An idle service looks at the clocks when something comes: after what came was made."""
    world = World()
    world.pass_by(DAY)
    world.pass_unseen(DAY)
    before_ns = world.wall_ns
    world.pass_unseen(S)
    world.set_unseen(by_ns)
    after_ns = world.wall_ns
    world.pass_unseen(S)
    world.look()
    ages = [age_ns(world.clock, told_ns, first_sight(world.clock, told_ns)) for told_ns in (before_ns, after_ns)]
    assert ages == [2 * S, S]


def test_what_was_made_since_a_boot_with_a_clock_that_lost_its_time_is_no_older_than_the_boot() -> None:
    saved = start_clock(NOW, 100 * DAY, "first boot")
    clock = start_clock(5 * S, 5 * S, "second boot", saved)
    assert age_ns(clock, 2 * S, first_sight(clock, 2 * S)) == 3 * S


def test_one_from_the_future_is_as_old_as_it_is_known() -> None:
    world = World()
    sight = first_sight(world.clock, FROM_FUTURE)
    assert age_ns(world.clock, FROM_FUTURE, sight) == 0
    world.pass_by(DAY)
    assert age_ns(world.clock, FROM_FUTURE, sight) == DAY


def test_first_sight_of_one_from_the_future_is_remembered_until_it_is_gone() -> None:
    world, sights = World(), FirstSights(1)
    first = sights.get(world.clock, "a", FROM_FUTURE)
    world.pass_by(DAY)
    assert sights.get(world.clock, "a", FROM_FUTURE) == first
    assert sights.get(world.clock, "b", FROM_FUTURE) == first_sight(world.clock, FROM_FUTURE), "no more than one"
    sights.forget("a")
    assert sights.get(world.clock, "a", FROM_FUTURE) == first_sight(world.clock, FROM_FUTURE)


def test_one_that_tells_its_age_takes_no_memory() -> None:
    world, sights = World(), FirstSights(1)
    world.pass_by(DAY)
    sights.get(world.clock, "a", NOW)
    first = sights.get(world.clock, "b", FROM_FUTURE)
    world.pass_by(DAY)
    assert sights.get(world.clock, "b", FROM_FUTURE) == first


@given(steps, st.integers(0, 2 * FROM_FUTURE))
def test_looked_at_again_and_again_it_gets_old_at_last(happening: list[Step], told_ns: int) -> None:
    world, sights = World(), FirstSights(1)
    for step in happening:
        sights.get(world.clock, "a", told_ns)
        world.pass_by(step.passes_ns)
        world.set_clock(step.set_by_ns)
    sights.get(world.clock, "a", told_ns)
    world.pass_by(1000 * 366 * DAY)
    most_set_ns = len(happening) * 100 * DAY
    age = age_ns(world.clock, told_ns, sights.get(world.clock, "a", told_ns))
    assert age >= 1000 * 366 * DAY - most_set_ns


def test_clock_that_was_wrong_at_first_sight_makes_nothing_old_once_it_is_set_right() -> None:
    world = World()
    told_ns = world.true_ns
    world.wall_ns += 3650 * DAY
    world.clock = start_clock(world.wall_ns, world.boot_ns())
    sight = first_sight(world.clock, told_ns)
    assert age_ns(world.clock, told_ns, sight) == 3650 * DAY
    world.set_clock(-3650 * DAY)
    world.pass_by(DAY)
    assert age_ns(world.clock, told_ns, sight) <= 2 * DAY


def test_reboot_counts_the_time_that_the_machine_was_off() -> None:
    saved = start_clock(NOW, 100 * DAY, "first boot")
    clock = start_clock(NOW + 7 * DAY, 0, "second boot", saved)
    assert age_ns(clock, NOW, first_sight(clock, NOW)) == 7 * DAY


def test_reboot_with_a_clock_that_lost_its_time_takes_no_age_away_and_adds_none() -> None:
    saved = start_clock(NOW, 100 * DAY, "first boot")
    clock = start_clock(0, 0, "second boot", saved)
    assert age_ns(clock, NOW - DAY, first_sight(clock, NOW - DAY)) == DAY
    clock = advance_clock(clock, NOW + 7 * DAY, 60 * S)
    assert age_ns(clock, NOW - DAY, first_sight(clock, NOW - DAY)) == DAY + 60 * S


def test_jumps_that_are_remembered_are_bounded() -> None:
    world = World()
    for number in range(3 * ERAS_MAX):
        world.pass_by(DAY)
        world.set_clock((-1) ** number * DAY)
    assert len(world.clock.eras) == ERAS_MAX
    assert age_ns(world.clock, NOW, first_sight(world.clock, NOW)) <= world.true_ns - NOW


@given(steps)
def test_saved_clock_reads_back(happening: list[Step]) -> None:
    world = World()
    play(world, happening)
    assert decode_clock(encode_clock(world.clock)) == world.clock


@pytest.mark.parametrize(
    "text",
    [
        b"", b"null", b"[]", b"{}", b'{"wall_ns": 1}', b"\xff", b"[" * 100_000, b"9" * 5000,
        encode_clock(Clock(1, 1, 1, ())),
        encode_clock(Clock(1, 1, 1 << 63, (Era(0, 0),))),
        encode_clock(Clock(1, 1, 1, (Era(0, 0),))).replace(b"[0, 0, 0, 0]", b"[0, true, 0, 0]"),
        encode_clock(Clock(1, 1, 1, (Era(0, 0),))).replace(b"[[0, 0, 0, 0]]", b"7"),
        encode_clock(Clock(1, 1, 1, (Era(0, 0),) * 33)),
        encode_clock(Clock(1, 1, 1, (Era(0, 0, 0, -1),))),
    ],
)  # fmt: skip
def test_anything_else_that_was_saved_is_no_clock(text: bytes) -> None:
    assert decode_clock(text) is None


@given(steps, steps)
def test_the_eras_that_0_3_0_saved_make_no_orphan_older_than_it_is(before: list[Step], after: list[Step]) -> None:
    world, eras = World(), [[0, 0, 0]]
    made = [Made(NOW - DAY, NOW - DAY)]
    for step in before:
        made += play(world, [step._replace(restarts=False)])[1:]
        last = world.clock.eras[-1]
        if last.ahead_ns != eras[-1][1]:
            eras.append([last.since_ns, last.ahead_ns, last.seen_ns])
    saved = {**world.clock._asdict(), "eras": eras[-32:]}
    clock = decode_clock(json.dumps(saved).encode())
    assert clock is not None
    assert len(clock.eras) <= ERAS_MAX
    world.clock = clock
    made += play(world, after)[1:]
    for orphan in made:
        seen_now = first_sight(world.clock, orphan.told_ns)
        assert 0 <= age_ns(world.clock, orphan.told_ns, seen_now) <= world.true_ns - orphan.true_ns


@given(st.binary(max_size=200))
def test_reading_a_saved_clock_raises_nothing(text: bytes) -> None:
    decode_clock(text)
