"""Lengths of time as people type and read them."""

from __future__ import annotations

import re

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
DEFAULT_RETENTION_S = 24 * 3600
"""How long an orphan can be restored unless somebody says otherwise: a night to notice a mistake."""


def parse_duration(text: str) -> int:
    """Seconds from `90`, `90s`, `15m`, `24h`, `3d`, `2w` or sums such as `1d12h`.

    Raises  ValueError with a message for the person who typed it
    """
    if text.isdecimal() and text.isascii():
        return int(text)
    if not re.fullmatch(r"([0-9]+[smhdw])+", text):
        raise ValueError(f"{text!r} is not a duration: write 90s, 15m, 24h, 3d, 2w or a sum such as 1d12h")
    return sum(int(number) * SECONDS[unit] for number, unit in re.findall(r"([0-9]+)([smhdw])", text))


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
