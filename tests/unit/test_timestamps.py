"""Moments: what is typed is what is meant, and what could be meant in two ways is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.human_units import SECOND_NS, CivilTime, is_path, parse_when

NOW_NS = 1_793_491_200 * SECOND_NS + 7
OFFSETS = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
DATETIMES = st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29)).map(lambda at: at.replace(microsecond=0))  # noqa: DTZ001


def in_utc(civil: CivilTime) -> float:
    return (datetime(*civil[:6], tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()


def read(text: str) -> int:
    return parse_when(text, NOW_NS, in_utc)


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local time with summer time, told so that it needs no time zone files."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(("text", "seconds"), [("7d", 604_800), ("12h", 43_200), ("1d12h", 129_600), ("0s", 0)])
def test_duration_is_so_long_ago(text: str, seconds: int) -> None:
    assert read(text) == NOW_NS - seconds * SECOND_NS


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
    assert parse_when(at.isoformat(), NOW_NS, lambda civil: in_utc(civil) - 3600) == read(at.isoformat() + "+01:00")


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(("text", "same"), [("2026-07-01T12:00", "+02:00"), ("2026-12-01T12:00", "+01:00")])
def test_local_time_knows_summer(text: str, same: str) -> None:
    assert parse_when(text, NOW_NS, time.mktime) == read(text + same)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("2026-02-30", "no such day, 2026-02 has 28"),
        ("2025-02-29", "no such day, 2025-02 has 28"),
        ("2026-00-01", "no month 2026-00"),
        ("2026-13-01", "no month 2026-13"),
        ("0000-01-01", "no month 0000-01"),
        ("2026-11-00", "no such day"),
        ("2026-11-01T24:00", "no such time of the day or zone: 24"),
        ("2026-11-01T12:60", "no such time of the day or zone: 60"),
        ("2026-11-01T12:00:60Z", "no such time of the day or zone: 60"),
        ("2026-11-01T12:00+24:00", "no such time of the day or zone: 24"),
        ("7", "'7' of what"),
        ("20261101", "a date as 2026-11-01"),
        ("7q", "no unit 'q'"),
        ("3M", "no unit 'M'"),
        ("7fortnights", "no unit 'fortnights'"),
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
        parse_when(text, NOW_NS, time.mktime)


def test_a_file_is_told_by_a_slash() -> None:
    assert [is_path(text) for text in ("./7d", "/etc", "a/b", "7d", os.curdir)] == [True, True, True, False, False]
