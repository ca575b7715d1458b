"""The kinds of values in configurations and plans: how each is typed, read, and written again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta, convert

from fusefs.core.durations import SECONDS, parse_duration
from fusefs.core.names import is_volume_id
from fusefs.core.policy import Authority, TimeWindow, parse_window
from fusefs.core.sizes import parse_rate, parse_size

NONE = "none"
_SHOWN_MAX = 60
_AnyText = Annotated[str, Meta(min_length=1, pattern=r"\A[^\0]*\Z")]
_Text = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"\A[^\0]*\Z")]
_List = Annotated[list[Any], Meta(max_length=1000)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 60)]
_Positive = Annotated[int, Meta(ge=1, lt=1 << 60)]


class ValueKind(NamedTuple):
    """One kind of value.

    name   after `expected`: what it should be
    fix    how to type it
    read   what TOML has → the value; ValueError for anything else
    write  the value → TOML, which reads as the same value
    """

    name: str
    fix: str
    read: Callable[[Any], Any]
    write: Callable[[Any], str]


def shown(found: object) -> str:
    """A found value for a message: as TOML has it, cut, without control characters."""
    match found:
        case dict():
            text = "a table"
        case list() if any(isinstance(item, dict | list) for item in found):
            text = "an array"
        case list():
            text = f"[{', '.join(shown(item) for item in found[:_SHOWN_MAX])}]"
        case bool():
            text = str(found).lower()
        case str():
            text = quoted(found)
        case int():
            text = hex(found) if abs(found) >= 1 << 64 else str(found)  # a number of 5000 digits is no decimal text
        case _:
            text = str(found)
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "…"


def quoted(text: str) -> str:
    """A text as TOML's basic string, without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False))


def bare(text: str) -> str:
    """A key or path for a message, cut; in quotes unless it is plain."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text) and len(text) <= _SHOWN_MAX:
        return text
    return shown(text)


def listed(items: tuple[str, ...]) -> str:
    """Texts as TOML's array."""
    return f"[{', '.join(map(quoted, items))}]"


def _any_text(found: Any) -> str:
    return convert(found, _AnyText)


def _text(found: Any) -> str:
    return convert(found, _Text)


def read_texts(found: Any) -> tuple[str, ...]:
    """A text, or each of a list of them; ValueError for anything else."""
    return tuple(map(_any_text, found)) if isinstance(found, list) else (_any_text(found),)


def _typed(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    return lambda found: parse(_text(found))


def _items(found: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(map(read, convert(found, _List)))


def or_none(kind: ValueKind, none: str = NONE) -> ValueKind:
    """Values of a kind, or a word for none at all."""
    return ValueKind(
        f"{kind.name} or {quoted(none)}",
        f"{kind.fix}, or {quoted(none)}",
        lambda found: None if found == none else kind.read(found),
        lambda value: quoted(none) if value is None else kind.write(value),
    )


def _only(is_meant: Callable[[Any], bool], read: Callable[[Any], Any] = lambda found: found) -> Callable[[Any], Any]:
    """What reads a value for which something holds once it is read; ValueError for all others."""

    def read_checked(found: Any) -> Any:
        value = read(found)
        if not is_meant(value):
            raise ValueError(found)
        return value

    return read_checked


def one_of(*words: str) -> ValueKind:
    """One word of a few."""
    known = ", ".join(map(quoted, words))
    fix = f"write one of {known}" if len(words) > 1 else f"write {known}"
    return ValueKind(f"one of {known}", fix, _only(words.__contains__), str)


def _write_duration(seconds: int) -> str:
    unit = max((u for u in SECONDS if seconds % SECONDS[u] == 0 and seconds), key=SECONDS.__getitem__, default="s")
    return quoted(f"{seconds // SECONDS[unit]}{unit}")


def _size_text(size: int) -> str:
    for bits, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if size and size % (1 << bits) == 0:
            return f"{size >> bits}{unit}"
    return str(size)


def _read_share(found: Any) -> float:
    typed = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%", _text(found))
    if not typed or float(typed[1]) > 100:
        raise ValueError(found)
    return float(typed[1]) / 100


def _read_count(found: Any) -> int:
    value = convert(found, _Number | _Text)
    return value if isinstance(value, int) else parse_size(value)


def read_path(found: Any) -> bytes:
    """An absolute path without a slash at its end."""
    text = _text(found)
    parts = text.split("/")
    if parts[0] or ".." in parts or "." in parts:
        raise ValueError(text)
    return b"/" + "/".join(part for part in parts if part).encode()


def _write_path(path: bytes) -> str:
    return quoted(path.decode("utf-8", "backslashreplace"))


def _is_user(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_][^\s:,/*?\[\]]*", text) is not None and text.isprintable()


def _read_command(found: Any) -> tuple[str, ...] | None:
    words = _items(found, _word)
    if words and (not words[0].startswith("/") or words[0].endswith("/")):
        raise ValueError(found)
    return words or None


def _word(found: Any) -> str:
    return "" if found == "" else _text(found)


def _read_address(found: Any) -> tuple[str, int]:
    typed = re.fullmatch(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", _text(found))
    if not typed or not 0 < int(typed[2]) < 1 << 16:
        raise ValueError(found)
    return typed[1].strip("[]"), int(typed[2])


def _write_address(address: tuple[str, int]) -> str:
    host, port = address
    return quoted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


FLAG: Final = ValueKind(
    "true or false", "write true or false, without quotes", lambda found: convert(found, bool),
    lambda on: str(on).lower(),
)  # fmt: skip
DURATION: Final = ValueKind(
    "a duration", 'write "90s", "15m", "24h", "3d" or a sum such as "1d12h", in quotes', _typed(parse_duration),
    _write_duration,
)  # fmt: skip
TIME_LIMIT: Final = DURATION._replace(name="a duration above 0", read=_only(bool, DURATION.read))
SIZE: Final = ValueKind(
    "a size", 'write "500G", "1.5T" or "64M", in quotes', _typed(parse_size), lambda size: quoted(_size_text(size))
)
TEXT: Final = ValueKind("a text", "write one, in quotes; what else is meant is a rule of its own", _any_text, str)
TEXTS: Final = ValueKind("a text or a list of texts", 'write "…" or ["…", "…"]', read_texts, str)
NUMBER_OR_TEXT: Final = ValueKind(
    "a name or number", 'write "anna" or 1000', lambda found: str(convert(found, _Id | _AnyText)), str
)
POSITIVE: Final = ValueKind(
    "a number above 0", "write 100000, without quotes", lambda found: convert(found, _Positive), str
)
COUNT: Final = ValueKind("a number", 'write 1000000 or "1M"', _read_count, str)
RATE: Final = ValueKind(
    "a rate",
    'write 5000, "5000/s" or "200M/s"',
    lambda found: parse_rate(str(convert(found, _Positive | _Text))),
    lambda rate: quoted(_size_text(rate) + "/s"),
)
SHARE: Final = ValueKind("a share", 'write "10%", in quotes', _read_share, lambda share: quoted(f"{share * 100:.6g}%"))
PATH: Final = ValueKind("an absolute path", 'write "/scratch", without `..`', read_path, _write_path)
VOLUME_ID: Final = ValueKind(
    "a volume's id", "write the id that trashd status --json has of it", _only(is_volume_id, _text), quoted
)
FILE: Final = PATH._replace(read=lambda found: read_path(found).decode(), write=quoted)
PATTERNS: Final = ValueKind(
    "a list of path patterns", 'write ["/scratch/keep/*", "*.precious"]: each begins with / or *',
    lambda found: _items(found, _only(lambda text: text[0] in "/*?[", _text)), listed,
)  # fmt: skip
AUTHORITY: Final = ValueKind(
    "an authority", 'write "asker" or "root"', lambda found: Authority(_text(found)), lambda who: quoted(who.value)
)
USERS: Final = ValueKind(
    "a list of users", 'write ["ci", "12001"]: names or uids, no groups and no patterns',
    lambda found: _items(found, _only(_is_user, _text)), listed,
)  # fmt: skip
USER: Final = ValueKind("a user", 'write "nobody", a name or a uid', _only(_is_user, _text), quoted)
WINDOWS: Final = ValueKind(
    "a list of windows", 'write ["22:00-06:00", "12:00-13:00"]; for always leave it out or write []',
    lambda found: _items(found, _typed(parse_window)), lambda windows: listed(tuple(map(TimeWindow.__str__, windows))),
)  # fmt: skip
COMMAND: Final = ValueKind(
    "a command", 'write ["/usr/bin/logger", "gone"]: an absolute path and its arguments, no shell; [] for none',
    _read_command, lambda words: listed(words or ()),
)  # fmt: skip
ADDRESS: Final = ValueKind("an address", 'write "127.0.0.1:9817"', _read_address, _write_address)
