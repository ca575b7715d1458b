"""Reads TOML files: the kinds of values, and problems that name the key and what to write instead."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta, convert

from fusefs.core.errors import BadConfig, ConfigProblem
from fusefs.core.human_units import SECONDS, parse_duration, parse_rate, parse_size
from fusefs.core.names import is_volume_id
from fusefs.core.policy import DeleteAs, TimeWindow, parse_window

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

    name   what follows `expected` in a message
    fix    how to write such a value
    read   converts a TOML value; raises ValueError if it is of another kind
    write  converts a value to TOML, from which `read` returns the same value
    """

    name: str
    fix: str
    read: Callable[[Any], Any]
    write: Callable[[Any], str]


def format_value(value: object) -> str:
    """Format a value for a message: in TOML notation, shortened, without control characters."""
    match value:
        case dict():
            text = "a table"
        case list() if any(isinstance(item, dict | list) for item in value):
            text = "an array"
        case list():
            text = f"[{', '.join(format_value(item) for item in value[:_SHOWN_MAX])}]"
        case bool():
            text = str(value).lower()
        case str():
            text = quote_text(value)
        case int():
            text = hex(value) if abs(value) >= 1 << 64 else str(value)  # str() refuses a number of 5000 digits
        case _:
            text = str(value)
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "…"


def quote_text(text: str) -> str:
    """Format a text as a basic string in TOML, without control characters that a terminal would obey."""
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False))


def format_key(text: str) -> str:
    """Format a key or path for a message: shortened, and in quotes unless it is plain."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text) and len(text) <= _SHOWN_MAX:
        return text
    return format_value(text)


def format_array(items: tuple[str, ...]) -> str:
    return f"[{', '.join(map(quote_text, items))}]"


def _read_any_text(raw: Any) -> str:
    return convert(raw, _AnyText)


def _read_text(raw: Any) -> str:
    return convert(raw, _Text)


def read_texts(raw: Any) -> tuple[str, ...]:
    """Read one text or a list of texts. Raises  ValueError for anything else"""
    return tuple(map(_read_any_text, raw)) if isinstance(raw, list) else (_read_any_text(raw),)


def _text_reader(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    return lambda found: parse(_read_text(found))


def _read_items(raw: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(map(read, convert(raw, _List)))


def or_none(kind: ValueKind, none: str = NONE) -> ValueKind:
    """Return a kind that also accepts a word that stands for None."""
    return ValueKind(
        f"{kind.name} or {quote_text(none)}",
        f"{kind.fix}, or {quote_text(none)}",
        lambda found: None if found == none else kind.read(found),
        lambda value: quote_text(none) if value is None else kind.write(value),
    )


def _checked_reader(
    is_valid: Callable[[Any], bool], read: Callable[[Any], Any] = lambda found: found
) -> Callable[[Any], Any]:
    """Return a reader that accepts only values for which `is_valid` holds; it raises ValueError for all others."""

    def read_checked(raw: Any) -> Any:
        value = read(raw)
        if not is_valid(value):
            raise ValueError(raw)
        return value

    return read_checked


def one_of(*words: str) -> ValueKind:
    """Return the kind of a value that is one of a few words."""
    choices = ", ".join(map(quote_text, words))
    fix = f"write one of {choices}" if len(words) > 1 else f"write {choices}"
    return ValueKind(f"one of {choices}", fix, _checked_reader(words.__contains__), str)


def _write_duration(seconds: int) -> str:
    unit = max((u for u in SECONDS if seconds % SECONDS[u] == 0 and seconds), key=SECONDS.__getitem__, default="s")
    return quote_text(f"{seconds // SECONDS[unit]}{unit}")


def _size_text(size: int) -> str:
    for bits, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if size and size % (1 << bits) == 0:
            return f"{size >> bits}{unit}"
    return str(size)


def _read_share(raw: Any) -> float:
    typed = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%", _read_text(raw))
    if not typed or float(typed[1]) > 100:
        raise ValueError(raw)
    return float(typed[1]) / 100


def _read_count(raw: Any) -> int:
    value = convert(raw, _Number | _Text)
    return value if isinstance(value, int) else parse_size(value)


def read_path(raw: Any) -> bytes:
    """Read an absolute path; a trailing slash is dropped."""
    text = _read_text(raw)
    parts = text.split("/")
    if parts[0] or ".." in parts or "." in parts:
        raise ValueError(text)
    return b"/" + "/".join(part for part in parts if part).encode()


def _is_user(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_][^\s:,/*?\[\]]*", text) is not None and text.isprintable()


def _read_command(raw: Any) -> tuple[str, ...] | None:
    words = _read_items(raw, lambda word: "" if word == "" else _read_text(word))
    if words and (not words[0].startswith("/") or words[0].endswith("/")):
        raise ValueError(raw)
    return words or None


def _read_address(raw: Any) -> tuple[str, int]:
    typed = re.fullmatch(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", _read_text(raw))
    if not typed or not 0 < int(typed[2]) < 1 << 16:
        raise ValueError(raw)
    return typed[1].strip("[]"), int(typed[2])


def _write_address(address: tuple[str, int]) -> str:
    host, port = address
    return quote_text(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


FLAG: Final = ValueKind(
    "true or false", "write true or false, without quotes", lambda found: convert(found, bool),
    lambda on: str(on).lower(),
)  # fmt: skip
DURATION: Final = ValueKind(
    "a duration", 'write, for example, "90s", "15m", "24h", "3d" or a sum such as "1d12h", in quotes',
    _text_reader(parse_duration), _write_duration,
)  # fmt: skip
TIME_LIMIT: Final = DURATION._replace(name="a duration above 0", read=_checked_reader(bool, DURATION.read))
SIZE: Final = ValueKind(
    "a size",
    'write, for example, "500G", "1.5T" or "64M", in quotes',
    _text_reader(parse_size),
    lambda size: quote_text(_size_text(size)),
)
TEXT: Final = ValueKind(
    "a string", "write one string, in quotes; for another value, write another rule", _read_any_text, str
)
TEXTS: Final = ValueKind("a string or a list of strings", 'write "…" or ["…", "…"]', read_texts, str)
NUMBER_OR_TEXT: Final = ValueKind(
    "a name or number",
    'write a name or number, such as "anna" or 1000',
    lambda found: str(convert(found, _Id | _AnyText)),
    str,
)
POSITIVE: Final = ValueKind(
    "a number above 0", "write a number such as 100000, without quotes", lambda found: convert(found, _Positive), str
)
COUNT: Final = ValueKind("a number", 'write a number such as 1000000 or "1M"', _read_count, str)
RATE: Final = ValueKind(
    "a rate",
    'write, for example, 5000, "5000/s" or "200M/s"',
    lambda found: parse_rate(str(convert(found, _Positive | _Text))),
    lambda rate: quote_text(_size_text(rate) + "/s"),
)
SHARE: Final = ValueKind(
    "a percentage", 'write, for example, "10%", in quotes', _read_share, lambda share: quote_text(f"{share * 100:.6g}%")
)
PATH: Final = ValueKind(
    "an absolute path", 'write a path such as "/scratch", without `..`', read_path,
    lambda path: quote_text(path.decode("utf-8", "backslashreplace")),
)  # fmt: skip
VOLUME_ID: Final = ValueKind(
    "a volume ID",
    "write the ID that trashd status --json prints",
    _checked_reader(is_volume_id, _read_text),
    quote_text,
)
FILE: Final = PATH._replace(read=lambda found: read_path(found).decode(), write=quote_text)
PATTERNS: Final = ValueKind(
    "a list of path patterns",
    'write, for example, ["/scratch/keep/*", "*.precious"]; each begins with / or a wildcard',
    lambda found: _read_items(found, _checked_reader(lambda text: text[0] in "/*?[", _read_text)), format_array,
)  # fmt: skip
DELETE_AS: Final = ValueKind(
    "the user to delete as", 'write "owner" or "root"', lambda found: DeleteAs(_read_text(found)),
    lambda user: quote_text(user.value),
)  # fmt: skip
USERS: Final = ValueKind(
    "a list of users", 'write, for example, ["ci", "12001"]: names or UIDs, but no groups or patterns',
    lambda found: _read_items(found, _checked_reader(_is_user, _read_text)), format_array,
)  # fmt: skip
USER: Final = ValueKind(
    "a user", 'write a name or a UID, such as "nobody"', _checked_reader(_is_user, _read_text), quote_text
)
WINDOWS: Final = ValueKind(
    "a list of time windows",
    'write, for example, ["22:00-06:00", "12:00-13:00"]; for no limit, omit the key or write []',
    lambda found: _read_items(found, _text_reader(parse_window)),
    lambda windows: format_array(tuple(map(TimeWindow.__str__, windows))),
)  # fmt: skip
COMMAND: Final = ValueKind(
    "a command",
    'write, for example, ["/usr/bin/logger", "gone"]: an absolute path and arguments, but no shell syntax; [] for none',
    _read_command, lambda words: format_array(words or ()),
)  # fmt: skip
ADDRESS: Final = ValueKind("an address", 'write an address such as "127.0.0.1:9817"', _read_address, _write_address)
TEXT_MAX_BYTES = 1 << 20
LINE_MAX_CHARS = 4096
"""The time that tomllib needs is quadratic in the length of a dotted key: 40 ms for the longest key in such a line."""
PROBLEMS_MAX = 100
"""The most problems that are reported at once: an unrelated file may have as many problems as lines."""


class Source(NamedTuple):
    name: str
    text: str


class ConfigKey(NamedTuple):
    """The place of a value: a file, and the path of a key in it, such as `volume[2].quota` (empty: the whole file)."""

    file: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.key}" if self.key else self.file

    def problem(self, what: str, fix: str, *, is_warning: bool = False) -> ConfigProblem:
        return ConfigProblem(self.file, self.key, what, fix, is_warning)


class Document(NamedTuple):
    """A file, or a table in it, that is parsed as TOML but not yet read as a configuration.

    at  the path of the table
    """

    name: str
    tree: dict[str, Any]
    at: str = ""

    def place(self, *path: str | int) -> ConfigKey:
        """Return the place of a key in this document; a number is an index in an array of tables, counted from 0."""
        key = self.at
        for part in path:
            key += f"[{part + 1}]" if isinstance(part, int) else f".{format_key(part)}"
        return ConfigKey(self.name, key.removeprefix("."))


def decode_source(name: str, raw: bytes) -> Source:
    """Decode a file's bytes. Raises  BadConfig if it is too large or not UTF-8"""
    if len(raw) > TEXT_MAX_BYTES:
        raise _too_large(name)
    try:
        return Source(name, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _file_problem(name, f"line {line} is not UTF-8", "save the file as UTF-8") from error


def read_document(source: Source, problems: list[ConfigProblem], manual: str = "trashd.conf(5)") -> Document:
    """Parse a file. If it is too large or not TOML, add a problem and return an empty document.

    manual  the documentation of the format
    """
    name, text = source
    lines = text.split("\n")
    too_long = next((number for number, line in enumerate(lines, 1) if len(line) > LINE_MAX_CHARS), None)
    try:
        if len(text) > TEXT_MAX_BYTES:
            raise _too_large(name)
        if text.startswith("\ufeff"):
            raise _file_problem(
                name, "the file begins with a byte order mark", "save the file as UTF-8 without the mark"
            )
        if too_long is not None:
            what = f"line {too_long} has more than {LINE_MAX_CHARS} characters"
            raise _file_problem(name, what, "break the array into several lines")
        return Document(name, tomllib.loads(text))
    except BadConfig as error:
        problems += error.problems
    except RecursionError:
        problems += _file_problem(
            name, "keys, arrays or tables are nested too deeply", "nest them less deeply"
        ).problems
    except ValueError as error:
        position = re.search(r"\(at line (\d+), column \d+\)$", str(error))
        fix = _advise(lines[int(position[1]) - 1].strip()) if position else ""
        problems += _file_problem(name, f"not TOML: {error}", fix or f"see {manual}").problems
    return Document(name, {})


def _file_problem(name: str, what: str, fix: str) -> BadConfig:
    return BadConfig(problems=(ConfigKey(name).problem(what, fix),))


def _too_large(name: str) -> BadConfig:
    return _file_problem(name, f"larger than {TEXT_MAX_BYTES >> 20} MiB", "remove everything that is not configuration")


def _advise(line: str) -> str:
    """Return advice if the line has one of the most frequent mistakes, otherwise an empty text."""
    value = line.partition("=")[2].strip()
    if re.match(r"[0-9]+[A-Za-z%/]", value) or re.match(r"[A-Za-z/*]", value):
        return 'write strings in quotes: key = "24h"'
    if re.match(r"[\w.-]+\s*:", line):
        return 'write = between a key and its value, as in: retention = "24h"'
    return ""


Key = tuple[str | bytes, ...]
"""The path of a setting. For a table in an array, it contains the table's `path` instead of its index."""
Schema = Mapping[str, "ValueKind | Schema | Tables | RemovedKey | RenamedKey"]


class Tables(NamedTuple):
    """An array of tables, each with its own `path`."""

    schema: Schema


class RemovedKey(NamedTuple):
    """A key of an earlier release: it causes a warning and has no effect. instead: what to do instead"""

    instead: str


class RenamedKey(NamedTuple):
    """An earlier release's name of a key: it is still accepted, with a warning.

    name    the present name
    kind    the present kind of its values
    values  the present form of each value that earlier releases wrote differently
    """

    name: str
    kind: ValueKind
    values: Mapping[str, str]


class Setting(NamedTuple):
    value: Any
    place: ConfigKey


Settings = dict[Key, Setting]


class SettingsReader:
    """The settings in a document or table. Values are read one by one, and reading continues after a problem.

    place         the place of the document or table
    invalid_keys  keys whose values are invalid; each has been reported as a problem
    has_unknown   whether there are unknown keys: any of them may be a misspelling of a key that seems to be missing
    """

    def __init__(self, document: Document, schema: Schema, problems: list[ConfigProblem]) -> None:
        """problems: every problem found is appended to it"""
        self.place = document.place()
        self.settings: Settings = {}
        self.invalid_keys: set[Key] = set()
        self.has_unknown = False
        self._document = document
        self._schema = schema
        self._problems = problems
        self._read(document.tree, schema, (), ())

    def _read(self, table: dict[str, Any], schema: Schema, at: tuple[str | int, ...], prefix: Key) -> None:
        """Read a table. `at` is its place in the document, and `prefix` precedes the keys of its settings."""
        for key, raw in table.items():
            if len(self._problems) >= PROBLEMS_MAX:
                return
            place, kind = self._document.place(*at, key), schema.get(key)
            match kind:
                case None:
                    self.has_unknown = True
                    self._problems.append(place.problem("unknown key", self._suggest_key(key, schema)))
                case ValueKind():
                    self._read_value(raw, kind, place, (*prefix, key))
                case RemovedKey(instead):
                    what = "this key was removed and has no effect"
                    self._problems.append(place.problem(what, instead, is_warning=True))
                case RenamedKey():
                    self._renamed(raw, kind, place, table, prefix)
                case Tables(inner):
                    self._read_tables(raw, inner, (*at, key), (*prefix, key))
                case inner if isinstance(raw, dict):
                    self._read(raw, inner, (*at, key), (*prefix, key))
                case inner:
                    self.invalid_keys |= {(*prefix, key, name) for name in inner}
                    what = f"expected a table, got {format_value(raw)}"
                    self._problems.append(place.problem(what, f"write [{place.key}]"))

    def _suggest_key(self, key: str, schema: Schema) -> str:
        """Return a hint for an unknown key: a similar key, or where the key belongs."""
        from difflib import get_close_matches  # imported late: needed only for misspelt keys

        known_keys = [name for name, kind in schema.items() if not isinstance(kind, RemovedKey | RenamedKey)]
        near = get_close_matches(key[:100], known_keys, 1)
        if near:
            return f"did you mean {near[0]}?"
        if key in self._schema:
            return "write the key above all tables, or as a table of its own"
        inside = [f"[{name}]" for name, inner in self._schema.items() if key in _schema_in(inner)]
        return f"it belongs in {' or '.join(inside)}" if inside else f"known keys: {', '.join(known_keys)}"

    def _read_value(self, raw: Any, kind: ValueKind, place: ConfigKey, to: Key) -> None:
        try:
            self.settings[to] = Setting(kind.read(raw), place)
        except ValueError:
            self.invalid_keys.add(to)
            what = f"expected {kind.name}, got {format_value(raw)}"
            self._problems.append(place.problem(what, kind.fix))

    def _renamed(self, found: Any, kind: RenamedKey, place: ConfigKey, table: Mapping[str, Any], to: Key) -> None:
        """Read a key that has its old name, unless the table also has the new name; add a warning."""
        value = kind.values.get(found, found) if isinstance(found, str) else found
        if kind.name in table:
            what = f"this key has no effect, because {kind.name}, its new name, is also set"
            self._problems.append(place.problem(what, "remove it", is_warning=True))
            return
        self._read_value(value, kind.kind, place, (*to, kind.name))
        if (*to, kind.name) in self.settings:
            fix = f"write {kind.name} = {format_value(value)}"
            self._problems.append(place.problem(f"this key is now called {kind.name}", fix, is_warning=True))

    def _read_tables(self, raw: Any, schema: Schema, at: tuple[str | int, ...], to: Key) -> None:
        for index, table in enumerate(_tables_of(raw, self._document.place(*at), self._problems)):
            if len(self._problems) >= PROBLEMS_MAX:
                return
            place = self._document.place(*at, index, "path")
            if "path" not in table:
                self._problems.append(self._document.place(*at, index).problem("no path", 'add path = "/…"'))
                continue
            self._read_value(table["path"], PATH, place, to)
            path = self.settings.pop(to, None)
            if path is None:
                continue
            here = (*to, path.value)
            if here in self.settings:
                what = f"{format_value(table['path'])} is given twice"
                self._problems.append(place.problem(what, f"merge both into {self.settings[here].place.key[:-5]}"))
            self.settings[here] = path
            rest = {key: value for key, value in table.items() if key != "path"}
            self._read(rest, schema, (*at, index), here)


def read_tables(
    document: Document, name: str, schema: Schema, problems: list[ConfigProblem]
) -> Iterator[SettingsReader]:
    """Read each table of an array; the keys of the settings don't include the array's name."""
    for index, table in enumerate(_tables_of(document.tree.get(name, []), document.place(name), problems)):
        yield SettingsReader(Document(document.name, table, document.place(name, index).key), schema, problems)


def _tables_of(raw: Any, place: ConfigKey, problems: list[ConfigProblem]) -> list[dict[str, Any]]:
    """Return the tables of an array; if it is not a list of tables, add a problem and return an empty list."""
    if isinstance(raw, list) and all(isinstance(one, dict) for one in raw):
        return raw
    name = re.sub(r"\[\d+\]", "", place.key)
    problems.append(place.problem("expected a list of tables", f"write [[{name}]] above each of them"))
    return []


class SettingsBuilder:
    """Turns settings into values: each setting is looked up by its key and checked against related ones."""

    def __init__(self, settings: Settings, problems: list[ConfigProblem]) -> None:
        self.settings = settings
        self.problems = problems

    def get(self, *key: str | bytes, otherwise: Any = None) -> Any:
        setting = self.settings.get(key)
        return otherwise if setting is None else setting.value

    def add_problem(self, problem: str, fix: str, *keys: Key) -> None:
        """Add a problem at the first of these keys that is set; do nothing if none of them is set."""
        place = next((self.settings[key].place for key in keys if key in self.settings), None)
        if place is not None:
            self.problems.append(place.problem(problem, fix))


def _schema_in(kind: ValueKind | Schema | Tables | RemovedKey | RenamedKey) -> Schema:
    """Return the schema of a table or of each table in an array, or an empty schema for a single value."""
    if isinstance(kind, ValueKind | RemovedKey | RenamedKey):
        return {}
    return kind.schema if isinstance(kind, Tables) else kind
