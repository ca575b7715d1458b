"""What a selection is made of, as people type it on a command line or in a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fusefs.core.glob import compile_glob
from fusefs.core.selection import KINDS, Selection
from fusefs.core.sizes import parse_size
from fusefs.core.stat_bounds import SizeBound
from fusefs.core.timestamps import SECOND_NS

_DEPTH_DIGITS_MAX = 9


def check_name(text: str, *, ignores_case: bool = False) -> str:
    """A glob for names, as it is. Raises  ValueError with a message for the person who typed it"""
    compile_glob(text, ignores_case=ignores_case)
    if "/" in text:
        raise ValueError(f"{text!r} has a slash, which no name has: match the path (--path) instead")
    return text


def check_path(text: str) -> str:
    """A glob for paths relative to the directory, as it is.

    What no such path can match is refused: as something to be left out it would leave out nothing.
    Raises  ValueError with a message for the person who typed it
    """
    compile_glob(text)
    if text.startswith(("/", "./", "../")):
        raise ValueError(f"{text!r}: paths are relative to the directory that is swept, without ./ before them")
    if text.endswith("/"):
        raise ValueError(f"{text!r} ends in a slash, which no path does: write {text.rstrip('/')!r}")
    if "//" in text:
        raise ValueError(f"{text!r} has two slashes together, which no path has")
    return text


def check_exclude(text: str) -> str:
    """A glob for what is left out: for paths if it has a slash, otherwise for names.

    Raises  ValueError with a message for the person who typed it
    """
    return check_path(text) if "/" in text else check_name(text)


def check_regex(text: str) -> str:
    """A regular expression (Python's), as it is. Raises  ValueError with a message for the person who typed it"""
    if not text:
        raise ValueError("an empty regular expression matches nothing")
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(text, re.DOTALL)
    except re.error as error:
        place = "" if error.pos is None else f" at character {error.pos + 1}"
        raise ValueError(f"{text!r} is no regular expression: {error.msg}{place}") from error
    except Warning as warning:
        raise ValueError(rf"{text!r} is doubtful: {warning}: write \ before what is meant as it is") from warning
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    return text


def parse_types(text: str) -> frozenset[str]:
    """Kinds from a list such as `f,l`. Raises  ValueError with a message for the person who typed it"""
    kinds = [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        if len(kind) != 1 or kind not in KINDS:
            raise ValueError(
                f"{text!r}: there is no type {kind!r}: write f (files), d (directories), l (links), p (pipes), "
                "s (sockets), b or c (devices), with commas between them"
            )
    return frozenset(kinds)


def common_types(several: Iterable[frozenset[str]]) -> frozenset[str]:
    """The kinds that all of several lists have; without any list none, which means the usual ones.

    Raises  ValueError if the lists have none in common: nothing would be chosen, and no kinds mean the usual ones
    """
    lists = list(several)
    common = frozenset.intersection(*lists) if lists else frozenset()
    if lists and not common:
        raise ValueError("nothing has two types at once: write them as one list, as in f,l")
    return common


def parse_size_bound(text: str) -> SizeBound:
    """Sizes from `+1M` (larger), `-1M` (smaller) or `1M` (exactly), to the byte.

    Raises  ValueError with a message for the person who typed it
    """
    sign, amount = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    if len(amount) > 1 and amount.endswith("b") and set(amount[:-1]) <= set("0123456789."):
        raise ValueError(f"{text!r}: find means blocks of 512 bytes by b: write {text[:-1]} for bytes")
    try:
        size = parse_size(amount)
    except ValueError as error:
        how = "write +1M for larger, -64K for smaller, 4096 for exactly so many bytes"
        raise ValueError(f"{text!r} is no bound for a size: {how}") from error
    if sign == "-" and size == 0:
        raise ValueError(f"{text!r}: nothing is smaller than 0 bytes; 0 means exactly that")
    if sign == "+":
        return SizeBound(least=size + 1)
    return SizeBound(most=size - 1) if sign else SizeBound(size, size)


def common_depths(several: Iterable[tuple[int, int | None]]) -> tuple[int, int | None]:
    """The levels that all of several ranges have; without any, all levels.

    Raises  ValueError if they have none in common: nothing would be chosen
    """
    ranges = list(several)
    least = max((one for one, _most in ranges), default=1)
    most = min((most for _least, most in ranges if most is not None), default=None)
    if most is not None and most < least:
        raise ValueError(f"no depth is at least {least} and at most {most}: write one range, as in {most}..{least}")
    return least, most


def parse_depths(text: str) -> tuple[int, int | None]:
    """The least and the most levels below the directory, from `3` (at most), `2..3`, `2..` or `..3`.

    Raises  ValueError with a message for the person who typed it
    """
    found = re.fullmatch(r"(?:([0-9]*)\.\.)?([0-9]*)", text, re.ASCII)
    if not found or not text.strip("."):
        raise ValueError(f"{text!r} is not a depth: write 2 for at most two levels, 2..3, 2.. or ..3")
    if max(map(len, found.groups(default=""))) > _DEPTH_DIGITS_MAX:
        raise ValueError(f"{text!r} is deeper than any tree")
    least, most = int(found[1] or 1), int(found[2]) if found[2] else None
    if least < 1 or most == 0:
        raise ValueError(f"{text!r}: the directory's own entries are at depth 1, and it itself is never chosen")
    if most is not None and most < least:
        raise ValueError(f"{text!r} is the wrong way round")
    return least, most


def format_options(selection: Selection) -> list[str] | None:
    """Write a selection as options of `trashd sweep`; None if it asks for several times of a file: options cannot."""
    fields = {bound.field for bound in selection.times}
    if len(fields) > 1:
        return None
    options = [
        ("--name", selection.names), ("--iname", selection.inames), ("--path", selection.paths),
        ("--regex", selection.regexes), ("--exclude", selection.excludes),
        ("--type", [",".join(sorted(selection.types))] if selection.types else []),
        ("--size", map(_format_size_bound, selection.sizes)),
        ("--older", [_format_moment(one.before_ns) for one in selection.times if one.before_ns is not None]),
        ("--newer", [_format_moment(one.after_ns) for one in selection.times if one.after_ns is not None]),
        ("--by", fields), ("--user", map(str, selection.uids)), ("--group", map(str, selection.gids)),
    ]  # fmt: skip
    words = [word for option, values in options for value in values for word in (option, value)]
    if (selection.min_depth, selection.max_depth) != (1, None):
        words += ["--depth", f"{selection.min_depth}..{selection.max_depth or ''}"]
    return [*words, "--empty"] if selection.empty else words


def _format_size_bound(bound: SizeBound) -> str:
    if bound.most is None:
        return f"+{bound.least - 1}"
    return str(bound.most) if bound.least else f"-{bound.most + 1}"


def _format_moment(time_ns: int) -> str:
    seconds, rest_ns = divmod(abs(time_ns), SECOND_NS)
    return f"@{'-' if time_ns < 0 else ''}{seconds}.{rest_ns:09d}"
