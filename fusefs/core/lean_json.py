"""JSON as `json` writes and reads it, of the few values that a swap has, without what that loads.

The quoting and the scanner are json's own, in C; what they don't take is left to json (docs/decisions/0045).
"""

from __future__ import annotations

from fusefs.core.lean import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
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
    parse_float, parse_int = float, int

    @staticmethod
    def parse_constant(name: str) -> float:
        """`NaN` and the like are left to json: nothing of ours says so."""
        raise ValueError(name)


_scan: Callable[[str, int], tuple[Any, int]] | None = (
    None if make_scanner is None else make_scanner(_AsJsonReads)  # type: ignore[arg-type]
)


def loads(text: bytes) -> Any:
    """As json.loads of UTF-8. Raises  ValueError, RecursionError"""
    try:
        plain = text.decode().strip(" \t\n\r")
        if _scan is not None:
            found, end = _scan(plain, 0)
            if end == len(plain):
                return found
    except (ValueError, StopIteration, SystemError):
        pass  # the last: the scanner means json's error, and as long as nobody has loaded json it has none to raise
    import json  # which says what is wrong with it, or reads what no writer of ours wrote

    return json.loads(text)


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
