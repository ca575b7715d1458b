"""Amounts of data, and rates, as people type and read them."""

from __future__ import annotations

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MOST = 1 << 60
_WHOLE_DIGITS_MAX, _DIGITS_MAX = 19, 6
"""Before a point and after it."""


def parse_size(text: str) -> int:
    """Bytes from `4096`, `64K`, `1.5G`, `2TiB`: powers of 1024, as du and systemd have them.

    Raises  ValueError with a message for the person who typed it
    """
    amount = text.strip().lower()
    if amount.endswith("b"):
        amount = amount[:-1].removesuffix("i")
    number = amount.rstrip("kmgt")
    unit = amount[len(number) :]
    whole, point, part = number.partition(".")
    if unit not in _UNITS or not _is_number(whole, _WHOLE_DIGITS_MAX) or (point and not _is_number(part, _DIGITS_MAX)):
        raise ValueError(f"{text!r} is not a size: write 4096, 64K, 1.5G or 2T")
    scale: int = 10 ** len(part)
    size = int(whole) * _UNITS[unit] + int(part or 0) * _UNITS[unit] // scale
    if size > _MOST:
        raise ValueError(f"{text!r} is too large")
    return size


def _is_number(digits: str, most: int) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= most


def parse_rate(text: str) -> int:
    """An amount a second, above 0: as a size, with or without `/s`.

    Raises  ValueError with a message for the person who typed it
    """
    amount = text.strip()
    try:
        rate = parse_size(amount[:-2] if amount.lower().endswith("/s") else amount)
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
