"""What `trashd swap` does with its paths, and plain command lines, read as click reads them: without click and msgspec.

Paths come from the command line, or from standard input. A table lists the options that people type most; click reads
every other line and reports every error (docs/decisions/0045).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from fusefs.cli.output import exit_code, failed, tell_swapped
from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.errors import Exit, TrashdError, Unsettled, UsageError
from fusefs.core.human_units import parse_duration
from fusefs.core.record import NOTE_MAX_CHARS
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import invocation
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped, swap_path


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


SwapVerb = Callable[[Kernel, bytes, SwapOptions], Swapped]
_CHUNK = 1 << 16


class SwapBatch(NamedTuple):
    """What to do with many paths.

    kept   whether they can be restored afterwards; if not, no command for it is told
    ids_only  print their ids, and nothing else
    after  called with each result, to go on with it (reap at once); its exit code
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
    """Carry out a plain line, whose values are named as click's parameters in cli/swap.py; the exit code."""
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
    """What is wrong with --print-id and another option."""
    return UsageError(f"--print-id with {other}", "it prints ids and nothing else; leave one of them out")


def swap_all(batch: SwapBatch) -> int:
    """Swap or remove one path after the other, going on after failures; the exit code.

    A result that carries warnings counts as Unsettled. A signal that stopped what comes after ends it all.
    """
    kernel = Kernel()
    options = batch.options._replace(invocation=invocation())
    codes = []
    for path in batch.paths:
        try:
            swapped = batch.verb(kernel, path, options)
            tell_swapped(swapped, json_lines=batch.json_lines, ids_only=batch.ids_only, kept=batch.kept)
            code = batch.after(swapped)
            if code > Exit.SIGNALLED:
                return code
            codes.append(code or (Unsettled.exit_code if swapped.warnings else 0))
        except TrashdError as error:
            codes.append(failed(error, as_json=batch.json_lines))
    return exit_code(codes)


def every_path(paths: tuple[bytes, ...], *, null: bool) -> Iterator[bytes]:
    """The paths of the command line, then those of standard input as they come.

    Raises  UsageError if there are none at all
    """
    if not paths and not null:
        raise UsageError("no path was given", "name at least one, or use -0 to read them from standard input")
    yield from paths
    if null:
        fd, rest = standard_input(), b""
        while chunk := os.read(fd, _CHUNK):
            *complete, rest = (rest + chunk).split(b"\0")
            yield from (path for path in complete if path)
        if rest:
            yield rest


def standard_input() -> int:
    """Its fd. Raises  UsageError if it was closed: what has its number now is something else"""
    if sys.__stdin__ is None:
        raise UsageError("standard input is closed", "what it should be read from must be open")
    return sys.__stdin__.fileno()
