"""The strings and numbers of the product's source, with how often each stands there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PRODUCT = Path(__file__).parents[2] / "fusefs"
_DOTTED = re.compile(r"\bfusefs(?:\.\w+)+")
_NAMES_OF_CODE = {"__slots__", "__match_args__", "__all__"}
_TYPE_MAKERS = {"NewType", "TypeVar", "ParamSpec", "cast"}


class Constants(NamedTuple):
    """How often each constant stands in the source, by how Python writes it.

    strings  bytes too; an f-string is one, with `{}` for each value; names of the product's modules are `fusefs.…`
    """

    strings: Counter[str]
    numbers: Counter[str]


def count_constants(top: Path = PRODUCT) -> Constants:
    """Count those of all files below a directory; no docstrings, nor strings that are names of the code's own."""
    found = Constants(Counter(), Counter())
    for path in sorted(top.rglob("*.py")):
        for node in _values(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.strings[f"f{_unnamed(_template(node))!r}"] += 1
            elif isinstance(node.value, str):
                found.strings[repr(_unnamed(node.value))] += 1
            elif isinstance(node.value, bytes):
                found.strings[repr(node.value)] += 1
            elif isinstance(node.value, int | float | complex) and not isinstance(node.value, bool):
                found.numbers[repr(node.value)] += 1
    return found


def text_of(counter: Counter[str]) -> str:
    """A line for each, sorted, with how often before it."""
    return "".join(f"{n:5} {word}\n" for word, n in sorted(counter.items()))


def _values(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return
        case ast.Constant():
            yield node
            return
        case ast.JoinedStr(values=parts):
            yield node
            for part in parts:
                if isinstance(part, ast.FormattedValue):
                    yield from _values(part.value)
            return
        case ast.Assign(targets=[ast.Name(id=name)]) if name in _NAMES_OF_CODE:
            return
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str()), *others]) if name in _TYPE_MAKERS:
            children: list[ast.AST] = list(others)
        case _:
            children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _values(child)


def _template(node: ast.JoinedStr) -> str:
    """The text of an f-string; what stands in its braces is named by nothing but how it is formatted."""
    parts = []
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            how = "" if part.conversion < 0 else f"!{chr(part.conversion)}"
            how += f":{_template(part.format_spec)}" if isinstance(part.format_spec, ast.JoinedStr) else ""
            parts.append("{" + how + "}")
        elif isinstance(part, ast.Constant):
            parts.append(str(part.value))
    return "".join(parts)


def _unnamed(text: str) -> str:
    return _DOTTED.sub("fusefs.…", text)
