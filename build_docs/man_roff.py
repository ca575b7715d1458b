"""Converts a page from man_pages from Markdown to roff, with the macros of man(7)."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Final

_COLUMNS: Final = 78
_MANUALS: Final = {"1": "User Commands", "5": "File Formats"}
_HEADING = re.compile(r"(?P<level>#{1,3}) (?P<text>.*)")
_ITEM = re.compile(r"- (?P<term>(?:`[^`]*`|\*[^*]*\*|[^`*:])+): (?P<text>.*)")
_INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\*(?P<emphasis>[^*\s][^*]*)\*|(?P<page>\b[a-z][\w.-]*)(?=\(\d\))|\[(?P<link>[^\]]*)\]\([^)]*\)"
)
_SENTENCE = re.compile(r"(?<=[^.][.?!]) (?=\S)|(?<=[.?!]\)) (?=[A-Z])")
_SPECIAL = {"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti", "…": "..."}
"""Characters in code that man(1) would print as different ones."""


def to_roff(page: str, date: str, version: str) -> str:
    """Convert a page to roff.

    page     Markdown as man_pages.page_of returns it, with the title `# NAME(SECTION)`
    date     the date of the page, 2026-11-26
    version  the version of trashd
    """
    title, *blocks = _blocks(page)
    name, _, section = title.removeprefix("# ").removesuffix(")").partition("(")
    lines = [f'.TH {name.upper()} {section} {date} "trashd {version}" "{_MANUALS[section]}"']
    before = ""
    for block in blocks:
        lines += _block(block, before)
        before = block
    return "\n".join(lines) + "\n"


def _blocks(page: str) -> Iterator[str]:
    """Split a page into headings, paragraphs, items, and examples with their fences."""
    for is_example, lines in _groups(page.splitlines()):
        if is_example:
            yield "\n".join(lines)
        else:
            yield from filter(None, lines)


def _groups(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    fences = 0

    def is_example(line: str) -> bool:
        nonlocal fences
        fences += line.startswith("```")
        return fences % 2 == 1 or line == "```"

    for answer, group in groupby(lines, is_example):
        yield answer, list(group)


def _block(block: str, before: str) -> list[str]:
    """Return the lines of a block. before: the previous block; after a heading, no new paragraph starts"""
    if heading := _HEADING.match(block):
        return [f".SH {heading['text'].upper()}" if heading["level"] == "##" else f".SS {_plain(heading['text'])}"]
    gap = [] if before.startswith("#") else [".PP"]
    if block.startswith("```"):
        return [*gap, ".EX", *map(_as_it_is, block.splitlines()[1:-1]), ".EE"]
    if item := _ITEM.match(block):
        return [".TP", _inline(item["term"]), *_filled(item["text"])]
    return [*gap, *_filled(block)]


def _filled(text: str) -> list[str]:
    """Wrap a text; each sentence starts a new line."""
    sentences = _SENTENCE.split(_inline(text))
    return [
        _protected(line)
        for one in sentences
        for line in textwrap.wrap(one, _COLUMNS, break_long_words=False, break_on_hyphens=False)
    ]


def _inline(text: str) -> str:
    done, at = "", 0
    for found in _INLINE.finditer(text):
        done += _plain(text[at : found.start()])
        at = found.end()
        if found["emphasis"]:
            done += rf"\fI{_literal(found['emphasis'])}\fR"
        else:
            done += rf"\fB{_literal(found['code'] or found['page'] or found['link'])}\fR"
    return done + _plain(text[at:])


def _plain(text: str) -> str:
    return text.replace("\\", r"\e").replace("…", "...")


def _literal(text: str) -> str:
    return "".join(_SPECIAL.get(one, one) for one in text)


def _as_it_is(line: str) -> str:
    return _protected(_literal(line))


def _protected(line: str) -> str:
    """Protect a line that roff would read as a macro."""
    return rf"\&{line}" if line.startswith((".", "'")) else line
