"""Lengths of time as people type and read them."""

from __future__ import annotations

import re

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
"""The units that are shown."""
_YEAR_S = 31_557_600
_WORDS = {
    "sec": 1, "second": 1, "min": 60, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800,
    "month": _YEAR_S // 12, "year": _YEAR_S,
}  # fmt: skip
"""Those that people type as well, and with an s at their end. A year has 365.25 days, as systemd.time(7) has it."""
_UNITS = {**SECONDS, "y": _YEAR_S, **_WORDS, **{f"{word}s": seconds for word, seconds in _WORDS.items()}}
_SUM = r"(?:[0-9]+ ?[a-z]+ ?)*[0-9]+ ?[a-z]+"
DURATION_MAX_S = 1000 * 366 * 86_400
"""A thousand years: what a record holds, and its end in nanoseconds too, whatever the clock says."""
_DIGITS_MAX = 15


def parse_duration(text: str) -> int:
    """Seconds from `90s`, `15m`, `24h`, `3d`, `2 weeks`, `1y` or sums such as `1d12h`; `0` is none.

    Another number alone is refused: 3 as a retention may mean days.
    Raises  ValueError with a message for the person who typed it
    """
    if re.fullmatch(r"0*[1-9][0-9]*", text, re.ASCII):
        short = text[:_DIGITS_MAX]
        raise ValueError(f"{short!r} of what? Write {short}s for seconds, {short}m, {short}h, {short}d for days")
    if not (re.fullmatch(r"[0-9]+", text) or is_duration(text)):
        raise ValueError(f"{text!r} is not a duration: write 90s, 15m, 24h, 3d, 2w, 1y or a sum such as 1d12h")
    parts = [(number.lstrip("0") or "0", unit) for number, unit in re.findall(r"([0-9]+) ?([a-z]*)", text)]
    seconds = sum(int(number[:_DIGITS_MAX]) * _UNITS.get(unit, 1) for number, unit in parts)
    if seconds > DURATION_MAX_S or any(len(number) > _DIGITS_MAX for number, _unit in parts):
        raise ValueError(f"{text[:40]!r} is too long: a thousand years are the most")
    return seconds


def is_duration(text: str) -> bool:
    """Whether a text is numbers with units, however large."""
    return bool(re.fullmatch(_SUM, text)) and all(unit in _UNITS for unit in re.findall(r"[a-z]+", text))


def format_duration(seconds: int) -> str:
    """The two largest units, such as `2d3h`; `0s` for none; a minus sign for the past."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    parts = []
    for unit in ("w", "d", "h", "m", "s"):
        count, seconds = divmod(seconds, SECONDS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2]) or "0s"
