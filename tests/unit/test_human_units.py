"""Durations, moments, sizes and rates: what is typed is what is meant, and what could mean two things is refused."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.human_units import (
    DURATION_MAX_S,
    SECOND_NS,
    SECONDS,
    CivilTime,
    format_duration,
    format_size,
    is_file_time,
    parse_duration,
    parse_rate,
    parse_size,
    parse_time,
)

NOW_NS = 1_793_491_200 * SECOND_NS + 7
OFFSETS = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
DATETIMES = st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29)).map(lambda at: at.replace(microsecond=0))  # noqa: DTZ001


def in_utc(civil: CivilTime) -> float:
    return (datetime(*civil[:6], tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()


def read(text: str) -> int:
    return parse_time(text, NOW_NS, in_utc)


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local time with summer time, told so that it needs no time zone files."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("2026-11-01", "@1793491200"),
        ("2026-11-01T00:00", "@1793491200"),
        ("2026-11-01 00:00:00", "@1793491200"),
        ("2026-11-01T12:30:59Z", "@1793536259"),
        ("2026-11-01T01:00+01:00", "@1793491200"),
        ("2026-10-31T19:30:00-0430", "@1793491200"),
        ("1970-01-01", "@0"),
        ("1969-12-31T23:59:59Z", "@-1"),
        ("2024-02-29", "@1709164800"),
    ],
)
def test_date_is_its_first_moment(text: str, same: str) -> None:
    assert read(text) == read(same)


@pytest.mark.parametrize(
    ("text", "ns"), [("@0", 0), ("@1.5", 1_500_000_000), ("@-1.5", -1_500_000_000), ("@1.000000001", 1_000_000_001)]
)
def test_seconds_since_the_epoch_are_exact(text: str, ns: int) -> None:
    assert read(text) == ns


@given(DATETIMES, OFFSETS)
def test_a_zone_is_taken_off(at: datetime, zone: timezone) -> None:
    told = at.replace(tzinfo=zone).isoformat()
    assert datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=read(told) // SECOND_NS) == at.replace(tzinfo=zone)


@given(DATETIMES)
def test_without_a_zone_it_is_local_time(at: datetime) -> None:
    assert parse_time(at.isoformat(), NOW_NS, lambda civil: in_utc(civil) - 3600) == read(at.isoformat() + "+01:00")


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(("text", "same"), [("2026-07-01T12:00", "+02:00"), ("2026-12-01T12:00", "+01:00")])
def test_local_time_knows_summer(text: str, same: str) -> None:
    assert parse_time(text, NOW_NS, time.mktime) == read(text + same)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("2026-02-30", "there is no such day: 2026-02 has 28 days"),
        ("2025-02-29", "there is no such day: 2025-02 has 28 days"),
        ("2026-00-01", "no month 2026-00"),
        ("2026-13-01", "no month 2026-13"),
        ("0000-01-01", "no month 0000-01"),
        ("2026-11-00", "there is no such day"),
        ("2026-11-01T24:00", "invalid time of day or time zone: 24"),
        ("2026-11-01T12:60", "invalid time of day or time zone: 60"),
        ("2026-11-01T12:00:60Z", "invalid time of day or time zone: 60"),
        ("2026-11-01T12:00+24:00", "invalid time of day or time zone: 24"),
        ("7", "'7' has no unit"),
        ("20261101", r"a date \(2026-11-01\)"),
        ("7q", "unknown unit 'q'"),
        ("3M", "unknown unit 'M'"),
        ("7fortnights", "unknown unit 'fortnights'"),
        ("", "'' is not a time"),
        ("-7d", "is not a time"),
        ("+7d", "is not a time"),
        ("1d-2h", "is not a time"),
        ("yesterday", "is not a time"),
        ("2026-11", "is not a time"),
        ("2026-11-01T12", "is not a time"),
        ("2026-11-01Z", "is not a time"),
        ("@", "is not a time"),
        ("@1.", "is not a time"),
        ("2026-11-01\n", "is not a time"),
        ("\u0667d", "is not a time"),
        ("9999999w", "too long"),
    ],
)
def test_what_is_wrong_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(text)


@given(st.text(max_size=12) | st.from_regex(r"\A@?-?[0-9]{1,4}(-[0-9]{2}){0,2}([T ][0-9]{2}:[0-9]{2})?[Zd]?\Z"))
def test_reading_raises_nothing_but_value_error(text: str) -> None:
    with suppress(ValueError):
        parse_time(text, NOW_NS, time.mktime)


def test_a_file_is_told_by_a_slash() -> None:
    assert [is_file_time(text) for text in ("./7d", "/etc", "a/b", "7d", os.curdir)] == [True, True, True, False, False]


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
    with pytest.raises(ValueError, match="has no unit") as refused:
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


@given(st.integers(1, DURATION_MAX_S))
def test_past_is_the_same_with_a_minus(seconds: int) -> None:
    assert format_duration(-seconds) == "-" + format_duration(seconds)


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
