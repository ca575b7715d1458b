"""What configuration files set: each value read as what it should be, with the place where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from fusefs.core import kinds
from fusefs.core.document import Document, KeyPath
from fusefs.core.errors import Problem
from fusefs.core.kinds import Kind

PROBLEMS_MAX = 100
"""Told at once: nobody reads more, and a file that has nothing to do with us has as many as lines."""

Key = tuple[str | bytes, ...]
"""The way to a setting; in an array of tables it goes by a table's own `path`, not by its index."""

Schema = Mapping[str, "Kind | Schema | Tables"]


class Tables(NamedTuple):
    """An array of tables, each with a `path` of its own."""

    schema: Schema


class Place(NamedTuple):
    """Where something stands."""

    file: str
    line: int | None

    def __str__(self) -> str:
        """For a person."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def problem(self, what: str, fix: str) -> Problem:
        """A problem there."""
        return Problem(self.file, self.line, what, fix)


class Setting(NamedTuple):
    """A value, and where it stands."""

    value: Any
    place: Place


Settings = dict[Key, Setting]


def read_settings(document: Document, schema: Schema, problems: list[Problem]) -> Settings:
    """What a document sets; what is wrong in it is added to the problems, and the rest goes on."""
    return _Reading(document, schema, problems).settings()


class _Reading:
    """One document, its values read one by one; problems are noted, and the rest goes on."""

    def __init__(self, document: Document, schema: Schema, problems: list[Problem]) -> None:
        self._document = document
        self._schema = schema
        self._problems = problems
        self._settings: Settings = {}

    def settings(self) -> Settings:
        """What it sets."""
        self._table(self._document.tree, self._schema, (), ())
        return self._settings

    def _place(self, at: KeyPath) -> Place:
        return Place(self._document.name, self._document.line_of(at))

    def _wrong(self, at: KeyPath, what: str, fix: str) -> None:
        self._problems.append(self._place(at).problem(what, fix))

    def _table(self, table: dict[str, Any], schema: Schema, at: KeyPath, to: Key) -> None:
        """Read a table: `at` is where it stands in the document, `to` where its settings go."""
        for key, found in table.items():
            if len(self._problems) >= PROBLEMS_MAX:
                return
            match schema.get(key):
                case None:
                    self._unknown(key, schema, (*at, key))
                case Kind() as kind:
                    self._value(found, kind, (*at, key), (*to, key))
                case Tables(inner):
                    self._tables(found, inner, (*at, key), (*to, key))
                case inner if isinstance(found, dict):
                    self._table(found, inner, (*at, key), (*to, key))
                case _:
                    what = f"{key} = {kinds.shown(found)} is not a table"
                    self._wrong((*at, key), what, f"write [{_dotted((*at, key))}]")

    def _unknown(self, key: str, schema: Schema, at: KeyPath) -> None:
        near = get_close_matches(key[:100], schema, 1)
        if near:
            fix = f"did you mean {near[0]}?"
        elif key in self._schema:
            fix = "it stands above all tables, or is one itself"
        else:
            inside = [f"[{name}]" for name, inner in self._schema.items() if key in _schema_in(inner)]
            fix = f"it stands below {' or '.join(inside)}" if inside else f"known here: {', '.join(schema)}"
        self._wrong(at, f"unknown key {kinds.bare(key)}", fix)

    def _value(self, found: Any, kind: Kind, at: KeyPath, to: Key) -> None:
        try:
            value = kind.read(found)
        except ValueError:
            self._wrong(at, f"{at[-1]} = {kinds.shown(found)} is not {kind.name}", kind.fix)
        else:
            self._settings[to] = Setting(value, self._place(at))

    def _tables(self, found: Any, schema: Schema, at: KeyPath, to: Key) -> None:
        name = _dotted(at)
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            self._wrong(at, f"{name} is not a list of tables", f"write [[{name}]] above each")
            return
        seen: dict[bytes, Place] = {}
        for index, table in enumerate(found):
            if len(self._problems) >= PROBLEMS_MAX:
                return
            here: KeyPath = (*at, index)
            if "path" not in table:
                self._wrong(here, f"[[{name}]] without a path", 'write path = "/…" below it')
                continue
            try:
                path = kinds.PATH.read(table["path"])
            except ValueError:
                shown = kinds.shown(table["path"])
                self._wrong((*here, "path"), f"path = {shown} is not {kinds.PATH.name}", kinds.PATH.fix)
                continue
            if path in seen:
                what = f"path = {kinds.shown(table['path'])} a second time"
                self._wrong((*here, "path"), what, f"put both into the one of line {seen[path].line}")
            seen[path] = place = self._place((*here, "path"))
            self._settings[*to, path] = Setting(path, place)
            rest = {key: value for key, value in table.items() if key != "path"}
            self._table(rest, schema, here, (*to, path))


def _schema_in(kind: Kind | Schema | Tables) -> Schema:
    """The keys of a table, or of each table in an array."""
    match kind:
        case Kind():
            return {}
        case Tables(inner):
            return inner
        case inner:
            return inner


def _dotted(at: KeyPath) -> str:
    return ".".join(part for part in at if isinstance(part, str))
