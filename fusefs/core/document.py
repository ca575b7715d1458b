"""A TOML text as a tree, and the line on which each of its keys stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

from fusefs.core.errors import BadConfig, Problem

TEXT_MAX_BYTES = 1 << 20
LINE_MAX_CHARS = 4096
"""tomllib needs time in the square of a dotted key's length: 40 ms for the longest that fits here."""
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


class Document(NamedTuple):
    """One file, understood as TOML but not yet as a configuration."""

    name: str
    tree: dict[str, Any]
    lines: dict[KeyPath, int]

    def line_of(self, path: KeyPath) -> int | None:
        """The line of a key, or of the nearest that encloses it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


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


def read_document(source: Source) -> Document:
    """A file's tree.

    Raises  BadConfig for what is no TOML, or larger than anybody's
    """
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
        raise _not_toml(name, text, str(error)) from error
    return Document(name, tree, _lines(text))


def _bad(name: str, line: int | None, what: str, fix: str) -> BadConfig:
    return BadConfig(problems=(Problem(name, line, what, fix),))


def _not_toml(name: str, text: str, told: str) -> BadConfig:
    found = _AT_LINE.search(told)
    line = None if found is None else int(found[1]) if found[1] else text.count("\n") + 1
    what = told if found is None else told[: found.start()]
    return _bad(name, line, f"not TOML: {what}", _advice(text, line))


def _advice(text: str, line: int | None) -> str:
    """What is wrong with a line more often than anything else."""
    written = text.split("\n")[line - 1].strip() if line else ""
    value = written.partition("=")[2].strip()
    if re.match(r"[0-9]+[A-Za-z%/]", value) or re.match(r"[A-Za-z/*]", value):
        return 'texts stand in quotes: key = "24h"'
    if re.match(r"[\w.-]+\s*:", written):
        return 'a key and its value are joined by =, as in: retention = "24h"'
    return "see docs/config.md"


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
