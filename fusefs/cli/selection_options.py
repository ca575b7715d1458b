"""The options that choose entries, and the selection that they make."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
from fusefs.core.stat_bounds import TIMES, Field, SizeBound, TimeBound
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
"""For a command that takes them as keywords; `typed` makes one value of them."""


class SelectionOptions(NamedTuple):
    """What was typed of a selection, named as click's parameters.

    Times are read when it is known which of a file's is meant.
    """

    names: tuple[str, ...] = ()
    inames: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    regexes: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    types: tuple[frozenset[str], ...] = ()
    sizes: tuple[SizeBound, ...] = ()
    older: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    by: tuple[Field, ...] = ()
    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    empty: bool = False
    depths: tuple[tuple[int, int | None], ...] = ()

    def selection(self, kernel: Kernel) -> Selection:
        """The selection. Raises  UsageError; NotFound for a file whose time was meant"""
        by = self._by()
        try:
            times = self._times(kernel, by) if self.older or self.newer else []
            types = common_types(self.types)
            least, most = common_depths(self.depths)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return Selection(
            self.names, self.inames, self.paths, self.regexes, self.excludes, types, self.sizes, tuple(times),
            self.uids, self.gids, self.empty, least, most,
        )  # fmt: skip

    def _times(self, kernel: Kernel, by: Field) -> list[TimeBound]:
        """What is asked of that time. Raises  ValueError, TrashdError"""
        from fusefs.cli.wall_clock import AgeCutoffs  # who asks for no time is spared it

        cutoffs = AgeCutoffs(kernel, notes=bool(self.older))
        now_ns = cutoffs.now.wall_ns
        times = [TimeBound(by, before_ns=_when(kernel, text, by, now_ns, cutoffs.ago)) for text in self.older]
        times += [TimeBound(by, after_ns=_when(kernel, text, by, now_ns)) for text in self.newer]
        cutoffs.tell()
        return times

    def _by(self) -> Field:
        """The time that is meant. Raises  UsageError if nothing is asked of it, or if several are meant"""
        if self.by and not (self.older or self.newer):
            raise UsageError("--by without --older or --newer", "it says which time of a file they mean")
        match tuple(dict.fromkeys(self.by)):
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


def typed(options: dict[str, Any]) -> SelectionOptions:
    """Takes what belongs to the selection out of a command's options."""
    return SelectionOptions(**{field: options.pop(field) for field in SelectionOptions._fields if field in options})
