"""Plain command lines of `swap` and `rm`, read as click reads them, without its import.

A table lists the options that people type most. click reads every other line and reports every error
(docs/decisions/0045).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from fusefs.core.record import NOTE_MAX_CHARS


class PlainOption(NamedTuple):
    """An option.

    name   of click's parameter
    reads  its value, or raises ValueError; None: it is a flag
    """

    name: str
    reads: Callable[[str], object] | None = None


class PlainLine(NamedTuple):
    """What a plain command line may have after its command.

    paths    the name of click's parameter for them
    options  as they are typed
    run      carries the line out, with the values by their names; returns the exit code
    """

    paths: str
    options: dict[str, PlainOption]
    run: Callable[..., int]

    def read(self, words: list[str]) -> dict[str, Any] | None:
        """Read the values of click's parameters, without those that have their default; None: click reads this line."""
        paths: list[str] = []
        values: dict[str, Any] = {}
        remaining = words[::-1]
        while remaining:
            word = remaining.pop()
            name, has_value, value = word.partition("=")
            if word == "--":
                paths += remaining[::-1]
                break
            flags = [word] if word.startswith("--") else [f"-{letter}" for letter in word[1:]]
            option = self.options.get(name)
            if word == "-" or not word.startswith("-"):
                paths.append(word)
            elif all(self._is_flag(flag) for flag in flags):
                values |= {self.options[flag].name: True for flag in flags}
            elif option is not None and option.reads is not None and (has_value or remaining):
                try:
                    values[option.name] = option.reads(value if has_value else remaining.pop())
                except ValueError:
                    return None
            else:
                return None
        return {self.paths: tuple(map(os.fsencode, paths)), **values} if paths and all(paths) else None

    def _is_flag(self, word: str) -> bool:
        return word in self.options and self.options[word].reads is None


def read_note(text: str) -> str:
    """Read a note that lists show. Raises  ValueError if it is too long"""
    note = os.fsencode(text).decode("utf-8", "replace")
    if len(note) > NOTE_MAX_CHARS:
        raise ValueError(f"a note has at most {NOTE_MAX_CHARS} characters")
    return note
