"""README.md and the man page tell of every exit code that there is, and begin as `trashd --help` does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.errors import EXIT_CODES, Exit, TrashdError

ROOT = Path(__file__).parents[2]
SIGNALS = [Exit.INTERRUPTED, Exit.TERMINATED]
"""A closed pipe's is told by no table: no reader is left."""


def read_table(name: str) -> list[tuple[str, str]]:
    """The code or codes of each row, and what they say."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name == "README.md":
        rows = re.findall(r"^\| ([0-9, ]+) \| (.*) \|$", text.partition("## Exit codes\n")[2], re.MULTILINE)
    else:
        rows = re.findall(r"^- `([0-9, ]+)`: (.*)$", text.partition("## Exit status\n")[2], re.MULTILINE)
    return [(codes, words) for codes, words in rows]


def kinds_of(error: type[TrashdError]) -> Iterator[type[TrashdError]]:
    yield error
    for kind in error.__subclasses__():
        yield from kinds_of(kind)


@pytest.mark.parametrize("name", ["README.md", "docs/man/trashd.md"])
def test_every_code_is_told_in_order(name: str) -> None:
    told = [int(code) for codes, _words in read_table(name) for code in codes.split(",")]
    assert told == [*EXIT_CODES, *SIGNALS]


@pytest.mark.parametrize("name", ["README.md", "docs/man/trashd.md"])
def test_no_code_is_told_as_another(name: str) -> None:
    for codes, words in read_table(name)[: len(EXIT_CODES)]:
        assert re.split(r"\W", words)[0] == re.split(r"\W", EXIT_CODES[int(codes)])[0]


def test_readme_and_man_page_begin_alike() -> None:
    for one, other in zip(read_table("README.md"), read_table("docs/man/trashd.md"), strict=True):
        assert re.split(r"\W+", one[1])[:2] == re.split(r"\W+", other[1])[:2]


def test_every_error_has_one_of_the_codes() -> None:
    assert {kind.exit_code for kind in kinds_of(TrashdError)} | {Exit.DONE} == set(EXIT_CODES)


def test_signals_have_the_codes_of_a_shell() -> None:
    assert [Exit.SIGNALLED + number for number in (2, 13, 15)] == [Exit.INTERRUPTED, Exit.PIPE, Exit.TERMINATED]
