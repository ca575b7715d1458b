"""docs/troubleshooting.md has each error by the words that are printed, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fusefs.core.errors import BY_NAME, TrashdError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### `(.*)`\n\n((?:(?!^##).*\n)+)", TEXT, re.MULTILINE))
ERRORS = [kind for kind in BY_NAME.values() if kind is not TrashdError]


@pytest.fixture(scope="module")
def said() -> str:
    """All that the product could print."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "fusefs").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\0".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_there_are_sections() -> None:
    assert len(SECTIONS) == len(re.findall("^### ", TEXT, re.MULTILINE)) > 30


@pytest.mark.parametrize("error", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_told_with_its_exit_code(error: type[TrashdError]) -> None:
    section = SECTIONS[error("").message()]
    assert f"Exit code {error.exit_code}." in section


def test_every_message_that_is_told_can_be_met(said: str) -> None:
    told = [*SECTIONS, *re.findall(r"\*`([^`]*)`\*", TEXT)]
    assert [message for message in told if message not in said] == []
