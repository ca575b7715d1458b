"""The reader of TOML files: each value as its kind reads it, or a problem that names its key, and what to write."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fusefs.core import setting_types
from fusefs.core.errors import BadConfig, ConfigProblem
from fusefs.core.setting_types import ValueKind

TEXT_MAX_BYTES = 1 << 20
LINE_MAX_CHARS = 4096
"""tomllib needs time in the square of a dotted key's length: 40 ms for the longest that fits here."""
PROBLEMS_MAX = 100
"""Reported at once: nobody reads more, and a file that has nothing to do with us has as many as lines."""


class Source(NamedTuple):
    """A configuration file's name and text."""

    name: str
    text: str


class ConfigKey(NamedTuple):
    """Where something stands: a file, and the path of a key in it, such as `volume[2].quota`; empty: the whole file."""

    file: str
    key: str = ""

    def __str__(self) -> str:
        """For a person."""
        return f"{self.file}: {self.key}" if self.key else self.file

    def problem(self, what: str, fix: str, *, is_warning: bool = False) -> ConfigProblem:
        """A problem there."""
        return ConfigProblem(self.file, self.key, what, fix, is_warning)


class Document(NamedTuple):
    """A file, or a table in it, understood as TOML but not yet as a configuration.

    at  the path of the table
    """

    name: str
    tree: dict[str, Any]
    at: str = ""

    def place(self, *path: str | int) -> ConfigKey:
        """Where a key in it stands; a number is the index in an array of tables, counted from 0."""
        key = self.at
        for part in path:
            key += f"[{part + 1}]" if isinstance(part, int) else f".{setting_types.bare(part)}"
        return ConfigKey(self.name, key.removeprefix("."))


def decode_source(name: str, raw: bytes) -> Source:
    """The text in a file's bytes.

    Raises  BadConfig
    """
    if len(raw) > TEXT_MAX_BYTES:
        raise _too_large(name)
    try:
        return Source(name, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _bad(name, f"line {line} is not UTF-8", "save it as UTF-8") from error


def read_document(source: Source, problems: list[ConfigProblem], manual: str = "docs/config.md") -> Document:
    """A file's tree; an empty one, and a problem more, for what is no TOML, or larger than anybody's.

    manual  what tells how such a file is written
    """
    try:
        return _parse(source, manual)
    except BadConfig as error:
        problems += error.problems
        return Document(source.name, {})


def _parse(source: Source, manual: str) -> Document:
    name, text = source
    if len(text) > TEXT_MAX_BYTES:
        raise _too_large(name)
    if text.startswith("\ufeff"):
        raise _bad(name, "it begins with a byte order mark", "save it as UTF-8 without one")
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_MAX_CHARS:
            what = f"line {number} has more than {LINE_MAX_CHARS} characters"
            raise _bad(name, what, "break the array into lines")
    try:
        return Document(name, tomllib.loads(text))
    except RecursionError as error:
        raise _bad(name, "arrays or tables within each other, far too deep", "nest no deeper than needed") from error
    except ValueError as error:
        found = re.search(r"\(at line (\d+), column \d+\)$", str(error))
        fix = _advice(lines[int(found[1]) - 1].strip()) if found else ""
        raise _bad(name, f"not TOML: {error}", fix or f"see {manual}") from error


def _bad(name: str, what: str, fix: str) -> BadConfig:
    return BadConfig(problems=(ConfigKey(name).problem(what, fix),))


def _too_large(name: str) -> BadConfig:
    return _bad(name, f"larger than {TEXT_MAX_BYTES >> 20} MiB", "a configuration is a page or two")


def _advice(line: str) -> str:
    """What is wrong with a line more often than anything else; empty for what is none of that."""
    value = line.partition("=")[2].strip()
    if re.match(r"[0-9]+[A-Za-z%/]", value) or re.match(r"[A-Za-z/*]", value):
        return 'texts stand in quotes: key = "24h"'
    if re.match(r"[\w.-]+\s*:", line):
        return 'a key and its value are joined by =, as in: retention = "24h"'
    return ""


Key = tuple[str | bytes, ...]
"""The way to a setting; in an array of tables it goes by a table's own `path`, not by its index."""

Schema = Mapping[str, "ValueKind | Schema | Tables | RemovedKey"]


class Tables(NamedTuple):
    """An array of tables, each with a `path` of its own."""

    schema: Schema


class RemovedKey(NamedTuple):
    """A key that an earlier release had: a warning, and no effect. instead: what to write"""

    instead: str


class Setting(NamedTuple):
    """A value, and where it stands."""

    value: Any
    place: ConfigKey


Settings = dict[Key, Setting]


def read_settings(document: Document, schema: Schema, problems: list[ConfigProblem]) -> Settings:
    """What a document sets; what is wrong in it is added to the problems, and the rest goes on."""
    reader = _SettingsReader(document, schema, problems)
    reader.read(document.tree, schema, (), ())
    return reader.settings


class _SettingsReader:
    """One document, its values read one by one; problems are noted, and the rest goes on."""

    def __init__(self, document: Document, schema: Schema, problems: list[ConfigProblem]) -> None:
        self.settings: Settings = {}
        self.wrong: set[Key] = set()
        self.has_unknown = False
        self._document = document
        self._schema = schema
        self._problems = problems

    def read(self, table: dict[str, Any], schema: Schema, at: tuple[str | int, ...], to: Key) -> None:
        """Read a table: `at` is where it stands in the document, `to` where its settings go."""
        for key, found in table.items():
            if len(self._problems) >= PROBLEMS_MAX:
                return
            place, kind = self._document.place(*at, key), schema.get(key)
            match kind:
                case None:
                    self.has_unknown = True
                    self._problems.append(place.problem("unknown key", self._other_key(key, schema)))
                case ValueKind():
                    self._value(found, kind, place, (*to, key))
                case RemovedKey(instead):
                    what = "it has no effect: there is no such key any more"
                    self._problems.append(place.problem(what, instead, is_warning=True))
                case Tables(inner):
                    self._tables(found, inner, (*at, key), (*to, key))
                case inner if isinstance(found, dict):
                    self.read(found, inner, (*at, key), (*to, key))
                case inner:
                    self.wrong |= {(*to, key, name) for name in inner}
                    what = f"expected a table, got {setting_types.shown(found)}"
                    self._problems.append(place.problem(what, f"write [{place.key}]"))

    def _other_key(self, key: str, schema: Schema) -> str:
        """What may be meant by an unknown key, or where it belongs."""
        from difflib import get_close_matches  # imported for typing errors only

        near = get_close_matches(key[:100], schema, 1)
        if near:
            return f"did you mean {near[0]}?"
        if key in self._schema:
            return "it stands above all tables, or is one itself"
        inside = [f"[{name}]" for name, inner in self._schema.items() if key in _schema_in(inner)]
        return f"it stands below {' or '.join(inside)}" if inside else f"known here: {', '.join(schema)}"

    def _value(self, found: Any, kind: ValueKind, place: ConfigKey, to: Key) -> None:
        try:
            self.settings[to] = Setting(kind.read(found), place)
        except ValueError:
            self.wrong.add(to)
            what = f"expected {kind.name}, got {setting_types.shown(found)}"
            self._problems.append(place.problem(what, kind.fix))

    def _tables(self, found: Any, schema: Schema, at: tuple[str | int, ...], to: Key) -> None:
        for index, table in enumerate(_listed(found, self._document.place(*at), self._problems)):
            if len(self._problems) >= PROBLEMS_MAX:
                return
            place = self._document.place(*at, index, "path")
            if "path" not in table:
                self._problems.append(self._document.place(*at, index).problem("no path", 'write path = "/…" in it'))
                continue
            self._value(table["path"], setting_types.PATH, place, to)
            path = self.settings.pop(to, None)
            if path is None:
                continue
            here = (*to, path.value)
            if here in self.settings:
                what = f"{setting_types.shown(table['path'])} a second time"
                self._problems.append(place.problem(what, f"put both into {self.settings[here].place.key[:-5]}"))
            self.settings[here] = path
            rest = {key: value for key, value in table.items() if key != "path"}
            self.read(rest, schema, (*at, index), here)


class SettingsTable(NamedTuple):
    """What one of several tables sets, its keys without the array's name.

    place        the table
    wrong        keys with values that can't be read, which is told
    has_unknown  there are unknown keys, any of which may have been meant as one that is missing
    """

    place: ConfigKey
    settings: Settings
    wrong: frozenset[Key]
    has_unknown: bool


def read_tables(
    document: Document, name: str, schema: Schema, problems: list[ConfigProblem]
) -> Iterator[SettingsTable]:
    """Each table of an array, as `read_settings` reads a document."""
    for index, table in enumerate(_listed(document.tree.get(name, []), document.place(name), problems)):
        place = document.place(name, index)
        reader = _SettingsReader(Document(document.name, table, place.key), schema, problems)
        reader.read(table, schema, (), ())
        yield SettingsTable(place, reader.settings, frozenset(reader.wrong), reader.has_unknown)


def _listed(found: Any, place: ConfigKey, problems: list[ConfigProblem]) -> list[dict[str, Any]]:
    """The tables of an array; none, and a problem more, if it is no such thing."""
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        return found
    name = re.sub(r"\[\d+\]", "", place.key)
    problems.append(place.problem("expected a list of tables", f"write [[{name}]] above each"))
    return []


class SettingsBuilder:
    """Turns settings into values: each is asked for by its key, and checked against those beside it."""

    def __init__(self, settings: Settings, problems: list[ConfigProblem]) -> None:
        """problems: those that come up are added."""
        self.settings = settings
        self.problems = problems

    def get(self, *key: str | bytes, otherwise: Any = None) -> Any:
        """What is set."""
        setting = self.settings.get(key)
        return otherwise if setting is None else setting.value

    def wrong(self, what: str, fix: str, *keys: Key) -> None:
        """Note a problem at the first of these keys that is set; what is not set can't be wrong."""
        place = next((self.settings[key].place for key in keys if key in self.settings), None)
        if place is not None:
            self.problems.append(place.problem(what, fix))


def _schema_in(kind: ValueKind | Schema | Tables | RemovedKey) -> Schema:
    """The keys of a table, or of each table in an array."""
    if isinstance(kind, ValueKind | RemovedKey):
        return {}
    return kind.schema if isinstance(kind, Tables) else kind
