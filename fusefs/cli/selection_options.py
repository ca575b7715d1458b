"""The options that choose entries, for click, and the selection that they make."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from fusefs.cli.options import Decorator, ParamType, ParsedValue, together
from fusefs.core.errors import UsageError, errors_about
from fusefs.core.selection import Selection
from fusefs.core.selection_syntax import (
    check_exclude,
    check_name,
    check_path,
    check_regex,
    common_depths,
    common_types,
    parse_depths,
    parse_size_bound,
    parse_types,
)
from fusefs.core.stat_bounds import TIMES, Field, TimeBound
from fusefs.core.timestamps import is_path, parse_when
from fusefs.linux.kernel import Kernel
from fusefs.linux.user_names import gid_of, uid_of


def _many(name: str, field: str, read: ParamType[Any], metavar: str, told: str) -> Decorator:
    return click.option(name, field, type=read, multiple=True, metavar=metavar, help=told)


selection_options = together((
    _many("--name", "names", ParsedValue("glob", check_name), "GLOB", "The name matches, as find has it."),
    _many(
        "--iname", "inames", ParsedValue("glob", partial(check_name, ignores_case=True)), "GLOB",
        "The same, ignoring case.",
    ),
    _many(
        "--path", "paths", ParsedValue("glob", check_path), "GLOB", "The path below DIR matches; * takes slashes too."
    ),
    _many("--regex", "regexes", ParsedValue("regex", check_regex), "REGEX", "That whole path matches (Python's re)."),
    _many(
        "--type", "types", ParsedValue("types", parse_types), "f,d,l,p,s,b,c",
        "Of one of these types; default: all but d.",
    ),
    _many(
        "--size", "sizes", ParsedValue("size", parse_size_bound), "[+-]N[KMGT]",
        "Larger, smaller, exactly so many bytes.",
    ),
    click.option("--older", multiple=True, metavar="WHEN", help="Before WHEN: 7d, 2026-11-01, @SECONDS, ./FILE."),
    click.option("--newer", multiple=True, metavar="WHEN", help="After WHEN."),
    _many("--by", "by", click.Choice(TIMES), "|".join(TIMES), "The time that is meant (mtime)."),
    _many("--user", "uids", ParsedValue("user", uid_of), "USER", "Owned by that user, a name or number."),
    _many("--group", "gids", ParsedValue("group", gid_of), "GROUP", "Of that group."),
    click.option("--empty", is_flag=True, help="Empty files and directories."),
    _many(
        "--depth", "depths", ParsedValue("depth", parse_depths), "N|A..B",
        "At most N levels below DIR, or from A to B; its own entries are at 1.",
    ),
    _many(
        "--exclude", "excludes", ParsedValue("glob", check_exclude), "GLOB",
        "Neither take nor enter what matches; by path if it has a slash.",
    ),
))  # fmt: skip
"""For a command that takes them as keywords; `read_selection` makes one value of them."""


def read_selection(kernel: Kernel, options: dict[str, Any]) -> Selection:
    """The selection of a command's options, out of which it takes them.

    Times are read when it is known which of a file's is meant.
    Raises  UsageError; NotFound for a file whose time was meant
    """
    older, newer = options.pop("older"), options.pop("newer")
    by = _time_of(options.pop("by"), is_asked=bool(older or newer))
    times = list[TimeBound]()
    try:
        if older or newer:
            from fusefs.cli.wall_clock import AgeCutoffs  # others are spared it

            cutoffs = AgeCutoffs(kernel, notes=bool(older))
            now_ns = cutoffs.now.wall_ns
            times += [TimeBound(by, before_ns=_when(kernel, text, by, now_ns, cutoffs.ago)) for text in older]
            times += [TimeBound(by, after_ns=_when(kernel, text, by, now_ns)) for text in newer]
            cutoffs.tell()
        types = common_types(options.pop("types"))
        least, most = common_depths(options.pop("depths"))
    except ValueError as error:
        raise UsageError(str(error)) from error
    others = {name: options.pop(name) for name in Selection._fields if name in options}
    return Selection(types=types, times=tuple(times), min_depth=least, max_depth=most, **others)


def _time_of(by: tuple[Field, ...], *, is_asked: bool) -> Field:
    """The time that is meant. Raises  UsageError if nothing is asked of it, or if several are meant"""
    if by and not is_asked:
        raise UsageError("--by without --older or --newer", "it says which time of a file they mean")
    match tuple(dict.fromkeys(by)):
        case ():
            return "mtime"
        case (field,):
            return field
        case fields:
            hint = "all times of one sweep are the same; of what one prints, the next may choose: --print0, -0"
            raise UsageError(" with ".join(f"--by {field}" for field in fields), hint)


def _when(kernel: Kernel, text: str, field: Field, now_ns: int, cutoff_ns: Callable[[int], int] | None = None) -> int:
    """A moment. Raises  ValueError, TrashdError"""
    if not is_path(text):
        return parse_when(text, now_ns, time.mktime, cutoff_ns)
    path = os.fsencode(text)
    with errors_about(path), kernel.open_path(path, os.O_PATH) as fd:
        if field == "btime":
            born_ns = kernel.statx(fd, asks=True).btime_ns
            if not born_ns:
                raise ValueError(f"{text} has no birth time: its filesystem keeps none")
            return born_ns
        found: int = getattr(kernel.fstat(fd), f"st_{field}_ns")
        return found
