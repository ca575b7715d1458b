"""Prints what commands report: lines for people, JSON for programs, and errors with the next step.

If standard output can't be written, for example on a full disk, `to_error` returns the error that the command prints.
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
"""The least width of a shortened path, in columns; a shorter piece would be useless."""


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line requests JSON, even if it is otherwise invalid."""
    return "--json" in arguments[: arguments.index("--") if "--" in arguments else None]


def print_error(error: TrashdError, *, as_json: bool = False) -> int:
    """Print an error on stderr and return its exit code."""
    if as_json:
        from fusefs.cli.json_objects import ErrorTold

        error_object = ErrorTold(type(error).__name__, error.message(), error.hint, error.exit_code)
        print(json.dumps(plain(error_object)), file=sys.stderr)
        return error.exit_code
    command, usage = (error.command, error.usage) if isinstance(error, UsageError) else ("", "")
    # A message may quote arguments as typed, or names that a glob expanded to.
    lines = [f"{command or 'trashd'}: {printable_text(error.message())}"]
    if error.hint:
        lines.append(f"  hint: {printable_text(error.hint)}")
    if usage:
        lines += [f"usage: {usage}", f"Try '{command} --help' for more information."]
    print("\n".join(lines), file=sys.stderr)
    return error.exit_code


def to_error(error: TrashdError | OSError) -> TrashdError:
    """Write the remaining output if possible, and convert the exception that ended a command to the error to print."""
    unwritten = refused(flush)  # tries again to write the output that was not accepted
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
    return from_os(error, "can't start a process" if number == errno.EAGAIN else "a system call")


def flush() -> None:
    """Write the buffered output, because the process ends without the cleanup in which Python would write it."""
    print(end="", flush=True)


def refused(act: Callable[[], object]) -> int | None:
    """Call `act` and return the errno with which it fails; None if it succeeds."""
    try:
        act()
    except OSError as error:
        return error.errno
    return None


def exit_code(codes: Sequence[int]) -> int:
    """Combine exit codes: return a single code as it is, and Incomplete's if any of several is not 0."""
    if len(codes) == 1:
        return codes[0]
    return Incomplete.exit_code if any(codes) else 0


def warn(text: str) -> None:
    print(f"trashd: warning: {printable_text(text)}", file=sys.stderr)


def plain(value: Any) -> Any:
    r"""Convert a value for JSON: bytes to text, invalid UTF-8 to lone surrogates (`\udcXX`, as in os.fsdecode)."""
    if value is None or isinstance(value, str | int):  # the usual case: a list may have 100,000 containers
        return value
    if isinstance(value, bytes):
        return os.fsdecode(value)
    if hasattr(value, "_value_"):  # either kind of Enum
        return value.value
    if hasattr(value, "_fields") or hasattr(value, "__struct_fields__"):
        return fields(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def fields(value: Any) -> dict[str, Any]:
    """Convert a NamedTuple or a Struct into a JSON object."""
    names = value._fields if hasattr(value, "_fields") else value.__struct_fields__
    return {name: plain(getattr(value, name)) for name in names}


def as_json(*parts: Any, without: str = "") -> None:
    """Print one JSON object on a line: the fields of all parts. If two parts have a field, the later one wins.

    build_docs/json_schema.py lists the types that each command prints.
    without  a field to omit, because it only describes another field
    """
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= fields(part)
    merged.pop(without, None)
    print(json.dumps(merged))


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Format a table: each column except the last is as wide as its widest cell.

    width  the maximum width, to which the last column is shortened as far as possible; None: nothing is shortened
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    gap, room = "  ", None
    if width is not None:
        left = width - sum(widths)
        gap = gap if left - 2 * len(widths) >= _LEAST_ROOM else " "
        room = max(left - len(gap) * len(widths), _LEAST_ROOM)
    return [gap.join([*map(str.ljust, row, widths), _shortened(row[-1], room)]) for row in rows]


def terminal_width() -> int | None:
    """Return the number of columns of the terminal; None if standard output is not a terminal."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size  # imported late: a swap does not need it

    return get_terminal_size().columns


def _shortened(text: str, room: int | None) -> str:
    """Shorten a text in the middle, since the beginning and the end of a path identify it."""
    if room is None or len(text) <= room:
        return text
    n_first = room // 3
    return f"{text[:n_first]}…{text[n_first + 1 - room :]}"


def origin(path: bytes | None) -> str:
    """Format the original path of a tree for people."""
    return "(dropped)" if path is None else printable(by_mount_point(path))


def by_mount_point(path: bytes) -> bytes:
    """Convert a daemon's private path to the path that users know; return any other path unchanged."""
    if not path.startswith(MOUNTS_RUNTIME):
        return path
    from fusefs.store.mounted_paths import to_mount_path

    return to_mount_path(path)


def counted(count: int, what: str, several: str = "") -> str:
    """Format a count with its noun: `1 match`, `2 matches`."""
    return f"1 {what}" if count == 1 else f"{count:,} {several or what + 's'}"


def names(kept: Sequence[bytes]) -> str:
    """Format the first few names, and the number of the others."""
    more = len(kept) - _NAMED_MAX
    return ", ".join(map(printable, kept[:_NAMED_MAX])) + (f" and {more} more" if more > 0 else "")


def print_pace(why: str) -> None:
    """Print on stderr why the work slows down or speeds up."""
    print(f"trashd: {why}", file=sys.stderr, flush=True)


def print_outage(number: int | None, limit_s: float) -> None:
    """Report that a server does not respond, or, if `number` is None, that it responds again."""
    if number is None:
        print_pace("the filesystem's server responds again")
    else:
        from fusefs.core.human_units import format_duration  # imported late: a swap does not need it

        limit = format_duration(round(limit_s))
        print_pace(f"the filesystem's server does not respond ({os.strerror(number)}); waiting at most {limit}")


def print_finding(problem: ConfigProblem, *, as_json: bool) -> None:
    """Print a problem in a configuration or plan file, and its fix."""
    if as_json:
        print(json.dumps(plain(problem)))
        return
    print(problem._replace(fix=""))
    if problem.fix:
        print(f"  fix: {problem.fix}")


def restore_command(orphan: ContainerId, volume: bytes | None) -> str:
    """Return the command that restores an orphan. volume: as in store.swap.Swapped"""
    if volume is None:
        return f"trashd restore {orphan}"
    return f"trashd restore --volume {shell_word(volume)} {orphan}"


def print_swapped(swapped: Swapped, *, json_lines: bool, ids_only: bool, kept: bool) -> None:
    """Print the result of a swap or removal. ids_only: print only the ID on stdout, and warnings on stderr"""
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
    """Format the time until which an orphan can be restored.

    If no reaper service is running, append the command that deletes the orphan after that time.

    expires_ns  None if it never expires
    """
    if expires_ns is None:
        return "you reap it by its ID"
    directories = {SYSTEM_RUNTIME}
    with suppress(OSError):  # a user without a home has no service
        directories.add(runtime_dir())
    is_served = any(map(is_service_running, directories))
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(expires_ns // 1_000_000_000))
    return day if is_served else f"{day}; no reaper service is running, so run trashd reap after that"


def can_confirm() -> bool:
    """Return whether someone at a terminal can read a question and answer it."""
    return os.isatty(0) and os.isatty(2)


def is_confirmed(question: str) -> bool:
    """Ask a question and return whether the answer is yes. Raises  KeyboardInterrupt if the user presses Ctrl-C"""
    import click  # imported late: most commands ask nothing

    try:
        return click.confirm(question, err=True)
    except click.Abort:
        raise KeyboardInterrupt from None
