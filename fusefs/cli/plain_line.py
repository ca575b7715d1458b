"""Plain command lines, read as click reads them without it: what it takes is more than what most commands do.

A command's `…_fast_lane` says by a table which options it knows, which are those that people mostly type. Whatever
else a command line has, and all that is wrong, is left to click (docs/decisions/0045).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from fusefs.core.record import NOTE_MAX_CHARS

T = TypeVar("T")

MOST_WORKERS = 64
"""What --threads may say."""

Reads = Callable[[str], object]
"""Reads a value; None, or a ValueError: click is to say what is wrong with it, or to read it."""


class PlainOption(NamedTuple):
    """An option.

    name   of click's parameter
    reads  None: it is a flag
    many   each that is told counts, not the last alone
    """

    name: str
    reads: Reads | None = None
    many: bool = False


class PlainLine(NamedTuple):
    """What a plain command line may have after its command.

    argument   the name of click's parameter
    arguments  reads its words, as an option reads its value
    options    by how they are typed
    """

    argument: str
    arguments: Callable[[list[str]], object]
    options: dict[str, PlainOption]

    def read(self, words: list[str]) -> dict[str, Any] | None:
        """What click's parameters come to, but for those that are not told; None if that is click's to say."""
        typed = _taken_apart(words, self.options)
        if typed is None:
            return None
        arguments, values = typed
        try:
            told = {option.name: _value(option, texts) for option, texts in values.items()}
            return {self.argument: _read(self.arguments, arguments), **told}
        except ValueError:
            return None


class FastLane(Protocol):
    """A command without click: its module `…_fast_lane`."""

    LINE: PlainLine

    def run(self, told: dict[str, Any]) -> int:
        """Do what LINE has read; the exit code."""


def _taken_apart(
    words: list[str], options: dict[str, PlainOption]
) -> tuple[list[str], dict[PlainOption, list[str]]] | None:
    """The arguments, and the values of each option; None: something else is there."""
    arguments: list[str] = []
    values: dict[PlainOption, list[str]] = {}
    left = words[::-1]
    while left:
        word = left.pop()
        name, has_value, value = word.partition("=")
        if word == "--":
            return arguments + left[::-1], values
        flags = [word] if word.startswith("--") else [f"-{letter}" for letter in word[1:]]
        if word == "-" or not word.startswith("-"):
            arguments.append(word)
        elif all(flag in options and options[flag].reads is None for flag in flags):
            values |= {options[flag]: [] for flag in flags}
        elif name in options and options[name].reads and (has_value or left):
            values.setdefault(options[name], []).append(value if has_value else left.pop())
        else:
            return None
    return arguments, values


def _value(option: PlainOption, texts: list[str]) -> object:
    if option.reads is None:
        return True
    if not option.many:
        return _read(option.reads, texts[-1])
    return tuple(_read(option.reads, text) for text in texts)


def _read(reads: Callable[[T], object], typed: T) -> object:
    value = reads(typed)
    if value is None:
        raise ValueError
    return value


def any_paths(words: list[str]) -> tuple[bytes, ...] | None:
    """Any number of them, or none."""
    return tuple(map(os.fsencode, words)) if all(words) else None


def some_paths(words: list[str]) -> tuple[bytes, ...] | None:
    """At least one."""
    return any_paths(words) or None


def note(text: str) -> str | None:
    """A sentence for readers of the list."""
    told = os.fsencode(text).decode("utf-8", "replace")
    return told if len(told) <= NOTE_MAX_CHARS else None


def number(least: int, most: int) -> Reads:
    """A number in digits alone."""

    def read(text: str) -> int | None:
        is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
        return int(text) if is_number and least <= int(text) <= most else None

    return read
