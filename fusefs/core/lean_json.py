"""JSON as `json` writes and reads it, of the few values that a swap has, without what that loads.

The quoting and the scanner are json's own, in C; what they don't take is left to json (docs/decisions/0045).
"""

from __future__ import annotations

from fusefs.core.lean import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

try:
    from _json import encode_basestring_ascii as _quoted
    from _json import make_scanner
except ImportError:  # another Python than CPython has them elsewhere, or not at all
    from json.encoder import encode_basestring_ascii as _quoted

    make_scanner = None  # type: ignore[assignment, misc]


class _AsJsonReads:
    """What json.loads tells its scanner."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_int = int

    @staticmethod
    def parse_float(text: str) -> float:
        """Its value, or infinity."""
        return float(text)

    @staticmethod
    def parse_constant(name: str) -> float:
        """`NaN` and the like are left to json: nothing of ours says so."""
        raise ValueError(name)


_INFINITE = (float("inf"), float("-inf"))


class _AsStandardsRead(_AsJsonReads):
    """What that says, without numbers that no JSON could say again."""

    @staticmethod
    def parse_float(text: str) -> float:
        """Its value."""
        number = float(text)
        if number in _INFINITE:
            raise ValueError(f"{text} is too large")
        return number


def loads(text: bytes) -> Any:
    """As json.loads of UTF-8. Raises  ValueError, RecursionError"""
    try:
        return _scanned(text.decode(), _AsJsonReads)
    except _NOT_TAKEN:
        import json  # which says what is wrong with it, or reads what no writer of ours wrote

        return json.loads(text)


def loads_of_others(text: bytes) -> Any:
    """JSON that a user may have written: as RFC 8259 has it, and nothing that could not be written or printed again.

    So not in UTF-16, without NaN, infinity, numbers above what a float holds, and halves of characters.
    Raises  ValueError, RecursionError
    """
    plain = text.decode()
    try:
        found = _scanned(plain, _AsStandardsRead)
    except _NOT_TAKEN:
        import json

        how = _AsStandardsRead
        found = json.loads(plain, parse_float=how.parse_float, parse_constant=how.parse_constant)
    if "\\u" in plain:
        _refuse_halves(found)
    return found


_NOT_TAKEN = (ValueError, StopIteration, SystemError)
"""The last: the scanner means json's error, and as long as nobody has loaded json it has none to raise."""


def _scanned(plain: str, how: type[_AsJsonReads]) -> Any:
    """Raises  _NOT_TAKEN, RecursionError"""
    if make_scanner is None:
        raise ValueError
    plain = plain.strip(" \t\n\r")
    found, end = make_scanner(how)(plain, 0)  # type: ignore[arg-type]
    if end != len(plain):
        raise ValueError
    return found


def _refuse_halves(value: Any) -> None:
    """Raises  ValueError for a string with half of a character that takes two in UTF-16"""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        for pair in value.items():
            _refuse_halves(pair)
    elif isinstance(value, list | tuple):
        for one in value:
            _refuse_halves(one)


def dumps(value: Any, indent: int | None = None) -> str:
    """As json.dumps."""
    try:
        return _dumped(value, None if indent is None else "\n", " " * (indent or 0))
    except TypeError:
        import json

        return json.dumps(value, indent=indent)


def _dumped(value: Any, newline: str | None, step: str) -> str:
    """newline: with the blanks of the next line; None: all is on one. Raises  TypeError: it has something else in it"""
    if isinstance(value, str):
        return _quoted(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    deeper = newline and newline + step
    if isinstance(value, dict):
        pairs = [f"{_quoted(key)}: {_dumped(one, deeper, step)}" for key, one in value.items()]
        return _listed("{", pairs, "}", newline, step)
    if isinstance(value, list | tuple):
        return _listed("[", [_dumped(one, deeper, step) for one in value], "]", newline, step)
    raise TypeError


def _listed(first: str, items: list[str], last: str, newline: str | None, step: str) -> str:
    if not items:
        return first + last
    if newline is None:
        return first + ", ".join(items) + last
    return first + newline + step + ("," + newline + step).join(items) + newline + last
