"""Times of the day in which the reaper may work: local time, over midnight too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

DAY_MIN = 24 * 60


class TimeWindow(NamedTuple):
    """From one minute of the local day to another, which is not part of it; over midnight if it ends no later."""

    begins_min: int
    ends_min: int

    def __str__(self) -> str:
        """As it is typed: `22:00-06:00`."""
        return "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in self)


def parse_window(text: str) -> TimeWindow:
    """The window in `22:00-06:00`; a day ends at 24:00.

    Raises  ValueError
    """
    found = re.fullmatch(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})", text)
    if not found:
        raise ValueError(text)
    begins_h, begins_m, ends_h, ends_m = map(int, found.groups())
    begins, ends = begins_h * 60 + begins_m, ends_h * 60 + ends_m
    if begins_m > 59 or ends_m > 59 or begins >= DAY_MIN or ends > DAY_MIN or begins == ends:
        raise ValueError(text)
    return TimeWindow(begins, ends)


def opens_in_s(windows: Iterable[TimeWindow], second: int) -> int:
    """Seconds until work may be done; 0 if it may now, or if there are no windows.

    second  of the local day; on a day on which the clocks change look again at least every hour
    """
    return min((_opens_in_s(window, second) for window in windows), default=0)


def _opens_in_s(window: TimeWindow, second: int) -> int:
    begins, ends = window.begins_min * 60, window.ends_min * 60
    is_open = begins <= second < ends if begins < ends else second >= begins or second < ends
    return 0 if is_open else (begins - second) % (DAY_MIN * 60)
