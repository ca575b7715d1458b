"""Makes names that users chose safe for a terminal or a log, and decodes the escapes in records and mountinfo."""

from __future__ import annotations

_DIGITS = {8: b"01234567", 16: b"0123456789ABCDEF"}


def unescape(text: bytes, mark: bytes, n_digits: int, base: int) -> bytes:
    """Decode escapes; a mark that is not followed by the required digits stands for itself.

    This avoids `re` on purpose: otherwise a single mount or store with an unusual path would make every command load
    that module, which takes longer than a swap.
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


_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_@%+=:,./-")


def printable(path: bytes) -> str:
    r"""Return the path with `\xNN` for control characters and invalid UTF-8, so that it has no escape sequences.

    Any user can choose names: printed as it is, a name could move an administrator's cursor or recolour a log.
    """
    text = path.decode("utf-8", "surrogateescape")
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def printable_text(text: str) -> str:
    """Make a text safe for a terminal; lone surrogates are escaped, too."""
    return text if text.isprintable() else printable(text.encode("utf-8", "backslashreplace"))


def shell_word(path: bytes) -> str:
    r"""Quote a path so that a terminal can show the word safely, and a shell reads exactly these bytes from it.

    A path with unprintable characters is written as `$'...'` with octal escapes, because no shell reads more than three
    digits of an octal escape.
    """
    text = path.decode("utf-8", "surrogateescape")
    if text and _PLAIN.issuperset(text):
        return text
    if text.isprintable():
        return "'" + text.replace("'", "'\"'\"'") + "'"
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(c if c.isprintable() else _octal(c) for c in quoted) + "'"


def _octal(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))


def _escape(character: str) -> str:
    raw = character.encode("utf-8", "surrogateescape")
    return "".join(f"\\x{byte:02x}" for byte in raw)
