"""Lengths of time as typed and read: what is said is what is meant, and nothing else is guessed."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.human_units import DURATION_MAX_S, SECONDS, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90s", 90),
        ("15m", 900),
        ("24h", 86_400),
        ("3d", 259_200),
        ("2w", 1_209_600),
        ("1y", 31_557_600),
        ("2 weeks", 1_209_600),
        ("1day", 86_400),
        ("1month", 2_629_800),
        ("90 min", 5400),
    ],
)
def test_number_and_unit_are_seconds(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


def test_sum_of_units_is_their_sum() -> None:
    assert parse_duration("1d12h30s") == 86_400 + 43_200 + 30
    assert parse_duration("1 day 12 hours") == 86_400 + 43_200


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "h",
        "1.5h",
        "-1h",
        "1  h",
        " 1h",
        "1h ",
        "1Y",
        "1 fortnight",
        "\u0663h",
        "\u0663",
        "1h\n",
        "0x10",
        "1h2",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["9" * 5000 + "w", "9" * 20 + "d", f"{DURATION_MAX_S + 1}s", "1" * 5000 + "s"])
def test_longer_than_a_record_can_hold_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too long"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["3", "90", "007", "9" * 5000])
def test_number_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="of what") as refused:
        parse_duration(text)
    assert len(str(refused.value)) < 150


@given(st.text(max_size=12))
def test_parsing_raises_nothing_but_value_error(text: str) -> None:
    with suppress(ValueError):
        assert 0 <= parse_duration(text) <= DURATION_MAX_S


@given(st.integers(0, DURATION_MAX_S))
def test_shown_duration_reads_back_as_at_most_itself(seconds: int) -> None:
    shown = format_duration(seconds)
    back = parse_duration(shown)
    assert back <= seconds < back + SECONDS[shown[-1]] or back == seconds


def test_the_two_largest_units_are_shown() -> None:
    assert format_duration(2 * 86_400 + 3 * 3600 + 59) == "2d3h"


def test_no_time_is_shown_as_seconds() -> None:
    assert format_duration(0) == "0s"


@given(st.integers(1, DURATION_MAX_S))
def test_past_is_the_same_with_a_minus(seconds: int) -> None:
    assert format_duration(-seconds) == "-" + format_duration(seconds)
