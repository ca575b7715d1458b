"""Amounts of data, and rates, as people type and read them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MOST = 1 << 60


def parse_size(text: str) -> int:
    """Bytes from `4096`, `64K`, `1.5G`, `2TiB`: powers of 1024, as du and systemd have them.

    Raises  ValueError with a message for the person who typed it
    """
    found = re.fullmatch(r"([0-9]{1,19})(?:\.([0-9]{1,6}))?([kmgt]?)(?:i?b)?", text.strip().lower(), re.ASCII)
    if not found:
        raise ValueError(f"{text!r} is not a size: write 4096, 64K, 1.5G or 2T")
    whole, part, unit = found.groups(default="")
    scale: int = 10 ** len(part)
    size = int(whole) * _UNITS[unit] + int(part or 0) * _UNITS[unit] // scale
    if size > _MOST:
        raise ValueError(f"{text!r} is too large")
    return size


def parse_rate(text: str) -> int:
    """An amount a second, above 0: as a size, with or without `/s`.

    Raises  ValueError with a message for the person who typed it
    """
    try:
        rate = parse_size(re.sub(r"(?i)/s$", "", text.strip()))
    except ValueError:
        rate = 0
    if rate < 1:
        raise ValueError(f"{text!r} is not a rate: write 5000/s, 200M/s or 1.5G/s, at least 1")
    return rate


def format_size(n_bytes: int) -> str:
    """Three digits and a unit: `512 B`, `1.50 GiB`."""
    size, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "B" or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    return f"{size:.{digits}f} {unit}"
