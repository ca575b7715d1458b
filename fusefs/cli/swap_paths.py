"""Swaps paths from the command line or standard input, and parses plain command lines without click and msgspec.

A plain command line has only the most common options, which a table lists. Click parses all other command lines, and
reports all errors (docs/internals/decisions/0045).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from fusefs.cli.output import exit_code, print_error, print_swapped
from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.errors import Exit, TrashdError, Unsettled, UsageError
from fusefs.core.human_units import parse_duration
from fusefs.core.record import NOTE_MAX_CHARS
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import invocation
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped, swap_path


class PlainOption(NamedTuple):
    """An option of a plain command line.

    name   the name of click's parameter
    parse  parses the value, or raises ValueError; None for a flag
    """

    name: str
    parse: Callable[[str], object] | None = None


class PlainLine(NamedTuple):
    """The arguments that a plain command line may have.

    paths    the name of click's parameter for the paths
    options  the options as they are typed
    execute  carries out the command with the values as keyword arguments, and returns the exit code
    """

    paths: str
    options: dict[str, PlainOption]
    execute: Callable[..., int]

    def read(self, words: list[str]) -> dict[str, Any] | None:
        """Parse a line into the values of click's parameters, without defaults; None if click has to parse the line."""
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
            elif option is not None and option.parse is not None and (has_value or remaining):
                try:
                    values[option.name] = option.parse(value if has_value else remaining.pop())
                except ValueError:
                    return None
            else:
                return None
        return {self.paths: tuple(map(os.fsencode, paths)), **values} if paths and all(paths) else None

    def _is_flag(self, word: str) -> bool:
        return word in self.options and self.options[word].parse is None


def read_note(text: str) -> str:
    """Parse a note. Raises  ValueError if it is too long"""
    note = os.fsencode(text).decode("utf-8", "replace")
    if len(note) > NOTE_MAX_CHARS:
        raise ValueError(f"a note has at most {NOTE_MAX_CHARS} characters")
    return note


SwapVerb = Callable[[Kernel, bytes, SwapOptions], Swapped]
_CHUNK = 1 << 16


class SwapBatch(NamedTuple):
    """Paths to swap or remove, and how to do that.

    kept      the orphans can be restored afterwards, so print the command that restores them
    ids_only  print only the IDs
    after     called with each result (for example, to reap at once); returns an exit code
    """

    paths: Iterable[bytes]
    options: SwapOptions = SwapOptions()
    verb: SwapVerb = swap_path
    json_lines: bool = False
    ids_only: bool = False
    kept: bool = True
    after: Callable[[Swapped], int] = lambda _swapped: 0


def _swap_plainly(
    directories: tuple[bytes, ...],
    *,
    keep_for: int | None = None,
    note: str = "",
    unlike: bool = False,
    print_id: bool = False,
    as_json: bool = False,
) -> int:
    """Carry out a plain command line, with the parameters of cli/swap.py; return the exit code."""
    if print_id and as_json:
        raise ids_with("--json")
    retention_s = DEFAULT_RETENTION_S if keep_for is None else keep_for
    options = SwapOptions(retention_s, note, unlike)
    return swap_all(SwapBatch(directories, options, json_lines=as_json, ids_only=print_id))


LINE = PlainLine(
    "directories",
    {
        "--keep-for": PlainOption("keep_for", parse_duration),
        "--note": PlainOption("note", read_note),
        "--unlike": PlainOption("unlike"),
        "--print-id": PlainOption("print_id"),
        "--json": PlainOption("as_json"),
    },
    _swap_plainly,
)


def ids_with(other: str) -> UsageError:
    """Return the error for a command line that combines --print-id with another option."""
    return UsageError(f"--print-id can't be combined with {other}")


def swap_all(batch: SwapBatch) -> int:
    """Swap or remove one path after the other; continue after failures, and return the exit code.

    A result with warnings counts as Unsettled. If a signal stopped `after`, the remaining paths are not touched.
    """
    kernel = Kernel()
    options = batch.options._replace(invocation=invocation())
    codes = []
    for path in batch.paths:
        try:
            swapped = batch.verb(kernel, path, options)
            print_swapped(swapped, json_lines=batch.json_lines, ids_only=batch.ids_only, kept=batch.kept)
            code = batch.after(swapped)
            if code > Exit.SIGNALLED:
                return code
            codes.append(code or (Unsettled.exit_code if swapped.warnings else 0))
        except TrashdError as error:
            codes.append(print_error(error, as_json=batch.json_lines))
    return exit_code(codes)


def every_path(paths: tuple[bytes, ...], *, null: bool) -> Iterator[bytes]:
    """Iterate over the paths of the command line, then over the paths on standard input as they arrive.

    Raises  UsageError if no path is given and none is read from standard input
    """
    if not paths and not null:
        raise UsageError("missing path", "name at least one path, or read paths from standard input with -0")
    yield from paths
    if null:
        fd, rest = standard_input(), b""
        while chunk := os.read(fd, _CHUNK):
            *complete, rest = (rest + chunk).split(b"\0")
            yield from (path for path in complete if path)
        if rest:
            yield rest


def standard_input() -> int:
    """Return the fd of standard input. Raises  UsageError if it was closed: another file may have its number now"""
    if sys.__stdin__ is None:
        raise UsageError("standard input is closed")
    return sys.__stdin__.fileno()
