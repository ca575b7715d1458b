"""The index of modules: each Python module and C file of fusefs with the first sentence of its docstring or comment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
_HEAD: Final = """\
# Modules

Each file of the program and the first sentence of its docstring, for contributors who search for code by topic. \
`python -m build_docs modules docs/internals/modules.md` writes this page; do not edit it. \
[Architecture](architecture.md) explains the layers.
"""
_SUFFIXES: Final = (".c", ".h", ".py")
_COMMENT: Final = re.compile(r"\s*/\*(.*?)\*/", re.DOTALL)
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s")
_MARKUP: Final = re.compile(r"(`[^`]*`)|([<*\[])")


def text() -> str:
    """The text of docs/internals/modules.md."""
    packages = sorted(path.parent for path in (_ROOT / "fusefs").rglob("__init__.py"))
    return "\n".join([_HEAD, *map(_section, packages)])


def _section(package: Path) -> str:
    """A package: its own sentence, then an item for each file."""
    head = f"## {package.relative_to(_ROOT)}\n\n{first_sentence(package / '__init__.py')}\n"
    return f"{head}\n{items}" if (items := "".join(_items(package))) else head


def _items(package: Path) -> Iterator[str]:
    for path in sorted(package.iterdir()):
        if path.suffix in _SUFFIXES and path.name != "__init__.py":
            yield f"- `{path.name}`: {first_sentence(path)}\n"


def first_sentence(path: Path) -> str:
    """The first sentence of a file's docstring or first comment, as Markdown. Raises  LookupError if it has neither"""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        paragraph = ast.get_docstring(ast.parse(source))
    else:
        comment = _COMMENT.match(source)
        paragraph = comment and re.sub(r"^ \* ?", "", comment[1], flags=re.MULTILINE)
    if not paragraph:
        raise LookupError(path)
    sentence, *_rest = _SENTENCE_END.split(" ".join(paragraph.strip().partition("\n\n")[0].split()), maxsplit=1)
    return _MARKUP.sub(lambda match: match[1] or f"\\{match[2]}", sentence)
