"""What commands print: lines for people, JSON for programs, errors with the next step.

When standard output can't be written, on a full disk say, `to_error` makes that the command's error.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fusefs.core.errors import ConfigProblem, Incomplete, KernelRefused, NotFound, TrashdError, UsageError, from_os
from fusefs.core.names import ContainerId
from fusefs.core.printable_names import printable, printable_text, shell_word
from fusefs.core.record import Method
from fusefs.linux.file_locks import is_service_running
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME, SYSTEM_RUNTIME, runtime_dir
from fusefs.store.swap import Swapped

_NAMED_MAX = 5
_LEAST_ROOM = 8
"""Columns: less of a path says nothing."""


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, be it right or wrong otherwise."""
    return "--json" in arguments[: arguments.index("--") if "--" in arguments else None]


def print_error(error: TrashdError, *, as_json: bool = False) -> int:
    """Print an error on stderr and return its exit code."""
    if as_json:
        from fusefs.cli.json_objects import ErrorTold

        error_object = ErrorTold(type(error).__name__, error.message(), error.hint, error.exit_code)
        print(json.dumps(plain(error_object)), file=sys.stderr)
        return error.exit_code
    command, usage = (error.command, error.usage) if isinstance(error, UsageError) else ("", "")
    # A message may quote words as they were typed, or names that a glob expanded to.
    lines = [f"{command or 'trashd'}: {printable_text(error.message())}"]
    if error.hint:
        lines.append(f"  hint: {printable_text(error.hint)}")
    if usage:
        lines += [f"usage: {usage}", f"Try '{command} --help' for more information."]
    print("\n".join(lines), file=sys.stderr)
    return error.exit_code


def to_error(error: TrashdError | OSError) -> TrashdError:
    """Convert what ended a command into the error that is printed, once its output is written as far as it can be."""
    unwritten = refused(flush)  # what standard output has not taken is tried again
    if isinstance(error, TrashdError):
        return error
    number, name = error.errno or errno.EIO, error.filename
    if name is not None:
        return from_os(error, name if isinstance(name, bytes) else os.fsencode(str(name)))
    if unwritten == number:
        hint = "the command did its work, but could not print all of its output"
        return KernelRefused(f"standard output: {os.strerror(number)}", hint, number)
    if refused(os.getcwdb) == number:
        return NotFound("the working directory", "it was removed; change to another one: cd /")
    return from_os(error, "a new process" if number == errno.EAGAIN else "a system call")


def flush() -> None:
    """Write what was printed: the process ends without Python's own care for that."""
    print(end="", flush=True)


def refused(act: Callable[[], object]) -> int | None:
    """The errno with which something is refused; None if it isn't."""
    try:
        act()
    except OSError as error:
        return error.errno
    return None


def exit_code(codes: Sequence[int]) -> int:
    """The exit code of many results: a single one's own, Incomplete's if any of several is not 0."""
    if len(codes) == 1:
        return codes[0]
    return Incomplete.exit_code if any(codes) else 0


def warn(text: str) -> None:
    """Print a warning on stderr."""
    print(f"trashd: warning: {printable_text(text)}", file=sys.stderr)


def plain(value: Any) -> Any:
    r"""A value as JSON has it: bytes as text, invalid UTF-8 as lone surrogates (`\udcXX`, as os.fsdecode)."""
    if value is None or isinstance(value, str | int):  # most are, and a list can be of 100,000 containers
        return value
    if isinstance(value, bytes):
        return os.fsdecode(value)
    if hasattr(value, "_value_"):  # an Enum of either kind
        return value.value
    if hasattr(value, "_fields") or hasattr(value, "__struct_fields__"):
        return fields(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def fields(value: Any) -> dict[str, Any]:
    """A NamedTuple or a Struct as an object of JSON."""
    names = value._fields if hasattr(value, "_fields") else value.__struct_fields__
    return {name: plain(getattr(value, name)) for name in names}


def as_json(*parts: Any, without: str = "") -> None:
    """Print one JSON object on a line of its own: the fields of all parts; what two have is the later one's.

    What is printed for a command is said by its types in build_docs/json_schema.py.
    without  a field that says something of another one only
    """
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= fields(part)
    merged.pop(without, None)
    print(json.dumps(merged))


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """The lines of a table: all columns but the last as wide as their widest cell.

    width  so wide at most, as far as the last column can be shortened to that; None: nothing is
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    gap, room = "  ", None
    if width is not None:
        left = width - sum(widths)
        gap = gap if left - 2 * len(widths) >= _LEAST_ROOM else " "
        room = max(left - len(gap) * len(widths), _LEAST_ROOM)
    return [gap.join([*map(str.ljust, row, widths), _shortened(row[-1], room)]) for row in rows]


def terminal_width() -> int | None:
    """How many columns there are to print on; None: it is no terminal."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size  # a swap is spared it

    return get_terminal_size().columns


def _shortened(text: str, room: int | None) -> str:
    """A text without its middle: a path is known by where it begins and by its end."""
    if room is None or len(text) <= room:
        return text
    n_first = room // 3
    return f"{text[:n_first]}…{text[n_first + 1 - room :]}"


def origin(path: bytes | None) -> str:
    """Where a tree came from, for a person."""
    return "(dropped)" if path is None else printable(by_mount_point(path))


def by_mount_point(path: bytes) -> bytes:
    """The path by which users know it: not that of the private tree of a mount whose daemon is dead."""
    if not path.startswith(MOUNTS_RUNTIME):
        return path
    from fusefs.store.mounted_paths import to_mount_path

    return to_mount_path(path)


def counted(count: int, what: str, several: str = "") -> str:
    """`1 match`, `2 matches`."""
    return f"1 {what}" if count == 1 else f"{count:,} {several or what + 's'}"


def names(kept: Sequence[bytes]) -> str:
    """A few names, and how many more there are."""
    more = len(kept) - _NAMED_MAX
    return ", ".join(map(printable, kept[:_NAMED_MAX])) + (f" and {more} more" if more > 0 else "")


def print_pace(why: str) -> None:
    """Print on stderr why the work slows down or speeds up."""
    print(f"trashd: {why}", file=sys.stderr, flush=True)


def print_outage(number: int | None, limit_s: float) -> None:
    """Print, for reaper.not_removed.OutageOptions, that a server does not respond, or (None) that it responds again."""
    if number is None:
        print_pace("the filesystem's server responds again")
    else:
        from fusefs.core.human_units import format_duration  # a swap is spared it

        limit = format_duration(round(limit_s))
        print_pace(f"the filesystem's server does not respond ({os.strerror(number)}); waiting at most {limit}")


def print_finding(problem: ConfigProblem, *, as_json: bool) -> None:
    """Print what is wrong in a file, and what to write instead."""
    if as_json:
        print(json.dumps(plain(problem)))
        return
    print(problem._replace(fix=""))
    if problem.fix:
        print(f"  fix: {problem.fix}")


def restore_command(orphan: ContainerId, volume: bytes | None) -> str:
    """What to type to take it back. volume: as in store.swap.Swapped"""
    if volume is None:
        return f"trashd restore {orphan}"
    return f"trashd restore --volume {shell_word(volume)} {orphan}"


def print_swapped(swapped: Swapped, *, json_lines: bool, ids_only: bool, kept: bool) -> None:
    """Print the result of one swap or removal; with ids_only everything but the ID goes to stderr."""
    if json_lines:
        from fusefs.cli.json_objects import UndoCommand

        as_json(swapped, UndoCommand(restore_command(swapped.id, swapped.volume) if kept else None))
        return
    if ids_only:
        print(swapped.id)
    else:
        _print_done(swapped, kept=kept)
    beside = sys.stderr if ids_only else sys.stdout
    if swapped.unnoted:
        details = (
            f"this store is not in your registry ({swapped.unnoted}), so no service reaps it until trashd init adds it"
        )
        print(f"  {details}", file=beside)
    for difference in swapped.unlike:
        what = printable(os.fsencode(difference.what))
        print(f"  differs: {what} is {difference.got}, was {difference.wanted}", file=beside)
    for warning in swapped.warnings:
        warn(warning)


def _print_done(swapped: Swapped, *, kept: bool) -> None:
    path = printable(swapped.path)
    if swapped.method is Method.EXCHANGE:
        print(f"{path}: now empty")
    elif swapped.gap_ns is not None:
        gap_ms = swapped.gap_ns / 1e6
        print(f"{path}: now empty (no atomic exchange on this filesystem: the name was missing for {gap_ms:.2f} ms)")
    else:
        print(f"{path}: removed")
    print(f"  id    {swapped.id}")
    if swapped.kept:
        print(f"  keep  {names(swapped.kept)}")
    if kept:
        print(f"  undo  {restore_command(swapped.id, swapped.volume)}")
        print(f"  until {until(swapped.expires_ns)}")


def until(expires_ns: int | None) -> str:
    """Until when something can be restored, and what deletes it then if no service does. expires_ns: None: never"""
    if expires_ns is None:
        return "you reap it by its ID"
    directories = {SYSTEM_RUNTIME}
    with suppress(OSError):  # a user without a home has no service
        directories.add(runtime_dir())
    is_served = any(map(is_service_running, directories))
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(expires_ns // 1_000_000_000))
    return day if is_served else f"{day}; no reaper service is running, so run trashd reap after that"


def can_confirm() -> bool:
    """Whether there is a person who reads it and can answer."""
    return os.isatty(0) and os.isatty(2)


def is_confirmed(question: str) -> bool:
    """Whether the answer is yes. Raises  KeyboardInterrupt instead of an answer"""
    import click  # a command that asks nothing may do without

    try:
        return click.confirm(question, err=True)
    except click.Abort:
        raise KeyboardInterrupt from None
