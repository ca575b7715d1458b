"""The options that choose entries, for click; cli/typed_selection.py has what they come to."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from fusefs.cli.options import Decorator, ParamType, ParsedValue, together
from fusefs.core.selection_syntax import (
    check_exclude,
    check_name,
    check_path,
    check_regex,
    parse_depths,
    parse_size_bound,
    parse_types,
)
from fusefs.core.stat_bounds import TIMES
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
"""For a command that takes them as keywords; `typed_selection.typed` makes one value of them."""
