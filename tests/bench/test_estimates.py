"""Medians with an interval, and what they say of a target."""

from random import Random

import pytest

from bench.estimates import coverage, estimate
from bench.verdicts import Target, judged, times, times_best, value

OURS, THEIRS, OTHERS = "ours", "theirs", "others"


def test_five_rounds_have_no_95_percent_and_six_have() -> None:
    assert estimate([1, 2, 3, 4, 5]).confidence == pytest.approx(0.9375)
    assert estimate([1, 2, 3, 4, 5, 6]).confidence == pytest.approx(0.96875)


@pytest.mark.parametrize("n", [6, 9, 25])
def test_the_interval_holds_the_true_median_as_often_as_it_says(n: int) -> None:
    """Of a distribution with a long tail, as times have."""
    random, n_samples = Random(n), 4000
    found = (estimate([random.paretovariate(1) for _ in range(n)]) for _ in range(n_samples))
    n_held = sum(one.low <= 2 <= one.high for one in found)
    k = max(k for k in range(1, n) if coverage(n, k) >= 0.95)
    assert n_held / n_samples == pytest.approx(coverage(n, k), abs=0.015)


def test_a_ratio_is_within_its_round() -> None:
    """A round in which all took ten times as long says what the others say."""
    rounds = [{OURS: 1, THEIRS: 2}, {OURS: 10, THEIRS: 20}, {OURS: 1, THEIRS: 2}]
    assert times(OURS, THEIRS)(rounds) == [0.5, 0.5, 0.5]


def test_the_best_rival_is_the_same_in_all_rounds() -> None:
    rounds = [{OURS: 1, THEIRS: 2, OTHERS: 4}, {OURS: 1, THEIRS: 2, OTHERS: 1}, {OURS: 1, THEIRS: 2, OTHERS: 4}]
    assert times_best(OURS, [THEIRS, OTHERS])(rounds) == [0.5, 0.5, 0.5]


def test_a_subject_that_was_left_out_is_no_rival() -> None:
    assert times_best(OURS, [THEIRS, OTHERS])([{OURS: 1, OTHERS: 4}]) == [0.25]
    assert times_best(OURS, [THEIRS, OTHERS])([{OURS: 1}]) == []


@pytest.mark.parametrize(
    ("seconds", "word"),
    [
        ([0.5] * 6, "met"),
        ([0.5] * 5, "met?"),
        ([0.5, 0.5, 0.5, 0.5, 0.5, 1.5], "met?"),
        ([0.5, 1.5, 1.5, 1.5, 1.5, 1.5], "MISSED?"),
        ([1.5] * 6, "MISSED"),
    ],
)
def test_a_verdict_is_sure_where_all_of_the_interval_says_so(seconds: list[float], word: str) -> None:
    (verdict,) = judged([Target("", value(OURS), 1)], [{OURS: one} for one in seconds])
    assert verdict.word == word


def test_at_least_is_the_other_way_round() -> None:
    (verdict,) = judged([Target("", value(OURS), 200, is_least=True)], [{OURS: 240.0}] * 6)
    assert verdict.word == "met"
