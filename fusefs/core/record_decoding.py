"""Records read back: bytes that a user may have written, turned into a Record or an error.

Each value is held against what its key may have, by the checks below: a reap has no time to load msgspec, which does
the same (docs/decisions/0045). tests/unit/test_wire.py holds this against it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from fusefs.core.errors import BadRecord
from fusefs.core.identity import Identity
from fusefs.core.names import Name, RelPath, is_container_id, is_volume_id, join, split
from fusefs.core.record import (
    FORMAT,
    MAX_ENTERED,
    MAX_FAILURES,
    NOTE_MAX_CHARS,
    RECORD_MAX_BYTES,
    Entered,
    Failure,
    Invocation,
    KeptDirectory,
    Method,
    NewOwner,
    Record,
    TreeSize,
    unquote,
)

Check = Callable[[Any], Any]
"""The value that a key's value stands for. Raises  ValueError for any other"""

_WORD_CHARS = 400
_COUNT_MAX = (1 << 63) - 1


def decode(text: bytes) -> Record:
    """The Record in the bytes of a record.json.

    Raises  BadRecord for anything else: another format, a wrong type, a path that climbs, too many bytes
    """
    if len(text) > RECORD_MAX_BYTES:
        raise BadRecord("larger than 64 KiB")
    try:
        raw = _loads(text)
        version = _fields(raw, {"format": _number}, {})["format"]
        if version != FORMAT:
            raise BadRecord(f"format {version}, this trashd knows {FORMAT}", "use a newer trashd")
        told = _fields(raw, _NEEDED, _OTHERS)
        # Only a sweep may have been of the directory itself that holds the store.
        if told["origin"] == b"" and told["method"] is not Method.SWEEP:
            raise ValueError("origin: not a plain relative path")
        known = {"format", *_NEEDED, *_OTHERS}
        return Record(**told, unknown=tuple((key, value) for key, value in raw.items() if key not in known))
    except (ValueError, RecursionError) as error:
        raise BadRecord(str(error)) from error


def _loads(text: bytes) -> Any:
    """Parse JSON that a user may have written, as RFC 8259 defines it.

    Only UTF-8 is read, and nothing is taken that could not be written or printed again: NaN, infinity, numbers above
    what a float holds, half of a surrogate pair. Raises  ValueError, RecursionError
    """
    plain = text.decode()
    fields = json.loads(plain, parse_float=_parse_float, parse_constant=_refuse_constant)
    if "\\u" in plain:
        _refuse_half_surrogates(fields)
    return fields


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _refuse_half_surrogates(value: Any) -> None:
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        for pair in value.items():
            _refuse_half_surrogates(pair)
    elif isinstance(value, list | tuple):
        for one in value:
            _refuse_half_surrogates(one)


def _fields(value: Any, needed: dict[str, Check], others: dict[str, Check]) -> dict[str, Any]:
    """What an object says: all that is needed, and of others what is there. Further keys are not looked at."""
    if type(value) is not dict:
        raise ValueError("it is no object")
    if missing := needed.keys() - value.keys():
        raise ValueError(f"{min(missing)} is missing")
    told = {}
    for key, check in (needed | others).items():
        if key in value:
            try:
                told[key] = check(value[key])
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    return told


def _made_of(kind: Callable[..., Any], needed: dict[str, Check], value: Any) -> Any:
    """A value with such fields, of an object that has all of them."""
    return kind(**_fields(value, needed, {}))


def _or_none(check: Check, value: Any) -> Any:
    return None if value is None else check(value)


def _number(value: Any, least: int | None = None, most: int | None = None) -> int:
    if type(value) is not int:  # a bool is none
        raise ValueError("it is no whole number")
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError("the number is out of range")
    return value


_ino = partial(_number, least=0)
_count = partial(_number, least=0, most=_COUNT_MAX)
_mode = partial(_number, least=0, most=0o7777)


def _text(value: Any, most: int = RECORD_MAX_BYTES) -> str:
    if type(value) is not str:
        raise ValueError("it is no text")
    if len(value) > most:
        raise ValueError("the text is too long")
    return value


_word = partial(_text, most=_WORD_CHARS)


def _id(has_form: Callable[[str], bool], value: Any) -> str:
    if not has_form(_word(value)):
        raise ValueError("it has not the form of an id")
    return str(value)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("it is neither true nor false")
    return value


def _pairs(kind: Callable[..., Any], key: Check, content: Check, most: int, value: Any) -> tuple[Any, ...]:
    """One value of each key of an object and what it has."""
    if type(value) is not dict or len(value) > most:
        raise ValueError("it is no object, or has too many keys")
    return tuple([kind(key(one), content(its)) for one, its in value.items()])


def _several(check: Check, most: int, value: Any) -> tuple[Any, ...]:
    if type(value) is not list or len(value) > most:
        raise ValueError("it is no list, or too long")
    return tuple([check(one) for one in value])


def _bytes(value: Any) -> bytes:
    return unquote(_text(value))


def _path(value: Any) -> RelPath:
    return join(*split(_bytes(value)))


def _name(value: Any) -> Name:
    names = split(_bytes(value))
    if len(names) != 1:
        raise ValueError("what is kept lies in the top of the tree")
    return names[0]


_identity = partial(_or_none, partial(_made_of, Identity, {"handle": _word, "ino": _ino, "btime_ns": _number}))
_heir = partial(_made_of, NewOwner, {"uid": _count, "retention_s": partial(_or_none, _count)})
_failure = partial(_made_of, Failure, {"name": _bytes, "errno": _count, "call": _word})
_invocation = partial(_made_of, Invocation, {"id": _word, "session": _word})
_SIZE: dict[str, Check] = {
    "n_entries": partial(_or_none, _count),
    "n_bytes": _count,
    "linked_bytes": _count,
    "shared_bytes": partial(_or_none, _count),
    "is_at_least": _truth,
    "source": _word,
    "at_ns": _count,
}
_NEEDED: dict[str, Check] = {
    "id": partial(_id, is_container_id),
    "volume": partial(_id, is_volume_id),
    "method": lambda value: Method(_word(value)),
    "origin": lambda value: RelPath(b"") if value == "" else _or_none(_path, value),
    "parent": _identity,
    "fresh": _identity,
    "victim": _identity,
    "host": _word,
    "boot": _word,
    "created_ns": _count,
    "retention_s": partial(_or_none, _count),
}
_OTHERS: dict[str, Check] = {
    "superblock": _word,
    "boot_ns": partial(_or_none, _count),
    "note": partial(_text, most=NOTE_MAX_CHARS),
    "lent_mode": partial(_or_none, _mode),
    "lent_fresh": partial(_or_none, _mode),
    "target": partial(_or_none, _path),
    "heir": partial(_or_none, _heir),
    "kept": partial(_or_none, partial(_pairs, KeptDirectory, _name, _ino, RECORD_MAX_BYTES)),
    "moved_ns": partial(_or_none, _count),
    "taken_from": partial(_or_none, _count),
    "entered": partial(_pairs, Entered, _word, _count, MAX_ENTERED),
    "partial": _truth,
    "failures": partial(_several, _failure, MAX_FAILURES),
    "invocation": partial(_or_none, _invocation),
    "size": partial(_or_none, partial(_made_of, TreeSize, _SIZE)),
}
