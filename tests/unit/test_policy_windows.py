"""Windows: open from the first minute to before the last, over midnight too."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.policy import DAY_MIN, TimeWindow, opens_in_s, parse_window

H = 3600
minutes = st.integers(0, DAY_MIN - 1)
windows = st.tuples(minutes, minutes).filter(lambda pair: pair[0] != pair[1]).map(lambda pair: TimeWindow(*pair))
seconds = st.integers(0, 24 * H - 1)


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("22:00-06:00", TimeWindow(1320, 360)),
        ("9:30-12:00", TimeWindow(570, 720)),
        ("00:00-24:00", TimeWindow(0, 1440)),
    ],
)
def test_window_is_typed_as_two_times(text: str, window: TimeWindow) -> None:
    assert parse_window(text) == window


@pytest.mark.parametrize(
    "text", ["", "22-06", "24:00-06:00", "22:00-24:01", "22:60-06:00", "06:00-06:00", "22:00 - 06:00", "\u0661:00-2:00"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_window(text)


@given(windows)
def test_shown_window_reads_back(window: TimeWindow) -> None:
    assert parse_window(str(window)) == window


@pytest.mark.parametrize(
    ("second", "waits_s"),
    [(22 * H, 0), (23 * H + 3599, 0), (0, 0), (6 * H - 1, 0), (6 * H, 16 * H), (22 * H - 1, 1)],
)
def test_window_over_midnight(second: int, waits_s: int) -> None:
    assert opens_in_s([TimeWindow(1320, 360)], second) == waits_s


def test_without_windows_it_is_always_open() -> None:
    assert opens_in_s([], 12 * H) == 0


@given(st.lists(windows, min_size=1), seconds)
def test_of_several_the_next_counts(several: list[TimeWindow], second: int) -> None:
    assert opens_in_s(several, second) == min(opens_in_s([window], second) for window in several)


@given(windows, seconds)
def test_it_is_open_when_the_wait_is_over_and_not_before(window: TimeWindow, second: int) -> None:
    wait_s = opens_in_s([window], second)
    assert opens_in_s([window], (second + wait_s) % (24 * H)) == 0
    if wait_s:
        assert opens_in_s([window], (second + wait_s - 1) % (24 * H)) == 1
