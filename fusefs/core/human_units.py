"""Sizes, rates, durations and times in the form in which users write and read them."""

from __future__ import annotations

import re
from collections.abc import Callable

_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MOST = 1 << 60
_WHOLE_DIGITS_MAX, _FRACTION_DIGITS_MAX = 19, 6
"""The most digits before and after the decimal point."""


def parse_size(text: str) -> int:
    """Parse a number of bytes such as `4096`, `64K`, `1.5G`, `2TiB`: units are powers of 1024, as in du and systemd.

    Raises  ValueError with a message for the user
    """
    amount = text.strip().lower()
    if amount.endswith("b"):
        amount = amount[:-1].removesuffix("i")
    number = amount.rstrip("kmgt")
    unit = amount[len(number) :]
    whole, point, part = number.partition(".")
    if (
        unit not in _SIZE_UNITS
        or not _is_number(whole, _WHOLE_DIGITS_MAX)
        or (point and not _is_number(part, _FRACTION_DIGITS_MAX))
    ):
        raise ValueError(f"{text!r} is not a size: write, for example, 4096, 64K, 1.5G or 2T")
    scale: int = 10 ** len(part)
    size = int(whole) * _SIZE_UNITS[unit] + int(part or 0) * _SIZE_UNITS[unit] // scale
    if size > _MOST:
        raise ValueError(f"{text!r} is too large")
    return size


def _is_number(digits: str, most: int) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= most


def parse_rate(text: str) -> int:
    """Parse a rate per second, greater than 0; it is written like a size, with or without `/s`.

    Raises  ValueError with a message for the user
    """
    amount = text.strip()
    try:
        rate = parse_size(amount[:-2] if amount.lower().endswith("/s") else amount)
    except ValueError:
        rate = 0
    if rate < 1:
        raise ValueError(f"{text!r} is not a rate: write, for example, 5000/s, 200M/s or 1.5G/s; the minimum is 1/s")
    return rate


def format_size(n_bytes: int) -> str:
    """Format a size with about three digits and a unit: `512 B`, `1.50 GiB`."""
    size, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "B" or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    return f"{size:.{digits}f} {unit}"


SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LARGEST_FIRST = tuple(reversed(SECONDS.items()))
"""The units used for output."""
_YEAR_S = 31_557_600
_UNIT_NAMES = {
    "sec": 1, "second": 1, "min": 60, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800,
    "month": _YEAR_S // 12, "year": _YEAR_S,
}  # fmt: skip
"""More units that users may write, with or without a final s. A year has 365.25 days, as in systemd.time(7)."""
_DURATION_UNITS = {
    **SECONDS,
    "y": _YEAR_S,
    **_UNIT_NAMES,
    **{f"{word}s": seconds for word, seconds in _UNIT_NAMES.items()},
}
_SUM = r"(?:[0-9]+ ?[a-z]+ ?)*[0-9]+ ?[a-z]+"
DURATION_MAX_S = 1000 * 366 * 86_400
"""A thousand years: the longest retention."""
_DURATION_DIGITS_MAX = 15


def parse_duration(text: str) -> int:
    """Parse `90s`, `15m`, `24h`, `3d`, `2 weeks`, `1y` or a sum such as `1d12h` to seconds; `0` needs no unit.

    Any other number without a unit is refused, since a user who writes 3 as a retention may mean days.
    Raises  ValueError with a message for the user
    """
    if re.fullmatch(r"0*[1-9][0-9]*", text, re.ASCII):
        short = text[:_DURATION_DIGITS_MAX]
        raise ValueError(
            f"{short!r} has no unit: write {short}s, {short}m, {short}h or {short}d for seconds, minutes, hours or days"
        )
    if not (re.fullmatch(r"[0-9]+", text) or is_duration(text)):
        raise ValueError(
            f"{text!r} is not a duration: write, for example, 90s, 15m, 24h, 3d, 2w, 1y or a sum such as 1d12h"
        )
    parts = [(number.lstrip("0") or "0", unit) for number, unit in re.findall(r"([0-9]+) ?([a-z]*)", text)]
    seconds = sum(int(number[:_DURATION_DIGITS_MAX]) * _DURATION_UNITS.get(unit, 1) for number, unit in parts)
    if seconds > DURATION_MAX_S or any(len(number) > _DURATION_DIGITS_MAX for number, _unit in parts):
        raise ValueError(f"{text[:40]!r} is too long: the maximum is a thousand years")
    return seconds


def is_duration(text: str) -> bool:
    """Whether a text consists of numbers with units, however large they are."""
    return bool(re.fullmatch(_SUM, text)) and all(unit in _DURATION_UNITS for unit in re.findall(r"[a-z]+", text))


def format_duration(seconds: int) -> str:
    """Format a duration with its two largest units, as in `2d3h`; 0 is `0s`, and negative ones have a minus sign."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    text = ""
    for unit, unit_s in _LARGEST_FIRST:
        if seconds >= unit_s:
            count, seconds = divmod(seconds, unit_s)
            if text:
                return f"{text}{count}{unit}"
            text = f"{count}{unit}"
    return text or "0s"


SECOND_NS = 10**9
CivilTime = tuple[int, int, int, int, int, int, int, int, int]
"""Year to second, then -1 three times, as time.mktime expects it."""
_TIME_HELP = (
    "write, for example, 7d or 12h (ago), 2026-11-01, 2026-11-01T12:00, @SECONDS, or ./FILE for the time of a file"
)
_SECONDS = r"@(-?)([0-9]{1,15})(?:\.([0-9]{1,9}))?"
_WHEN = r"""
    (?P<year>[0-9]{4})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})
    (?: [T ](?P<hour>[0-9]{2}):(?P<minute>[0-9]{2})(?::(?P<second>[0-9]{2}))?
        (?P<zone>Z|(?P<sign>[+-])(?P<ahead_h>[0-9]{2}):?(?P<ahead_m>[0-9]{2}))?
    )?
    """
_LAST = {"hour": 23, "minute": 59, "second": 59, "ahead_h": 23, "ahead_m": 59}


def is_file_time(text: str) -> bool:
    """Whether a text names a file whose time is to be used, that is, whether it contains a slash."""
    return "/" in text


def parse_time(
    text: str, now_ns: int, local_s: Callable[[CivilTime], float], cutoff_ns: Callable[[int], int] | None = None
) -> int:
    """Parse `7d` (ago), `2026-11-01`, `2026-11-01T12:00:00+01:00` or `@1793491200` to nanoseconds since the epoch.

    A date means its first moment. A time without a time zone is local time. A number without a unit is refused: find
    would interpret it as days, and other trashd options as seconds.
    local_s    converts local time to seconds since the epoch: time.mktime
    cutoff_ns  converts an age in nanoseconds to a time; None: the age is subtracted from `now_ns`
    Raises     ValueError with a message for the user
    """
    if match := re.fullmatch(_SECONDS, text, re.ASCII):
        sign, whole, part = match.groups(default="")
        return int(sign + "1") * (int(whole) * SECOND_NS + int(part.ljust(9, "0")))
    if match := re.fullmatch(_WHEN, text, re.VERBOSE | re.ASCII):
        return _civil_ns(text, match, local_s)
    if re.fullmatch(r"[0-9]+", text, re.ASCII):
        raise ValueError(f"{text!r} has no unit: write {text}d for days, {text}h for hours, or a date (2026-11-01)")
    if not is_duration(text):
        if match := re.fullmatch(r"[0-9]+ ?([A-Za-z]+)", text):
            raise ValueError(f"{text!r}: unknown unit {match[1]!r}: use s, m (minutes), h, d, w, month or y")
        raise ValueError(f"{text!r} is not a time: {_TIME_HELP}")
    span_ns = parse_duration(text) * SECOND_NS
    return now_ns - span_ns if cutoff_ns is None else cutoff_ns(span_ns)


def _civil_ns(text: str, match: re.Match[str], local_s: Callable[[CivilTime], float]) -> int:
    """Convert a date, which may have a time and a time zone, to nanoseconds since the epoch."""
    from calendar import monthrange
    from datetime import MAXYEAR, UTC, datetime, timedelta

    parts = {key: int(value) for key, value in match.groupdict(default="0").items() if value.isdecimal()}
    year, month, day = parts["year"], parts["month"], parts["day"]
    if not 1 <= year <= MAXYEAR or not 1 <= month <= 12:
        raise ValueError(f"{text!r}: there is no month {match['year']}-{match['month']}")
    _, n_days = monthrange(year, month)
    if not 1 <= day <= n_days:
        raise ValueError(f"{text!r}: there is no such day: {match['year']}-{match['month']} has {n_days} days")
    for key, last in _LAST.items():
        if parts[key] > last:
            raise ValueError(f"{text!r}: invalid time of day or time zone: {match[key]}")
    moment = datetime(year, month, day, parts["hour"], parts["minute"], parts["second"], tzinfo=UTC)
    if match["zone"] is not None:
        ahead = timedelta(hours=parts["ahead_h"], minutes=parts["ahead_m"])
        since = moment - datetime(1970, 1, 1, tzinfo=UTC) + (ahead if match["sign"] == "-" else -ahead)
        return (since.days * 86_400 + since.seconds) * SECOND_NS
    try:
        return int(local_s((year, month, day, moment.hour, moment.minute, moment.second, -1, -1, -1))) * SECOND_NS
    except OverflowError as error:
        raise ValueError(f"{text!r} is out of the range of this machine's clock") from error


def format_utc(time_ns: int, pattern: str, beyond: str) -> str:
    """Format a time in UTC with strftime. beyond: the result for a time outside the calendar"""
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(time_ns // SECOND_NS, UTC).strftime(pattern)
    except (ValueError, OverflowError, OSError):  # OSError: a year that does not fit into an int (EOVERFLOW)
        return beyond
