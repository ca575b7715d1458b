"""docs/internals/modules.md is what the generator writes, and documents for contributors name functions that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_docs.module_index import first_sentence, text
from tests.support.source_modules import ROOT

INDEX = ROOT / "docs/internals/modules.md"
PAGES = [*sorted((ROOT / "docs/internals").glob("*.md")), ROOT / "CONTRIBUTING.md"]
FUNCTION = re.compile(r"`(?P<path>[\w/]+\.(?:py|c)):(?P<name>[\w.]+)`")
"""A function, class or method as the documents name it: `store/swap.py:swap_path`."""


def test_the_index_is_what_the_generator_writes() -> None:
    assert INDEX.read_text(encoding="utf-8") == text(), f"python -m build_docs modules {INDEX.relative_to(ROOT)}"


def test_the_index_has_every_file_of_the_program() -> None:
    files = {path.name for path in (ROOT / "fusefs").rglob("*.[pch]*") if path.suffix in (".c", ".h", ".py")}
    assert set(re.findall(r"^- `(.*?)`: ", text(), re.MULTILINE)) == files - {"__init__.py"}


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("a.py", '"""One line,\ncontinued: `a<b>`, <c>. More."""', "One line, continued: `a<b>`, \\<c>."),
        ("a.py", '"""No full stop\n\nMore."""', "No full stop"),
        ("a.c", "/* First line,\n * second. More.\n *\n * Rest. */\nint a;", "First line, second."),
    ],
)
def test_the_first_sentence_of_a_file(tmp_path: Path, name: str, source: str, sentence: str) -> None:
    path = tmp_path / name
    path.write_text(source)
    assert first_sentence(path) == sentence


@pytest.mark.parametrize(("name", "source"), [("a.py", "a = 1\n"), ("a.c", "int a; /* late */")])
def test_a_file_that_says_nothing_is_found(tmp_path: Path, name: str, source: str) -> None:
    path = tmp_path / name
    path.write_text(source)
    with pytest.raises(LookupError, match=name):
        first_sentence(path)


def missing_functions(page: str) -> Iterator[str]:
    """The functions that a page names and the program does not have."""
    for match in FUNCTION.finditer(page):
        path = ROOT / "fusefs" / match["path"].removeprefix("fusefs/")
        if not path.is_file() or not set(match["name"].split(".")) <= defined_names(path):
            yield match[0]


def defined_names(path: Path) -> set[str]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".c":
        return set(re.findall(r"^\w[^;\n=(]*\b(\w+)\(", source, re.MULTILINE))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_functions_that_a_page_names_exist(page: Path) -> None:
    assert list(missing_functions(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("name", ["store/attic.py:swap", "store/swap.py:attic", "store/swap.py:Swapped.attic"])
def test_a_function_that_does_not_exist_is_found(name: str) -> None:
    assert list(missing_functions(f"see `{name}`")) == [f"`{name}`"]
