"""Bytes of which some are written as a mark and digits: `%0A` in records and registries, `\\012` by the kernel."""

from __future__ import annotations

_DIGITS = {8: b"01234567", 16: b"0123456789ABCDEF"}


def unescape(text: bytes, mark: bytes, n_digits: int, base: int) -> bytes:
    """What was meant; a mark without its digits is itself.

    By hand: one mount or store with an odd path would have each start of a command load `re`, which takes longer than
    a swap.
    """
    if mark not in text:
        return text
    first, *others = text.split(mark)
    plain = bytearray(first)
    for part in others:
        digits = part[:n_digits]
        is_byte = len(digits) == n_digits and not digits.strip(_DIGITS[base]) and int(digits, base) < 256
        plain += bytes((int(digits, base),)) + part[n_digits:] if is_byte else mark + part
    return bytes(plain)
