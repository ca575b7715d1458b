"""The reader of TOML files: each value read as what it should be, with its file and line; or a problem and its fix."""

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
"""Told at once: more would not be read, and a file that has nothing to do with us has as many as lines."""
_DEPTH_MAX = 16
"""Far more than any key that we know; what lies deeper stands where that begins."""
KeyPath = tuple[str | int, ...]
"""Keys from the root; a number is the index in an array of tables."""
_AT_LINE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_TOKEN = re.compile(
    r"""
      \#[^\n]*
    | \"\"\"(?:[^\\]|\\.)*?\"{3,5}
    | '''.*?'{3,5}
    | "(?:[^"\\\n]|\\.)*"
    | '[^'\n]*'
    | [\[\]{}=\n]
    | [^\[\]{}=\n"'\#]+
    """,
    re.VERBOSE | re.DOTALL,
)
_PART = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)\s*(?:\.|$)""")


class Source(NamedTuple):
    """A configuration file's name and text."""

    name: str
    text: str


class ConfigLine(NamedTuple):
    """Where something stands."""

    file: str
    line: int | None

    def __str__(self) -> str:
        """For a person."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def problem(self, what: str, fix: str) -> ConfigProblem:
        """A problem there."""
        return ConfigProblem(self.file, self.line, what, fix)


class Document(NamedTuple):
    """One file, understood as TOML but not yet as a configuration."""

    name: str
    tree: dict[str, Any]
    lines: dict[KeyPath, int]

    def place(self, path: KeyPath) -> ConfigLine:
        """Where a key stands, or the nearest that encloses it."""
        above = (path[:length] for length in range(len(path), 0, -1))
        return ConfigLine(self.name, next((self.lines[key] for key in above if key in self.lines), None))


def decode_source(name: str, raw: bytes) -> Source:
    """The text in a file's bytes.

    Raises  BadConfig
    """
    if len(raw) > TEXT_MAX_BYTES:
        raise _bad(name, None, f"larger than {TEXT_MAX_BYTES >> 20} MiB", "a configuration is a page or two")
    try:
        return Source(name, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _bad(name, line, "not UTF-8", "save it as UTF-8") from error


def read_document(source: Source, problems: list[ConfigProblem], manual: str = "docs/config.md") -> Document:
    """A file's tree; an empty one, and a problem more, for what is no TOML, or larger than anybody's.

    manual  what tells how such a file is written
    """
    try:
        return _parse(source, manual)
    except BadConfig as error:
        problems += error.problems
        return Document(source.name, {}, {})


def _parse(source: Source, manual: str) -> Document:
    name, text = source
    if len(text) > TEXT_MAX_BYTES:
        raise _bad(name, None, f"larger than {TEXT_MAX_BYTES >> 20} MiB", "a configuration is a page or two")
    if text.startswith("\ufeff"):
        raise _bad(name, 1, "it begins with a byte order mark", "save it as UTF-8 without one")
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > LINE_MAX_CHARS:
            raise _bad(name, number, f"a line of more than {LINE_MAX_CHARS} characters", "break the array into lines")
    try:
        tree = tomllib.loads(text)
    except RecursionError as error:
        raise _bad(
            name, None, "arrays or tables within each other, far too deep", "nest no deeper than needed"
        ) from error
    except ValueError as error:
        raise _not_toml(name, text, str(error), manual) from error
    return Document(name, tree, _lines(text))


def _bad(name: str, line: int | None, what: str, fix: str) -> BadConfig:
    return BadConfig(problems=(ConfigProblem(name, line, what, fix),))


def _not_toml(name: str, text: str, told: str, manual: str) -> BadConfig:
    found = _AT_LINE.search(told)
    line = None if found is None else int(found[1]) if found[1] else text.count("\n") + 1
    what = told if found is None else told[: found.start()]
    return _bad(name, line, f"not TOML: {what}", _advice(text, line) or f"see {manual}")


def _advice(text: str, line: int | None) -> str:
    """What is wrong with a line more often than anything else; empty for what is none of that."""
    written = text.split("\n")[line - 1].strip() if line else ""
    value = written.partition("=")[2].strip()
    if re.match(r"[0-9]+[A-Za-z%/]", value) or re.match(r"[A-Za-z/*]", value):
        return 'texts stand in quotes: key = "24h"'
    if re.match(r"[\w.-]+\s*:", written):
        return 'a key and its value are joined by =, as in: retention = "24h"'
    return ""


def _lines(text: str) -> dict[KeyPath, int]:
    """The line of each table and key of a text that is TOML."""
    lines: dict[KeyPath, int] = {}
    n_tables: dict[KeyPath, int] = {}
    header: KeyPath = ()
    for line, is_header, is_array, key in _statements(text):
        if not is_header:
            path: KeyPath = (*header, *key)
        else:
            path = header = _resolved(key, n_tables, is_array)
        for length in range(1, min(len(path), _DEPTH_MAX) + 1):
            lines.setdefault(path[:length], line)
    return lines


def _resolved(key: tuple[str, ...], n_tables: dict[KeyPath, int], is_array: bool) -> KeyPath:
    """A header's keys with the index of each array of tables that they pass, or begin."""
    path: KeyPath = ()
    for depth, part in enumerate(key, 1):
        path = (*path, part)
        if is_array and depth == len(key):
            n_tables[path] = n_tables.get(path, 0) + 1
        if path in n_tables:
            path = (*path, n_tables[path] - 1)
    return path


def _statements(text: str) -> Iterator[tuple[int, bool, bool, tuple[str, ...]]]:
    """Each header and key with its line: whether it is a header, whether of an array, and its parts."""
    line, begins, depth, written, in_value = 1, 1, 0, "", False
    for token in _TOKEN.findall(text + "\n"):
        if token == "\n" and (depth == 0 or not in_value):
            if written.strip().startswith("["):
                yield begins, True, written.strip().startswith("[["), _parts(written.strip().strip("[]"))
            depth, written, in_value = 0, "", False
            begins = line + 1
        elif in_value:
            depth += (token in "[{") - (token in "]}")
        elif token == "=":
            yield begins, False, False, _parts(written)
            in_value = True
        elif not token.startswith("#"):
            written += token
        line += token.count("\n")


def _parts(key: str) -> tuple[str, ...]:
    """The parts of a dotted key."""
    return tuple(_unquoted(part) for part in _PART.findall(key.strip()))


def _unquoted(part: str) -> str:
    if part[0] == '"':
        return str(tomllib.loads(f"k = {part}")["k"])
    return part.strip("'")


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
    place: ConfigLine


Settings = dict[Key, Setting]


def read_settings(document: Document, schema: Schema, problems: list[ConfigProblem]) -> Settings:
    """What a document sets; what is wrong in it is added to the problems, and the rest goes on."""
    return _SettingsReader(document, schema, problems).settings()


class _SettingsReader:
    """One document, its values read one by one; problems are noted, and the rest goes on."""

    def __init__(self, document: Document, schema: Schema, problems: list[ConfigProblem]) -> None:
        self._document = document
        self._schema = schema
        self._problems = problems
        self._settings: Settings = {}

    def settings(self) -> Settings:
        """What it sets."""
        self._table(self._document.tree, self._schema, (), ())
        return self._settings

    def _wrong(self, at: KeyPath, what: str, fix: str) -> None:
        self._problems.append(self._document.place(at).problem(what, fix))

    def _table(self, table: dict[str, Any], schema: Schema, at: KeyPath, to: Key) -> None:
        """Read a table: `at` is where it stands in the document, `to` where its settings go."""
        for key, found in table.items():
            if len(self._problems) >= PROBLEMS_MAX:
                return
            match schema.get(key):
                case None:
                    self._unknown(key, schema, (*at, key))
                case ValueKind() as kind:
                    self._value(found, kind, (*at, key), (*to, key))
                case RemovedKey(instead):
                    what = f"{key} has no effect: there is no such key any more"
                    warning = self._document.place((*at, key)).problem(what, instead)
                    self._problems.append(warning._replace(is_warning=True))
                case Tables(inner):
                    self._tables(found, inner, (*at, key), (*to, key))
                case inner if isinstance(found, dict):
                    self._table(found, inner, (*at, key), (*to, key))
                case _:
                    what = f"{key} = {setting_types.shown(found)} is not a table"
                    self._wrong((*at, key), what, f"write [{_dotted((*at, key))}]")

    def _unknown(self, key: str, schema: Schema, at: KeyPath) -> None:
        from difflib import get_close_matches  # who types well is spared it

        near = get_close_matches(key[:100], schema, 1)
        if near:
            fix = f"did you mean {near[0]}?"
        elif key in self._schema:
            fix = "it stands above all tables, or is one itself"
        else:
            inside = [f"[{name}]" for name, inner in self._schema.items() if key in _schema_in(inner)]
            fix = f"it stands below {' or '.join(inside)}" if inside else f"known here: {', '.join(schema)}"
        self._wrong(at, f"unknown key {setting_types.bare(key)}", fix)

    def _value(self, found: Any, kind: ValueKind, at: KeyPath, to: Key) -> None:
        try:
            value = kind.read(found)
        except ValueError:
            self._wrong(at, f"{at[-1]} = {setting_types.shown(found)} is not {kind.name}", kind.fix)
        else:
            self._settings[to] = Setting(value, self._document.place(at))

    def _tables(self, found: Any, schema: Schema, at: KeyPath, to: Key) -> None:
        name = _dotted(at)
        seen: dict[bytes, ConfigLine] = {}
        for index, table in enumerate(_listed(found, self._document.place(at), name, self._problems)):
            if len(self._problems) >= PROBLEMS_MAX:
                return
            here: KeyPath = (*at, index)
            if "path" not in table:
                self._wrong(here, f"[[{name}]] without a path", 'write path = "/…" below it')
                continue
            try:
                path = setting_types.PATH.read(table["path"])
            except ValueError:
                shown = setting_types.shown(table["path"])
                self._wrong((*here, "path"), f"path = {shown} is not {setting_types.PATH.name}", setting_types.PATH.fix)
                continue
            if path in seen:
                what = f"path = {setting_types.shown(table['path'])} a second time"
                self._wrong((*here, "path"), what, f"put both into the one of line {seen[path].line}")
            seen[path] = place = self._document.place((*here, "path"))
            self._settings[*to, path] = Setting(path, place)
            rest = {key: value for key, value in table.items() if key != "path"}
            self._table(rest, schema, here, (*to, path))


class SettingsTable(NamedTuple):
    """What one of several tables sets, its keys without the array's name.

    place        where it begins
    wrong        keys with values that can't be read, which is told
    has_unknown  there are unknown keys, any of which may have been meant as one that is missing
    """

    place: ConfigLine
    settings: Settings
    wrong: frozenset[Key]
    has_unknown: bool


def read_tables(
    document: Document, name: str, schema: Schema, problems: list[ConfigProblem]
) -> Iterator[SettingsTable]:
    """Each table of an array, as `read_settings` reads a document."""
    for index, table in enumerate(_listed(document.tree.get(name, []), document.place((name,)), name, problems)):
        at = (name, index)
        lines = {path[2:]: line for path, line in document.lines.items() if path[:2] == at}
        settings = read_settings(Document(document.name, table, lines), schema, problems)
        keys = _keys(table, schema)
        known = {key for key in keys if _is_known(key, schema)}
        removed = {key for key in keys if isinstance(schema.get(str(key[0])), RemovedKey)}
        yield SettingsTable(document.place(at), settings, frozenset(known - removed - settings.keys()), known != keys)


def _listed(found: Any, place: ConfigLine, name: str, problems: list[ConfigProblem]) -> list[dict[str, Any]]:
    """The tables of an array; none, and a problem more, if it is no such thing."""
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        return found
    problems.append(place.problem(f"{name} is not a list of tables", f"write [[{name}]] above each"))
    return []


def _keys(table: dict[str, Any], schema: Schema) -> set[Key]:
    """What a table has, and what is in its own tables; all that may be in one if it is none."""
    keys: set[Key] = set()
    for key, value in table.items():
        inner = schema.get(key)
        if not isinstance(inner, dict):
            keys.add((key,))
        else:
            keys.update((key, name) for name in (value if isinstance(value, dict) else inner))
    return keys


def _is_known(key: Key, schema: Schema) -> bool:
    found: Any = schema
    for name in key:
        found = found.get(name) if isinstance(found, dict) else None
    return found is not None


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
    match kind:
        case ValueKind() | RemovedKey():
            return {}
        case Tables(inner):
            return inner
        case inner:
            return inner


def _dotted(at: KeyPath) -> str:
    return ".".join(part for part in at if isinstance(part, str))
