"""Where the members of classes are used, by mypy's types: a process of its own, beside the other.

Reads {"files": [...], "members": [[module, class, member, new]...], "classes": [module.Class...]} from standard input;
says {"edits": {path: [[start, end, new]...]}, "refusals": [...], "notes": [...]}. In the folder of the project.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from mypy import build, nodes
from mypy.main import process_options
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    LiteralType,
    Overloaded,
    ProperType,
    TupleType,
    Type,
    TypedDictType,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

FORMATS = {"msgspec.Struct": "its fields are keys of JSON"}
ERRORS = "fusefs.core.errors.TrashdError"


class Asked(TypedDict):
    files: list[str]
    members: list[tuple[str, str, str, str]]
    classes: list[str]


class Answer(TypedDict):
    edits: dict[str, list[tuple[int, int, str]]]
    refusals: list[str]
    notes: list[str]


class Source:
    """A file's bytes, by mypy's lines and columns (bytes, from 0)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes = Path(path).read_bytes()
        self._starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.keywords: dict[tuple[int, int], list[tuple[str, int]]] = {}
        """Where a call begins → its keywords and where they begin."""
        for node in ast.walk(ast.parse(self.bytes)):
            if isinstance(node, ast.Call):
                start = (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
                self.keywords[start[2:]] = [
                    (keyword.arg, self.offset(keyword.lineno, keyword.col_offset))
                    for keyword in node.keywords
                    if keyword.arg
                ]

    def offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column


_NOT_INSIDE = {
    "analyzed", "def_var", "definition", "expanded", "info", "names", "node", "original_def", "original_first_item",
    "type", "type_annotation", "unanalyzed_type", "unanalyzed_items", "var",
}  # fmt: skip
"""Attributes of mypy's nodes that lead out of what stands in a file at this place."""


def inside(node: nodes.Node) -> Iterator[nodes.Node]:
    """What stands directly in a node; mypy's own visitor cannot be inherited from where it is compiled."""
    for name in getattr(type(node), "__mypyc_attrs__", ()):
        if name not in _NOT_INSIDE:
            yield from _nodes_of(getattr(node, name, None))


def _nodes_of(value: object) -> Iterator[nodes.Node]:
    if isinstance(value, nodes.TypeInfo | nodes.Var):
        return
    if isinstance(value, nodes.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes_of(item)


def _called(callee: nodes.Expression) -> str:
    return callee.name if isinstance(callee, nodes.NameExpr | nodes.MemberExpr) else ""


class Finder:
    """Walks every file; one member name may be renamed in several classes."""

    def __init__(self, types: dict[nodes.Expression, Type], wanted: dict[str, dict[str, str]]) -> None:
        self._types = types
        self._wanted = wanted
        """Class → member → new; subclasses are in it."""
        self._words = {member for members in wanted.values() for member in members}
        self.source: Source
        self.edits: dict[str, set[tuple[int, int, str]]] = {}
        self.refusals: list[str] = []
        self.notes: list[str] = []

    def walk(self, tree: nodes.MypyFile) -> None:
        self.source = Source(tree.path)
        seen: set[int] = set()
        waiting: list[tuple[nodes.Node, nodes.TypeInfo | None]] = [(tree, None)]
        while waiting:
            node, owner = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, nodes.ClassDef):
                owner = node.info
            self._meet(node, owner)
            waiting += [(child, owner) for child in inside(node)]

    def _meet(self, node: nodes.Node, owner: nodes.TypeInfo | None) -> None:
        match node:
            case nodes.ClassDef():
                for statement in _statements(node.defs):
                    self._define(node.info, statement)
            case nodes.NameExpr():
                self._name(node)
            case nodes.MemberExpr():
                if node.name in self._words:
                    self._at_end(node, node.name, self._judge(node.expr, node.name, node.line))
            case nodes.SuperExpr():
                self._super(node, owner)
            case nodes.CallExpr():
                self._call(node)
            case _:
                pass

    # -- definitions

    def _define(self, info: nodes.TypeInfo, statement: nodes.Statement) -> None:
        match statement:
            case nodes.Decorator(func=func):
                self._define(info, func)
            case nodes.OverloadedFuncDef(items=items):
                for item in items:
                    self._define(info, item)
            case nodes.FuncDef(name=name):
                self._name_after(statement, "def", name, self._new(info, name))
            case nodes.ClassDef(name=name):
                self._name_after(statement, "class", name, self._new(info, name))
            case nodes.AssignmentStmt(lvalues=lvalues, rvalue=rvalue):
                for lvalue in lvalues:
                    if isinstance(lvalue, nodes.NameExpr):
                        self._at_start(lvalue, lvalue.name, self._new(info, lvalue.name))
                        if lvalue.name == "__slots__":
                            self._slots(info, rvalue)
            case _:
                pass

    def _slots(self, info: nodes.TypeInfo, rvalue: nodes.Expression) -> None:
        for item in rvalue.items if isinstance(rvalue, nodes.TupleExpr | nodes.ListExpr) else [rvalue]:
            if isinstance(item, nodes.StrExpr):
                self._string(item, self._new(info, item.value))

    # -- uses

    def _name(self, node: nodes.NameExpr) -> None:
        info = getattr(node.node, "info", None)
        if node.name in self._words and node.kind == nodes.MDEF and isinstance(info, nodes.TypeInfo) and info:
            self._at_start(node, node.name, self._new(info, node.name))

    def _super(self, node: nodes.SuperExpr, owner: nodes.TypeInfo | None) -> None:
        if node.name in self._words and owner is not None:
            for base in owner.mro[1:]:
                if node.name in base.names:
                    self._at_end(node, node.name, self._new(base, node.name))
                    break

    def _call(self, node: nodes.CallExpr) -> None:
        if any(name in self._words for name in node.arg_names):
            self._keywords(node)
        callee = _called(node.callee)
        if callee in {"setattr", "getattr", "hasattr", "delattr", "object", "attrgetter"}:
            self._named(node)

    def _named(self, call: nodes.CallExpr) -> None:
        if len(call.args) > 1 and isinstance(call.args[1], nodes.StrExpr) and call.args[1].value in self._words:
            text = call.args[1]
            self._string(text, self._judge(call.args[0], text.value, call.line))

    def _keywords(self, call: nodes.CallExpr) -> None:
        places = self.source.keywords.get((call.end_line or 0, call.end_column or 0), [])
        for info in self._made(call):
            made = info.names.get("__init__") or info.names.get("__new__")
            if made is not None and not made.plugin_generated and not info.is_named_tuple:
                continue
            for keyword, at in places:
                new = self._new(info, keyword)
                if new is not None:
                    self._edit(at, keyword, new)

    def _made(self, call: nodes.CallExpr) -> Iterator[nodes.TypeInfo]:
        """The classes whose fields the call's keywords name."""
        callee = call.callee
        name = _called(callee)
        if name in {"replace", "__replace__"} and call.args:
            yield from self._infos(self._types.get(call.args[0]))
        if name == "_replace" and isinstance(callee, nodes.MemberExpr):
            yield from self._infos(self._types.get(callee.expr))
        if name == "partial" and call.args:
            callee = call.args[0]
        if isinstance(callee, nodes.RefExpr) and isinstance(callee.node, nodes.TypeInfo):
            yield callee.node
            return
        found = get_proper_type(self._types.get(callee))
        if isinstance(found, CallableType | Overloaded) and found.is_type_obj():
            yield found.type_object()
        elif isinstance(found, TypeType):
            yield from self._infos(found.item)

    # -- types

    def _judge(self, owner: nodes.Expression, member: str, line: int) -> str | None:
        if isinstance(owner, nodes.RefExpr) and isinstance(owner.node, nodes.MypyFile):
            return None
        if isinstance(owner, nodes.RefExpr) and isinstance(owner.node, nodes.TypeInfo):
            return self._new(owner.node, member)
        infos = list(self._infos(self._types.get(owner)))
        if not infos:
            self.notes.append(f"{self.source.path}:{line}: .{member} of a type that mypy does not know stays")
        news = {self._new(info, member) for info in infos}
        if len(news) > 1:
            classes = ", ".join(sorted(info.fullname for info in infos))
            self.refusals.append(f"{self.source.path}:{line}: .{member} of one of {classes}, not all of them renamed")
            return None
        return next(iter(news), None)

    def _infos(self, found: Type | None) -> Iterator[nodes.TypeInfo]:
        proper: ProperType | None = get_proper_type(found)
        match proper:
            case None | AnyType():
                return
            case Instance():
                yield proper.type
            case TupleType():
                yield proper.partial_fallback.type
            case LiteralType():
                yield proper.fallback.type
            case TypedDictType():
                yield proper.fallback.type
            case TypeVarType():
                yield from self._infos(proper.upper_bound)
            case TypeType():
                yield from self._infos(proper.item)
            case UnionType():
                for item in proper.items:
                    yield from self._infos(item)
            case CallableType() | Overloaded():
                yield proper.type_object() if proper.is_type_obj() else proper.fallback.type
            case _:
                return

    def _new(self, info: nodes.TypeInfo, member: str) -> str | None:
        """What the member is to be called in this class; None if nothing renames it."""
        if member not in self._words:
            return None
        for base in info.mro:
            if member in self._wanted.get(base.fullname, {}):
                return self._wanted[base.fullname][member]
            if member in base.names:
                return None
        return None

    # -- places

    def _at_start(self, node: nodes.Context, old: str, new: str | None) -> None:
        if new is not None:
            self._edit(self.source.offset(node.line, node.column), old, new)

    def _at_end(self, node: nodes.Context, old: str, new: str | None) -> None:
        if new is not None:
            end = self.source.offset(node.end_line or node.line, node.end_column or 0)
            self._edit(end - len(old.encode()), old, new)

    def _name_after(self, node: nodes.Context, word: str, old: str, new: str | None) -> None:
        if new is None:
            return
        found = re.compile(rf"\b{word}\s+(?={old}\b)".encode()).search(
            self.source.bytes, self.source.offset(node.line, 0)
        )
        if found is None:
            self.refusals.append(f"{self.source.path}:{node.line}: {word} {old} is not where mypy says")
        else:
            self._edit(found.end(), old, new)

    def _string(self, node: nodes.StrExpr, new: str | None) -> None:
        if new is None:
            return
        start = self.source.offset(node.line, node.column)
        found = re.compile(rf"""(?<=["']){node.value}(?=["'])""".encode()).search(self.source.bytes, start)
        if found is not None:
            self._edit(found.start(), node.value, new)

    def _edit(self, start: int, old: str, new: str) -> None:
        end = start + len(old.encode())
        if self.source.bytes[start:end].decode(errors="replace") != old:
            line = self.source.bytes.count(b"\n", 0, start) + 1
            self.refusals.append(f"{self.source.path}:{line}: {old} is not where mypy says")
            return
        self.edits.setdefault(self.source.path, set()).add((start, end, new))


def _statements(block: nodes.Block) -> Iterator[nodes.Statement]:
    """What a class's body defines, under an `if` too."""
    for statement in block.body:
        yield statement
        if isinstance(statement, nodes.IfStmt):
            for inner in [*statement.body, *([statement.else_body] if statement.else_body else [])]:
                yield from _statements(inner)


def infos_of(files: dict[str, nodes.MypyFile]) -> dict[str, nodes.TypeInfo]:
    """Every class of these files, nested ones too."""
    found: dict[str, nodes.TypeInfo] = {}

    def add(table: nodes.SymbolTable) -> None:
        for symbol in table.values():
            if isinstance(symbol.node, nodes.TypeInfo) and symbol.node.fullname not in found:
                found[symbol.node.fullname] = symbol.node
                add(symbol.node.names)

    for tree in files.values():
        add(tree.names)
    return found


def _why_not(
    info: nodes.TypeInfo, member: str, new: str, wanted: dict[str, dict[str, str]], subclasses: list[nodes.TypeInfo]
) -> Iterator[str]:
    for base in info.mro[1:]:
        if member in base.names and wanted.get(base.fullname, {}).get(member) != new:
            yield f"{info.fullname}.{member} is {base.fullname}'s; rename it there"
        if base.fullname in FORMATS and _is_field(info, member):
            yield f"{info.fullname}.{member}: {FORMATS[base.fullname]}"
    for other in subclasses:
        if any(new in base.names for base in other.mro):
            yield f"{other.fullname} has both {member} and {new}"
        if wanted.get(other.fullname, {}).get(member, new) != new:
            yield f"{other.fullname}.{member} is {info.fullname}'s; rename it there"


def _cautions(info: nodes.TypeInfo, member: str) -> Iterator[str]:
    if info.is_named_tuple and _is_field(info, member):
        yield f"{info.fullname}.{member} is a NamedTuple's field: a key wherever _asdict() or cli/output writes it"
    if info.is_enum and _is_field(info, member):
        yield f"{info.fullname}.{member} is an enum's member: text wherever .name is written"


def _is_field(info: nodes.TypeInfo, member: str) -> bool:
    return isinstance(info.names[member].node, nodes.Var)


def spread(
    asked: Asked, infos: dict[str, nodes.TypeInfo], refusals: list[str], notes: list[str]
) -> dict[str, dict[str, str]]:
    """Class → member → new, overriding subclasses too."""
    wanted: dict[str, dict[str, str]] = {}
    for module, owner, member, new in asked["members"]:
        wanted.setdefault(f"{module}.{owner}", {})[member] = new
    for full, members in list(wanted.items()):
        info = infos.get(full)
        for member, new in members.items():
            if info is None or member not in info.names:
                refusals.append(f"{full} has no {member} of its own")
                continue
            subclasses = [other for other in infos.values() if info in other.mro]
            refusals += _why_not(info, member, new, wanted, subclasses)
            notes += _cautions(info, member)
            for other in subclasses:
                if member in other.names:
                    wanted.setdefault(other.fullname, {})[member] = new
    for full in asked["classes"]:
        info = infos.get(full)
        is_error = info is not None and any(base.fullname == ERRORS for base in info.mro)
        refusals += [f"{full}: an error's class is told by its name, in JSON and to other processes"] * is_error
    return wanted


def answer(asked: Asked) -> Answer:
    refusals: list[str] = []
    notes: list[str] = []
    sources, options = process_options(
        ["--no-incremental", "--cache-dir=/dev/null", "--no-error-summary", *asked["files"]]
    )
    options.export_types = True
    options.preserve_asts = True
    result = build.build(sources, options)
    notes += [f"mypy: {error}" for error in result.errors]
    ours = {source.module for source in sources}
    trees = {name: tree for name, tree in result.files.items() if name in ours}
    wanted = spread(asked, infos_of(trees), refusals, notes)
    finder = Finder(result.types, wanted)
    words = [re.compile(rf"\b{word}\b".encode()) for members in wanted.values() for word in members]
    for tree in trees.values():
        text = Path(tree.path).read_bytes()
        if any(word.search(text) for word in words):
            finder.walk(tree)
    edits = {path: sorted(found) for path, found in finder.edits.items()}
    return {"edits": edits, "refusals": refusals + finder.refusals, "notes": notes + finder.notes}


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
