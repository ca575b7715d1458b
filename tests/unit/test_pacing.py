"""core/pacing.py against a small model of a disk: how fast beside others, how soon it steps back, and comes again."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core import pacing
from fusefs.core.pacing import (
    FIRST_SHARE,
    HOLD,
    LEAST_SHARE,
    LONG_PERIOD_S,
    LONG_REST_S,
    MAX_NAMES_PER_CHECK,
    MOST_SHARE,
    PERIOD_S,
    REMOTE_LONG_PERIOD_S,
    REMOTE_PERIOD_S,
    REMOTE_REST_S,
    REST_S,
    SLICE_S,
    SMALL_SLICE_S,
    Backlog,
    NamesPerClockCheck,
    OtherUsers,
    PacingState,
    RateCaps,
    Requests,
    Sample,
    Speed,
    TokenBucket,
    rest_at,
)

NO_CAPS, NO_BACKLOG = RateCaps(), Backlog()
UNLINK_S = 20e-6
FSYNC_S = 0.0005
QUIET = Sample(is_rest=True, seconds=REST_S, io=0.0, memory=0.0, cpu=0.0, requests=Requests())
LOUD = QUIET._replace(io=0.1, requests=Requests(8, 0.001, 16, 0.008))


class Disk(NamedTuple):
    """A neighbour who fsyncs 400 times a second, and feels us more the more we do.

    is_there  at a moment
    hurt      the others' calls take so many times as long, per share of the time that we take
    """

    is_there: Callable[[float], bool]
    hurt: float = 0.0
    has_psi: bool = True
    has_device: bool = True

    def sample(self, begins_s: float, ends_s: float, *, is_rest: bool, share: float) -> Sample:
        """What a span looks like."""
        seconds = ends_s - begins_s
        n = round(400 * seconds) if self.is_there(begins_s) else 0
        fsync_s = FSYNC_S * (1.0 if is_rest else 1.0 + self.hurt * share)
        stalled = min(n * fsync_s / seconds, 1.0) if self.has_psi else None
        requests = Requests(0, 0.0, 2 * n, n * fsync_s) if self.has_device else None
        return Sample(is_rest, seconds, stalled, stalled, stalled, requests)


class Moment(NamedTuple):
    """What came out after a sample."""

    at_s: float
    state: PacingState
    tempo: Speed


def simulate(disk: Disk, seconds: float, caps: RateCaps = NO_CAPS, backlog: Backlog = NO_BACKLOG) -> Iterator[Moment]:
    """A reaper beside the disk's neighbour, sample by sample: rest, work, rest, work."""
    state, now_s = pacing.after_progress(PacingState(), 1000, 1000 * UNLINK_S), 0.0
    while now_s < seconds:
        tempo = pacing.speed_now(state, caps, backlog)
        begins_s, ends_s = rest_at(now_s, is_alone=tempo.is_alone)
        is_rest = begins_s <= now_s
        until_s = ends_s if is_rest else begins_s
        state = pacing.after_sample(state, disk.sample(now_s, until_s, is_rest=is_rest, share=tempo.share))
        if state.cannot_detect_others:
            state = pacing.after_probe(
                state, FSYNC_S * (1 if is_rest else 1 + disk.hurt * tempo.share), in_rest=is_rest
            )
        now_s = until_s + 1e-9
        yield Moment(now_s, state, pacing.speed_now(state, caps, backlog))


def always(_at_s: float) -> bool:
    return True


def never(_at_s: float) -> bool:
    return False


def last(moments: Iterator[Moment]) -> Moment:
    return list(moments)[-1]


def after(samples: list[Sample]) -> PacingState:
    state = PacingState()
    for sample in samples:
        state = pacing.after_sample(state, sample)
    return state


# Who is there.


def test_nothing_is_done_before_somebody_has_listened() -> None:
    assert pacing.speed_now(PacingState(), RateCaps(), Backlog()) == HOLD


def test_what_happens_before_the_first_rest_says_nothing() -> None:
    assert after([QUIET._replace(is_rest=False)]).others is OtherUsers.UNKNOWN


def test_alone_after_a_quiet_look_it_goes_at_full_speed() -> None:
    tempo = pacing.speed_now(after([QUIET]), RateCaps(), Backlog())
    assert (tempo.is_alone, tempo.share, tempo.is_limited()) == (True, 1.0, False)


def test_somebody_who_is_there_already_is_never_met_at_full_speed() -> None:
    assert not any(moment.tempo.is_alone for moment in simulate(Disk(always), 20.0))


def test_alone_it_stays_at_full_speed() -> None:
    assert all(moment.tempo.is_alone for moment in simulate(Disk(never), 20.0))


def test_one_loud_rest_is_the_journals_own() -> None:
    assert after([QUIET, QUIET, LOUD, QUIET, QUIET, LOUD, QUIET]).others is OtherUsers.NONE


def test_it_steps_back_within_a_second() -> None:
    stepped_s = next(moment.at_s for moment in simulate(Disk(lambda s: s >= 5.0), 20.0) if not moment.tempo.is_alone)
    assert 5.0 < stepped_s <= 6.0


def test_it_is_at_full_speed_again_within_five_seconds() -> None:
    moments = simulate(Disk(lambda s: s < 10.0), 20.0)
    again_s = next(moment.at_s for moment in moments if moment.tempo.is_alone)
    assert 10.0 < again_s <= 15.0


@pytest.mark.parametrize("sample", [
    QUIET._replace(io=0.03),
    QUIET._replace(memory=0.06),
    QUIET._replace(cpu=0.6),
    QUIET._replace(requests=Requests(n_reads=2)),
    QUIET._replace(requests=Requests(n_flushes=2)),
    QUIET._replace(io=None, requests=Requests(n_flushes=2)),
    QUIET._replace(io=0.03, requests=None),
])  # fmt: skip
def test_each_sign_of_somebody_is_enough(sample: Sample) -> None:
    assert after([QUIET, sample, sample]).others is OtherUsers.SOME


# How much beside others.


def test_who_is_not_felt_may_take_more() -> None:
    assert last(simulate(Disk(always, hurt=0.1), 60.0)).tempo.share == MOST_SHARE


def test_who_is_felt_steps_back_until_he_is_not() -> None:
    moment = last(simulate(Disk(always, hurt=2.0), 120.0))
    assert moment.state.share < FIRST_SHARE
    assert 1.0 + 2.0 * moment.tempo.share <= 1.35


@pytest.mark.parametrize("hurt", [0.5, 1.0, 2.0, 5.0, 20.0])
def test_the_share_does_not_swing(hurt: float) -> None:
    shares = [moment.tempo.share for moment in simulate(Disk(always, hurt), 300.0) if moment.at_s > 150.0]
    assert max(shares) <= 1.6 * min(shares)


def test_a_share_that_held_is_kept_for_the_next_time() -> None:
    disk = Disk(lambda s: s < 60.0 or s >= 80.0, hurt=5.0)
    held = [moment for moment in simulate(disk, 85.0) if moment.state.others is OtherUsers.SOME]
    before = [moment.tempo.share for moment in held if moment.at_s < 60.0][-1]
    again = next(moment.tempo.share for moment in held if moment.at_s > 80.0)
    assert again == pytest.approx(before, rel=0.35)


def test_what_can_not_be_measured_moves_nothing() -> None:
    only_writes = Disk(always, has_device=False)
    assert last(simulate(only_writes, 60.0)).tempo.share == FIRST_SHARE


def test_without_pressure_the_device_is_enough() -> None:
    moments = list(simulate(Disk(lambda s: s >= 5.0, hurt=3.0, has_psi=False), 60.0))
    assert moments[3].tempo.is_alone
    assert moments[-1].tempo.share < FIRST_SHARE


def test_without_pressure_and_device_it_goes_by_latency() -> None:
    deaf = Disk(always, hurt=3.0, has_psi=False, has_device=False)
    moment = last(simulate(deaf, 60.0))
    assert moment.tempo.share < FIRST_SHARE
    assert "so latency sets the pace" in pacing.describe(moment.state, RateCaps(), Backlog())


def test_by_latency_alone_it_comes_near_to_full_speed_where_nobody_is_hurt() -> None:
    assert last(simulate(Disk(never, has_psi=False, has_device=False), 120.0)).tempo.share >= 0.9


# What an administrator asks for.


def test_who_hurries_yields_to_nobody() -> None:
    tempo = pacing.speed_now(after([LOUD]), RateCaps(), Backlog(hurries=True))
    assert (tempo.is_alone, tempo.share, tempo.rests) == (True, 1.0, False)


def test_a_horizon_that_is_near_takes_what_it_needs() -> None:
    caps, backlog = RateCaps(horizon_s=3600), Backlog(n_entries=120_000_000)
    moment = last(simulate(Disk(always, hurt=9.0), 60.0, caps, backlog))
    assert moment.tempo.share == pytest.approx(120_000_000 * UNLINK_S / 3240)
    assert "horizon" in pacing.describe(moment.state, caps, backlog)


def test_a_horizon_that_is_far_changes_nothing() -> None:
    caps, backlog = RateCaps(horizon_s=86_400), Backlog(n_entries=1_000_000)
    disk = Disk(always, hurt=2.0)
    assert last(simulate(disk, 60.0, caps, backlog)) == last(simulate(disk, 60.0))


def test_a_backlog_is_done_within_its_horizon() -> None:
    state, left, now_s = pacing.after_progress(after([LOUD]), 1000, 1000 * UNLINK_S), 50_000_000.0, 0.0
    while left > 0 and now_s < 4000.0:
        tempo = pacing.speed_now(state._replace(share=LEAST_SHARE), RateCaps(horizon_s=3600), Backlog(int(left), now_s))
        left -= tempo.share / UNLINK_S
        now_s += 1.0
    assert now_s <= 3600.0


def test_what_a_horizon_needs_grows_smoothly() -> None:
    state = pacing.after_progress(after([LOUD]), 1000, 1000 * UNLINK_S)._replace(share=LEAST_SHARE)
    caps = RateCaps(horizon_s=3600)
    shares = [pacing.speed_now(state, caps, Backlog(5_000_000, float(s))).share for s in range(7200)]
    assert all(later <= 1.05 * sooner for sooner, later in itertools.pairwise(shares))


# Always.

SHARES = st.one_of(st.none(), st.floats(0.0, 1.0))
COUNTS = st.integers(0, 100_000)
SECONDS = st.floats(0.0, 1000.0)
REQUESTS = st.one_of(st.none(), st.builds(Requests, COUNTS, SECONDS, COUNTS, SECONDS))
SAMPLES = st.builds(Sample, st.booleans(), st.floats(0.001, 10.0), SHARES, SHARES, SHARES, REQUESTS)
LIMITS = st.one_of(st.none(), st.integers(1, 10**9))
CAPS = st.builds(RateCaps, LIMITS, LIMITS, LIMITS)
BACKLOGS = st.builds(Backlog, st.integers(0, 10**12), st.floats(0.0, 1e9), st.booleans())


@given(st.lists(SAMPLES, max_size=60), st.lists(st.tuples(st.floats(1e-6, 100.0), st.booleans())), CAPS, BACKLOGS)
def test_whatever_is_heard_caps_are_kept_and_nobody_starves(
    samples: list[Sample], probes: list[tuple[float, bool]], caps: RateCaps, backlog: Backlog
) -> None:
    state = after(samples)
    for seconds, in_rest in probes:
        state = pacing.after_probe(state, seconds, in_rest=in_rest)
    tempo = pacing.speed_now(state, caps, backlog)
    if state.others is OtherUsers.UNKNOWN and not backlog.hurries:
        assert tempo == HOLD
        return
    assert (tempo.entries_per_s, tempo.bytes_per_s) == (caps.entries_per_s, caps.bytes_per_s)
    assert LEAST_SHARE <= tempo.share <= 1.0
    assert pacing.describe(state, caps, backlog)


@given(st.floats(0.0, 1e8), st.booleans(), st.booleans())
def test_a_rest_is_now_or_comes_next(now_s: float, is_alone: bool, is_remote: bool) -> None:
    begins_s, ends_s = rest_at(now_s, is_alone=is_alone, is_remote=is_remote)
    period_s, rest_s = (PERIOD_S, REST_S) if is_alone else (LONG_PERIOD_S, LONG_REST_S)
    if is_remote:
        period_s, rest_s = REMOTE_PERIOD_S if is_alone else REMOTE_LONG_PERIOD_S, REMOTE_REST_S
    assert now_s < ends_s
    assert begins_s <= now_s + period_s
    assert ends_s - begins_s == pytest.approx(rest_s, abs=1e-6)


@given(st.floats(0.0, 1e8))
def test_the_short_rests_are_among_the_long_ones_or_between_them(now_s: float) -> None:
    long_begins_s, _ = rest_at(now_s, is_alone=False)
    assert rest_at(long_begins_s + 1e-6, is_alone=True)[0] == pytest.approx(long_begins_s, abs=1e-6)


@given(st.integers(1, 10**9), st.lists(st.floats(0, 10), min_size=1, max_size=50))
def test_no_more_is_given_out_than_the_time_allows(per_s: int, pauses: list[float]) -> None:
    now, taken = 0.0, 0
    allowance = TokenBucket(per_s, now)
    for pause in pauses:
        now += pause
        taken += allowance.take(now)
    assert taken <= per_s * (now + SLICE_S) + 1 + 1e-6 * per_s


@given(st.integers(1, 10**6), st.integers(0, 10**9))
def test_debt_is_waited_for(per_s: int, spent: int) -> None:
    allowance = TokenBucket(per_s, 0.0)
    taken = allowance.take(0.0)
    allowance.give_back(taken - spent)
    wait_s = allowance.wait_s()
    assert wait_s == pytest.approx(max(0.0, (max(per_s * SLICE_S, 1) - (max(per_s * SLICE_S, 1) - spent)) / per_s))
    assert allowance.take(wait_s * 1.001 + 1e-6) > 0


def test_what_is_given_back_may_be_taken_again() -> None:
    allowance = TokenBucket(1000, 0.0)
    taken = allowance.take(0.0)
    assert taken == 50
    assert allowance.take(0.0) == 0
    allowance.give_back(taken)
    assert allowance.take(0.0) == taken


def test_clock_is_looked_at_after_each_entry_that_takes_long() -> None:
    per_look = NamesPerClockCheck()
    per_look.begin(SLICE_S)
    for _ in range(10):
        per_look.record(per_look.n, per_look.n * 0.014)
    assert per_look.n == 1


def test_clock_is_looked_at_seldom_where_entries_cost_little() -> None:
    per_look = NamesPerClockCheck()
    per_look.begin(SLICE_S)
    for _ in range(5):
        per_look.record(per_look.n, per_look.n * 8e-6)
    assert per_look.n == MAX_NAMES_PER_CHECK


def test_the_next_slice_begins_with_less_than_the_last_came_to_and_not_with_one() -> None:
    per_look = NamesPerClockCheck()
    per_look.begin(SLICE_S)
    for _ in range(5):
        per_look.record(per_look.n, per_look.n * 8e-6)
    per_look.begin(SLICE_S)
    assert 1 < per_look.n < MAX_NAMES_PER_CHECK / 4
    for _ in range(10):
        per_look.record(per_look.n, per_look.n * 0.014)
    per_look.begin(SLICE_S)
    assert per_look.n == 1


def test_slice_that_meets_a_slow_stretch_looks_sooner_at_once() -> None:
    per_look = NamesPerClockCheck()
    per_look.begin(SMALL_SLICE_S)
    n = per_look.n
    assert 1 < n < MAX_NAMES_PER_CHECK
    per_look.record(n, n * 0.001)
    assert per_look.n * 0.001 <= SLICE_S / 10
