"""Moments as people type them: so long ago, a date, a time, or seconds since the epoch."""

from __future__ import annotations

import re
from collections.abc import Callable

from fusefs.core.durations import is_duration, parse_duration

SECOND_NS = 10**9
CivilTime = tuple[int, int, int, int, int, int, int, int, int]
"""Year to second, then -1 three times: as time.mktime takes it."""
_HOW = "write 7d or 12h for so long ago, 2026-11-01, 2026-11-01T12:00, @SECONDS, or ./FILE for a file's own time"
_SECONDS = r"@(-?)([0-9]{1,15})(?:\.([0-9]{1,9}))?"
_WHEN = r"""
    (?P<year>[0-9]{4})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})
    (?: [T ](?P<hour>[0-9]{2}):(?P<minute>[0-9]{2})(?::(?P<second>[0-9]{2}))?
        (?P<zone>Z|(?P<sign>[+-])(?P<ahead_h>[0-9]{2}):?(?P<ahead_m>[0-9]{2}))?
    )?
    """
_LAST = {"hour": 23, "minute": 59, "second": 59, "ahead_h": 23, "ahead_m": 59}


def is_path(text: str) -> bool:
    """Whether a moment is told by a file, whose own time it is: by a slash."""
    return "/" in text


def parse_when(
    text: str, now_ns: int, local_s: Callable[[CivilTime], float], cutoff_ns: Callable[[int], int] | None = None
) -> int:
    """Nanoseconds since the epoch from `7d` (before now), `2026-11-01`, `2026-11-01T12:00:00+01:00`, `@1793491200`.

    A date is its first moment. Without a zone it is local time. A number alone is refused: find means days by it, a
    duration seconds.
    local_s    seconds since the epoch of a local time: time.mktime
    cutoff_ns  the moment so many nanoseconds ago; None: by `now_ns` alone
    Raises     ValueError with a message for the person who typed it
    """
    told_ns = _told_ns(text, local_s)
    if told_ns is not None:
        return told_ns
    span_ns = parse_duration(text) * SECOND_NS
    return now_ns - span_ns if cutoff_ns is None else cutoff_ns(span_ns)


def _told_ns(text: str, local_s: Callable[[CivilTime], float]) -> int | None:
    """A moment that is not told by how long ago it was; None for one that is. Raises  ValueError"""
    if found := re.fullmatch(_SECONDS, text, re.ASCII):
        sign, whole, part = found.groups(default="")
        return int(sign + "1") * (int(whole) * SECOND_NS + int(part.ljust(9, "0")))
    if found := re.fullmatch(_WHEN, text, re.VERBOSE | re.ASCII):
        return _civil_ns(text, found, local_s)
    if re.fullmatch(r"[0-9]+", text, re.ASCII):
        raise ValueError(f"{text!r} of what? Write {text}d for days, {text}h for hours; a date as 2026-11-01")
    if not is_duration(text):
        if found := re.fullmatch(r"[0-9]+ ?([A-Za-z]+)", text):
            raise ValueError(f"{text!r}: there is no unit {found[1]!r}: s, m (minutes), h, d, w, month or y")
        raise ValueError(f"{text!r} is not a time: {_HOW}")
    return None


def _civil_ns(text: str, found: re.Match[str], local_s: Callable[[CivilTime], float]) -> int:
    """The moment of a date, perhaps with a time and a zone."""
    from calendar import monthrange
    from datetime import MAXYEAR, UTC, datetime, timedelta

    parts = {key: int(value) for key, value in found.groupdict(default="0").items() if value.isdecimal()}
    year, month, day = parts["year"], parts["month"], parts["day"]
    if not 1 <= year <= MAXYEAR or not 1 <= month <= 12:
        raise ValueError(f"{text!r}: there is no month {found['year']}-{found['month']}")
    _, n_days = monthrange(year, month)
    if not 1 <= day <= n_days:
        raise ValueError(f"{text!r}: there is no such day, {found['year']}-{found['month']} has {n_days}")
    for key, last in _LAST.items():
        if parts[key] > last:
            raise ValueError(f"{text!r}: there is no such time of the day or zone: {found[key]}")
    at = datetime(year, month, day, parts["hour"], parts["minute"], parts["second"], tzinfo=UTC)
    if found["zone"] is not None:
        ahead = timedelta(hours=parts["ahead_h"], minutes=parts["ahead_m"])
        since = at - datetime(1970, 1, 1, tzinfo=UTC) + (ahead if found["sign"] == "-" else -ahead)
        return (since.days * 86_400 + since.seconds) * SECOND_NS
    try:
        return int(local_s((year, month, day, at.hour, at.minute, at.second, -1, -1, -1))) * SECOND_NS
    except OverflowError as error:
        raise ValueError(f"{text!r} is too far away for this machine's clock") from error


def in_calendar(time_ns: int, pattern: str, beyond: str) -> str:
    """A time in UTC, as strftime has it. beyond: what is told of one that no calendar has"""
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(time_ns // SECOND_NS, UTC).strftime(pattern)
    except (ValueError, OverflowError):
        return beyond
