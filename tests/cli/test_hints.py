"""Whatever trashd says of its own commands, in a hint or a problem: they exist, with the options that it names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from fusefs.cli.group import trashd
from tests.cli.test_readme import COMMANDS, find_command, options_of

SOURCES = sorted((Path(__file__).parents[2] / "fusefs").rglob("*.py"))
_SAID = re.compile(r"\btrashd ([a-z]+)((?: (?:[a-zA-Z/]+|--[a-z-]+))*)")


def texts(source: str) -> Iterator[str]:
    """All strings of a file; X for what is filled in."""
    nodes = list(ast.walk(ast.parse(source)))
    formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in ast.walk(node)}
    for node in formatted:
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    for one in nodes:
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in parts:
            yield one.value


@cache
def said() -> frozenset[tuple[str, str]]:
    """Each command that is named with something after it, and that."""
    sources = (path.read_text() for path in SOURCES)
    found = (
        match for source in sources if "trashd " in source for text in texts(source) for match in _SAID.findall(text)
    )
    return frozenset((name, rest) for name, rest in found if name in COMMANDS and "--" in rest)


def test_much_is_said() -> None:
    assert {name for name, _rest in said()} >= {"doctor", "reap", "restore"}


@pytest.mark.parametrize(("name", "rest"), sorted(said()), ids=lambda word: word.strip() or "-")
def test_what_is_said_can_be_typed(name: str, rest: str) -> None:
    command = find_command(name)
    if isinstance(command, click.Group):
        context = click.Context(trashd)
        inner = command.get_command(context, rest.split(maxsplit=1)[0])
        assert inner is not None
        command = inner
    named = {word for word in rest.split() if word.startswith("--")}
    assert named <= options_of(command)
