"""Rates: what may be spent over a time is bounded by it, whatever is asked for when."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.human_units import format_size, parse_rate, parse_size
from fusefs.core.pacing import NAMES_AT_ONCE, SLICE_S, SMALL_SLICE_S, NamesPerLook, TokenBucket


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


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("64K", 65536), ("1.5g", 3 << 29), ("2TiB", 2 << 40), ("5kB", 5120), (" 7 ", 7)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_sizes_that_no_float_holds_are_exact() -> None:
    assert parse_size(str((1 << 60) - 1)) == (1 << 60) - 1


@pytest.mark.parametrize("text", ["", "K", "-1", "1e3", "1,5G", "1 G G", "٣", "9999999999T", "5/s"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|large"):
        parse_size(text)


@given(st.text("0159.kKmtTiIbB -\n\u0663\u00b2", max_size=8) | st.text("0123456789", min_size=16, max_size=22))
def test_a_size_has_the_form_of_one(text: str) -> None:
    form = re.compile(r"([0-9]{1,19})(\.[0-9]{1,6})?[kmgt]?(i?b)?", re.ASCII)
    is_size = form.fullmatch(text.strip().lower()) is not None
    told = ""
    try:
        parse_size(text)
    except ValueError as error:
        told = str(error)
    assert is_size == ("is not a size" not in told)


@pytest.mark.parametrize(("text", "rate"), [("5000/s", 5000), ("5000", 5000), ("200M/S", 200 << 20)])
def test_rates_may_say_per_second(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["0", "0/s", "0.2", "5/m", "/s"])
def test_rate_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (10 << 30, "10.0 GiB"), (1 << 60, "1024 PiB")]
)
def test_sizes_are_told_in_three_digits(size: int, text: str) -> None:
    assert format_size(size) == text


def test_clock_is_looked_at_after_each_entry_that_takes_long() -> None:
    per_look = NamesPerLook()
    per_look.begin(SLICE_S)
    for _ in range(10):
        per_look.took(per_look.n, per_look.n * 0.014)
    assert per_look.n == 1


def test_clock_is_looked_at_seldom_where_entries_cost_little() -> None:
    per_look = NamesPerLook()
    per_look.begin(SLICE_S)
    for _ in range(5):
        per_look.took(per_look.n, per_look.n * 8e-6)
    assert per_look.n == NAMES_AT_ONCE


def test_the_next_slice_begins_with_less_than_the_last_came_to_and_not_with_one() -> None:
    per_look = NamesPerLook()
    per_look.begin(SLICE_S)
    for _ in range(5):
        per_look.took(per_look.n, per_look.n * 8e-6)
    per_look.begin(SLICE_S)
    assert 1 < per_look.n < NAMES_AT_ONCE / 4
    for _ in range(10):
        per_look.took(per_look.n, per_look.n * 0.014)
    per_look.begin(SLICE_S)
    assert per_look.n == 1


def test_slice_that_meets_a_slow_stretch_looks_sooner_at_once() -> None:
    per_look = NamesPerLook()
    per_look.begin(SMALL_SLICE_S)
    n = per_look.n
    assert 1 < n < NAMES_AT_ONCE
    per_look.took(n, n * 0.001)
    assert per_look.n * 0.001 <= SLICE_S / 10
