"""Names of modules, classes and functions in text: strings, docstrings, comments, documents.

In every text: dotted names (`fusefs.mount.gate`, `fusefs.cli.main:main`) and paths (mount/gate.py). In prose, which is
docstrings, comments and documents, also what stands in backticks, Class.member, and names that are no plain words.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.renaming.plan import TOPS, Edit, Map, Project, path_of

_DOTTED = re.compile(r"(?<![\w.])(?:fusefs|tests|bench)(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)?")
_PATH = re.compile(r"(?<![\w/])(?:[\w.${}()-]*/)*?(?P<path>(?:[A-Za-z_]\w*/)+[A-Za-z_]\w*)\.py\b")
_BACKTICKS = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_SHORT_PATH = re.compile(r"(?:[A-Za-z_]\w*/)+[A-Za-z_]\w*")
_CHAIN = re.compile(r"(?<![\w./-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?![\w/-])")
_PLAIN_WORD = re.compile(r"[A-Za-z]?[a-z0-9]*|[A-Z]+")


class Index(NamedTuple):
    """What one file defines and binds."""

    module: str
    tops: frozenset[str]
    members: frozenset[str]
    """Class.member"""
    locals: frozenset[str]
    """Parameters and variables of functions."""
    imported: dict[str, tuple[str, str]]
    """Name → module, name there."""


def index(module: str, source: bytes) -> Index:
    tree = ast.parse(source)
    tops: set[str] = set()
    members: set[str] = set()
    imported: dict[str, tuple[str, str]] = {}
    for statement in tree.body:
        tops.update(_bound(statement))
        if isinstance(statement, ast.ClassDef):
            members.update(f"{statement.name}.{name}" for name in _members(statement))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in tops:
            found.add(node.id)
    in_classes = {member.rpartition(".")[2] for member in members}
    return Index(module, frozenset(tops), frozenset(members), frozenset(found - in_classes), imported)


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
    elif isinstance(statement, ast.If | ast.Try):
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                yield from _bound(child)


def _members(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        yield from _bound(statement)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _is_self(inner.value):
            yield inner.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@dataclass(frozen=True, slots=True)
class Words:
    """What may be replaced in prose of any file: no more than is clear without its context."""

    names: Map
    modules: frozenset[str]
    sure: dict[str, str]
    """Top-level names and members → new, where everything of that name gets the same new one."""
    classes: dict[str, str]
    """Class → its module, of classes that have their name to themselves."""
    rooms: dict[str, str]
    """Last part of a module of fusefs → the module, of those that have it to themselves."""

    @classmethod
    def of(cls, names: Map, project: Project, indexes: Iterable[Index]) -> "Words":
        definers: dict[str, set[tuple[str, str]]] = {}
        local: set[str] = set()
        for one in indexes:
            local |= one.locals
            for qualified in [*one.tops, *one.members]:
                definers.setdefault(qualified.rpartition(".")[2], set()).add((one.module, qualified))
        sure = {}
        for module, renamed in names.names.items():
            for old in renamed:
                word = old.rpartition(".")[2]
                news = {names.names.get(m, {}).get(q) for m, q in definers.get(word, {(module, old)})}
                new = news.pop() if len(news) == 1 else None
                if new is not None and word not in local:
                    sure[word] = new
        classes = {w: next(iter(d))[0] for w, d in definers.items() if len(d) == 1 and w[:1].isupper()}
        return cls(names, frozenset(project.modules), sure, classes, _rooms(project))


def _rooms(project: Project) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for module in project.modules:
        if module.startswith("fusefs.") and module not in project.packages:
            found.setdefault(module.rpartition(".")[2], []).append(module)
    return {last: modules[0] for last, modules in found.items() if len(modules) == 1}


class Writer:
    """Finds what changes in the texts of one file."""

    def __init__(self, words: Words, path: str, own: Index | None = None) -> None:
        self._words = words
        self._path = path
        self._texts = [
            (re.compile(rf"(?<!\w){re.escape(old)}(?!\w)"), new) for old, new in words.names.texts_in(path).items()
        ]
        self._near: dict[str, str] = {}
        """Name → its module, of names that this file defines or imports, where the module has something renamed."""
        if own is not None:
            tops = {name: (own.module, name) for name in own.tops}
            for word, (module, name) in (own.imported | tops).items():
                if module in words.names.names and word == name and word not in own.locals:
                    self._near[word] = module

    def edits_of_document(self, text: str) -> list[Edit]:
        return _in_bytes(text, self._distinct([*self._anywhere(text), *self._prose(text)]))

    def edits_of_python(self, source: bytes) -> list[Edit]:
        text = source.decode()
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        docstrings = _docstrings(ast.parse(source))
        found: list[Edit] = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in {tokenize.STRING, tokenize.COMMENT}:
                continue
            at = starts[token.start[0] - 1] + token.start[1]
            edits = list(self._anywhere(token.string))
            if token.type == tokenize.COMMENT or token.start[0] in docstrings:
                edits += self._prose(token.string)
            found += [Edit(edit.start + at, edit.end + at, edit.new) for edit in self._distinct(edits)]
        return _in_bytes(text, found)

    def _distinct(self, edits: list[Edit]) -> list[Edit]:
        """Of edits that meet, the longest."""
        kept: list[Edit] = []
        for edit in sorted(set(edits), key=lambda edit: edit.start - edit.end):
            if all(edit.end <= other.start or other.end <= edit.start for other in kept):
                kept.append(edit)
        return kept

    # -- in any text

    def _anywhere(self, text: str) -> Iterator[Edit]:
        for found in _DOTTED.finditer(text):
            new = self._dotted(found.group())
            if new != found.group():
                yield Edit(found.start(), found.end(), new)
        for found in _PATH.finditer(text):
            old = found["path"]
            is_whole = text[found.start() : found.start("path")] == ""
            new = self._file(old, is_whole=is_whole)
            if new != old:
                yield Edit(found.start("path"), found.end("path"), new)

    def _dotted(self, text: str) -> str:
        dotted, colon, qualified = text.partition(":")
        parts = dotted.split(".")
        for n in range(len(parts), 1, -1):
            module = ".".join(parts[:n])
            if module in self._words.modules:
                rest = self._qualified(module, parts[n:])
                moved = ".".join([self._words.names.moved(module), *rest])
                after = ".".join(self._qualified(module, qualified.split("."))) if colon else ""
                return f"{moved}{colon}{after}"
        return text

    def _qualified(self, module: str, parts: list[str]) -> list[str]:
        """`Class.member` or `function` in a module, as it will be."""
        names = self._words.names.names.get(module, {})
        return [names.get(".".join(parts[: n + 1]), part) for n, part in enumerate(parts)]

    def _file(self, path: str, *, is_whole: bool) -> str:
        """The path of a module without .py, with as much of it told as before."""
        parts = path.split("/")
        for n in range(len(parts) - 1):
            if parts[n] in TOPS and (module := ".".join(parts[n:])) in self._words.modules:
                return "/".join([*parts[:n], *self._words.names.moved(module).split(".")])
        for top in TOPS if is_whole else ():
            module = f"{top}.{'.'.join(parts)}"
            if module in self._words.modules:
                moved = self._words.names.moved(module).split(".")
                return "/".join(moved[1:] if moved[0] == top else moved)
        return path

    # -- in prose

    def _prose(self, text: str) -> Iterator[Edit]:
        for pattern, new in self._texts:
            yield from (Edit(found.start(), found.end(), new) for found in pattern.finditer(text))
        spans = []
        for span in _BACKTICKS.finditer(text):
            spans.append(span.span())
            yield from self._in_backticks(span)
        for found in _CHAIN.finditer(text):
            if any(start <= found.start() < end for start, end in spans):
                continue
            chain = found.group()
            if "." in chain or not _PLAIN_WORD.fullmatch(chain):
                new = self._chain(chain)
                if new != chain:
                    yield Edit(found.start(), found.end(), new)

    def _in_backticks(self, span: re.Match[str]) -> Iterator[Edit]:
        whole, at = span.group(1), span.start(1)
        if _SHORT_PATH.fullmatch(whole):
            new = self._file(whole, is_whole=True)
            if new != whole:
                yield Edit(at, span.end(1), new)
            return
        room = self._words.rooms.get(whole)
        if room is not None and self._path.startswith(("fusefs/", "docs/architecture", "docs/decisions/")):
            new = self._words.names.moved(room).rpartition(".")[2]
            if new != whole:
                yield Edit(at, span.end(1), new)
                return
        for found in _CHAIN.finditer(whole):
            new = self._chain(found.group())
            if new != found.group():
                yield Edit(at + found.start(), at + found.end(), new)

    def _chain(self, chain: str) -> str:
        parts = chain.split(".")
        first = parts[0]
        module = self._near.get(first) or self._words.classes.get(first)
        if module is not None:
            return ".".join(self._qualified(module, parts))
        room = self._words.rooms.get(first)
        if len(parts) > 1 and room is not None:
            last = self._words.names.moved(room).rpartition(".")[2]
            renamed = self._qualified(room, parts[1:])
            if renamed != parts[1:] or ".".join(parts[1:]) != "py":
                return ".".join([last, *renamed])
        return self._words.sure.get(chain, chain)


def _docstrings(tree: ast.Module) -> set[int]:
    """The lines where docstrings begin, those of fields too."""
    return {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def _in_bytes(text: str, edits: list[Edit]) -> list[Edit]:
    if text.isascii():
        return edits
    return [Edit(len(text[: e.start].encode()), len(text[: e.end].encode()), e.new) for e in edits]


def left_over(names: Map, project: Project, path: str, text: str) -> Iterator[str]:
    """Lines that still tell an old module, by its path or its last part with .py."""
    gone = [m for m in names.modules if m not in project.packages]
    told = {f"{m.rpartition('.')[2]}.py" for m in gone} | {m for m in gone if m not in names.modules.values()}
    told |= {
        path_of(m, is_package=False).partition("/")[2].removesuffix(".py") for m in gone if m.startswith("fusefs.")
    }
    if not told:
        return
    pattern = re.compile(r"(?<![\w/.])(?:" + "|".join(map(re.escape, sorted(told, key=len, reverse=True))) + r")(?!\w)")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.search(line):
            yield f"{path}:{number}: {line.strip()[:140]}"
