"""Selections of entries by name, type, size, times and owner: as users write them, as values, and packed for C."""

from __future__ import annotations

import re
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol

from fusefs.core.glob import NameEnds, NameTest, compile_glob, name_ends
from fusefs.core.human_units import SECOND_NS, parse_size

Field = Literal["mtime", "atime", "ctime", "btime"]
_MOST: Final = 1 << 100
_LEAST: Final = -_MOST
_ANY: Final = (_LEAST, _MOST)
_ANY_SIZE: Final = (0, _MOST)
_WORD_MAX: Final = (1 << 63) - 1
"""Values above this are packed as unlimited."""
TIMES: Final[tuple[Field, ...]] = ("mtime", "atime", "ctime", "btime")
_PACKED: Final = struct.Struct("=12qI2B")
"""struct bounds of linux/native/look.c."""
_ANY_ID: Final = -1


class SizeBound(NamedTuple):
    """A range of sizes in bytes, both ends included. most: None if unlimited"""

    least: int = 0
    most: int | None = None


class TimeBound(NamedTuple):
    """A range of times in nanoseconds since the epoch, both ends excluded; None: unlimited."""

    field: Field
    after_ns: int | None = None
    before_ns: int | None = None


class SelectionStat(Protocol):
    """The fields that we use of an os.stat result."""

    @property
    def st_mode(self) -> int: ...
    @property
    def st_size(self) -> int: ...
    @property
    def st_uid(self) -> int: ...
    @property
    def st_gid(self) -> int: ...
    @property
    def st_atime_ns(self) -> int: ...
    @property
    def st_mtime_ns(self) -> int: ...
    @property
    def st_ctime_ns(self) -> int: ...


Check = Callable[[SelectionStat, int | None], bool]
Bound = tuple[int, int]
"""The lowest and the highest value, both included."""


class StatBounds(NamedTuple):
    """Conditions on an entry's stat, all of which must hold; a range without a condition is as wide as possible.

    size         in bytes
    times        in nanoseconds since the epoch, in the order of TIMES
    limits_birth  the birth time is limited: an entry whose birth time is not known does not match
    uids, gids   the entry must have all of them, so two different ones match nothing
    must_be_empty  the entry is a file of 0 bytes or a directory; the caller checks whether a directory is empty
    """

    size: Bound = _ANY_SIZE
    times: tuple[Bound, Bound, Bound, Bound] = (_ANY,) * 4
    limits_birth: bool = False
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    must_be_empty: bool = False

    def checks(self) -> list[Check]:
        checks: list[Check] = []
        if self.size != _ANY_SIZE:
            least, most = self.size
            checks.append(lambda st, _btime_ns: least <= st.st_size <= most)
        checks += [
            _is_timed(f"st_{name}_ns", bound)
            for name, bound in zip(TIMES[:3], self.times[:3], strict=True)
            if bound != _ANY
        ]
        if self.limits_birth:
            from_ns, to_ns = self.times[3]
            checks.append(lambda _st, btime_ns: bool(btime_ns) and from_ns <= (btime_ns or 0) <= to_ns)
        if self.uids:
            checks.append(lambda st, _btime_ns: {st.st_uid}.issuperset(self.uids))
        if self.gids:
            checks.append(lambda st, _btime_ns: {st.st_gid}.issuperset(self.gids))
        if self.must_be_empty:
            checks.append(_is_empty)
        return checks

    def combined_check(self) -> Check:
        checks = self.checks()
        if len(checks) == 1:
            return checks[0]

        def hold(st: SelectionStat, btime_ns: int | None = None) -> bool:
            for check in checks:  # noqa: SIM110  a generator would take three times as long
                if not check(st, btime_ns):
                    return False
            return True

        return hold

    def packed(self, formats: Iterable[int]) -> bytes | None:
        """Pack the conditions for a C function that checks entries, or return None if a time does not fit into 64 bits.

        formats  the selected types, as listings report them (d_type)
        """
        size = self.size if len(self.uids) < 2 and len(self.gids) < 2 else (1, 0)
        bounds = [value for bound in (size, *self.times) for value in bound]
        if any(_WORD_MAX <= abs(value) < _MOST for value in bounds):
            return None
        owners = [next(iter(ids), _ANY_ID) for ids in (self.uids, self.gids)]
        kinds = sum(1 << format_ for format_ in formats)
        words = [max(-_WORD_MAX, min(value, _WORD_MAX)) for value in bounds]
        return _PACKED.pack(*words, *owners, kinds, self.limits_birth, self.must_be_empty)


def stat_bounds(selection: Selection) -> StatBounds:
    """Return the conditions of a selection that concern an entry's stat."""
    sizes, times = selection.sizes, selection.times
    least, most = [bound.least for bound in sizes], [bound.most for bound in sizes]
    mtime, atime, ctime, btime = [
        (
            _closest_bound(max, [bound.after_ns for bound in times if bound.field == name], _LEAST, 1),
            _closest_bound(min, [bound.before_ns for bound in times if bound.field == name], _MOST, -1),
        )
        for name in TIMES
    ]
    return StatBounds(
        (_closest_bound(max, least, 0), _closest_bound(min, most, _MOST)),
        (mtime, atime, ctime, btime),
        any(bound.field == "btime" for bound in times),
        frozenset(selection.uids),
        frozenset(selection.gids),
        selection.empty,
    )


def _closest_bound(
    closest: Callable[[Iterable[int]], int], bounds: Sequence[int | None], widest: int, step: int = 0
) -> int:
    """Return the tightest of several bounds. step: the distance from an excluded bound to the nearest included value"""
    included = [bound + step for bound in bounds if bound is not None]
    return closest([widest, *included])


def _is_timed(name: str, bound: Bound) -> Check:
    from_ns, to_ns = bound
    return lambda st, _btime_ns: from_ns <= getattr(st, name) <= to_ns


def _is_empty(st: SelectionStat, _btime_ns: int | None) -> bool:
    return st.st_size == 0 if stat.S_ISREG(st.st_mode) else stat.S_ISDIR(st.st_mode)


FORMATS: Final = {
    "f": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK, "p": stat.S_IFIFO, "s": stat.S_IFSOCK, "b": stat.S_IFBLK,
    "c": stat.S_IFCHR,
}  # fmt: skip
"""The letters that find(1) uses for types of entries (file, directory, link, pipe, socket, block and character device),
and the types in st_mode.
"""
KINDS: Final = "".join(FORMATS)
_LETTERS = {format_: letter for letter, format_ in FORMATS.items()}
DIRECTORY = frozenset("d")
DEVICES = frozenset("bc")
_ALL = frozenset(KINDS)


def kind_letter(mode: int) -> str:
    """Return the letter in KINDS for a mode, or `?` if find has none."""
    return _LETTERS.get(stat.S_IFMT(mode), "?")


class Selection(NamedTuple):
    """Conditions on entries, all of which must hold; without any condition, everything except directories is selected.

    names, inames  globs for the name; inames ignore case
    paths          globs for the path relative to the directory
    regexes        regular expressions that must match the whole of that path; `.` matches any character
    excludes       globs: matching entries are neither selected nor entered; a glob with a slash is for the path
    types          letters in KINDS; none: everything except directories or, with `empty`, files and directories
    uids, gids     the entry must have all of them, so two different ones match nothing
    empty          select files of 0 bytes and directories without entries
    max_depth      None: unlimited; the directory's own entries are at depth 1
    """

    names: tuple[str, ...] = ()
    inames: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    regexes: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    types: frozenset[str] = frozenset()
    sizes: tuple[SizeBound, ...] = ()
    times: tuple[TimeBound, ...] = ()
    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    empty: bool = False
    min_depth: int = 1
    max_depth: int | None = None

    def is_everything(self) -> bool:
        """Whether the selection has no condition."""
        return self == Selection()


class Matcher:
    """A selection, compiled for use in this process. Names and paths are decoded as os.fsdecode does it.

    needs_stat       names and types are not enough to decide: call `matches_stat`
    needs_birth      `matches_stat` needs birth times
    needs_emptiness  selected directories must be empty, which the caller checks
    types            the selected types; the default types are in the set, too
    bounds           the conditions that `matches_stat` checks
    ends             the beginning and end of every selected name, as far as case-sensitive globs determine them
    matches_stat     whether an entry's stat (size, times, owner) and birth time match; whether a directory is empty is
                     not checked. Birth time None or 0: the filesystem has none, so a condition on it fails
    """

    def __init__(self, selection: Selection) -> None:
        """Raises  ValueError for an invalid glob or regular expression"""
        names = [compile_glob(text) for text in selection.names]
        names += [compile_glob(text, ignores_case=True) for text in selection.inames]
        paths = [compile_glob(text) for text in selection.paths]
        paths += [_compile_regex(text) for text in selection.regexes]
        pruned = [(text, compile_glob(text)) for text in selection.excludes]
        ends = [name_ends(text) for text in selection.names]
        self.ends = NameEnds(*(max((one[at] for one in ends), key=len, default=b"") for at in range(2)))
        self._by_name, self._by_path = _all(names), _all(paths)
        self._pruned_name = _any([matches for text, matches in pruned if "/" not in text])
        self._pruned_path = _any([matches for text, matches in pruned if "/" in text])
        self._min_depth, self._max_depth = selection.min_depth, selection.max_depth
        self.bounds = stat_bounds(selection)
        self.matches_stat: Check = self.bounds.combined_check()
        self.types = selection.types or (_ALL if selection.empty else _ALL - DIRECTORY)
        if selection.empty:
            self.types &= frozenset("fd")
        self.needs_birth = self.bounds.limits_birth
        self.needs_emptiness = selection.empty and "d" in self.types
        stat_conditions = self.bounds._replace(must_be_empty=self.bounds.must_be_empty and not self.types <= DIRECTORY)
        self.needs_stat = bool(stat_conditions.checks())

    def names_in(self, upper: str) -> NameTest | None:
        """Return the test that selects names in a directory, or None if all names are selected.

        upper  the directory's relative path; empty for the swept directory itself
        """
        return _all(_checks_inside(upper, self._by_name, self._by_path))

    def pruned_in(self, upper: str) -> NameTest | None:
        """Return the test for excluded names in a directory, or None if no name is excluded. upper: as in `names_in`"""
        return _any(_checks_inside(upper, self._pruned_name, self._pruned_path))

    def selects_depth(self, depth: int) -> bool:
        return self._min_depth <= depth and (self._max_depth is None or depth <= self._max_depth)

    def selects_below(self, depth: int) -> bool:
        return self._max_depth is None or depth < self._max_depth


def _compile_regex(text: str) -> NameTest:
    fullmatch = re.compile(text, re.DOTALL).fullmatch
    return lambda path: fullmatch(path) is not None


def _all(several: Sequence[NameTest]) -> NameTest | None:
    """Return a test that passes if all of several tests pass, or None if there are no tests."""
    match several:
        case []:
            return None
        case [one]:
            return one
        case [one, other]:
            return lambda text: one(text) and other(text)
    return lambda text: all(one(text) for one in several)


def _any(several: Sequence[NameTest]) -> NameTest | None:
    """Return a test that passes if any of several tests passes, or None if there are no tests."""
    match several:
        case []:
            return None
        case [one]:
            return one
        case [one, other]:
            return lambda text: one(text) or other(text)
    return lambda text: any(one(text) for one in several)


def _checks_inside(upper: str, by_name: NameTest | None, by_path: NameTest | None) -> list[NameTest]:
    """Return those of the two tests that exist, as tests of names in the directory `upper`."""
    if by_path is not None and upper:
        by_path = _below(upper + "/", by_path)
    return [one for one in (by_name, by_path) if one is not None]


def _below(above: str, by_path: NameTest) -> NameTest:
    return lambda name: by_path(above + name)


_DEPTH_DIGITS_MAX = 9


def check_name(text: str, *, ignores_case: bool = False) -> str:
    """Check a glob for names and return it. Raises  ValueError with a message for the user"""
    compile_glob(text, ignores_case=ignores_case)
    if "/" in text:
        raise ValueError(f"{text!r} contains a slash, which a name can't contain: match the path (--path) instead")
    return text


def check_path(text: str) -> str:
    """Check a glob for paths relative to the directory and return it.

    A glob that can't match any such path is refused, since it would protect nothing as an exclusion.
    Raises  ValueError with a message for the user
    """
    compile_glob(text)
    if text.startswith(("/", "./", "../")):
        raise ValueError(f"{text!r}: paths are relative to the swept directory, without a leading ./")
    if text.endswith("/"):
        raise ValueError(f"{text!r} ends in a slash, so it matches no path: write {text.rstrip('/')!r}")
    if "//" in text:
        raise ValueError(f"{text!r} contains two consecutive slashes, so it matches no path")
    return text


def check_exclude(text: str) -> str:
    """Check a glob that excludes entries: with a slash it is for paths, otherwise for names.

    Raises  ValueError with a message for the user
    """
    return check_path(text) if "/" in text else check_name(text)


def check_regex(text: str) -> str:
    """Check a regular expression (Python's) and return it. Raises  ValueError with a message for the user"""
    if not text:
        raise ValueError("an empty regular expression matches nothing")
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(text, re.DOTALL)
    except re.error as error:
        place = "" if error.pos is None else f" at character {error.pos + 1}"
        raise ValueError(f"{text!r} is not a regular expression: {error.msg}{place}") from error
    except Warning as warning:
        raise ValueError(rf"{text!r} is ambiguous: {warning}: write \ before a literal character") from warning
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    return text


def parse_types(text: str) -> frozenset[str]:
    """Parse types from a list such as `f,l`. Raises  ValueError with a message for the user"""
    kinds = [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        if len(kind) != 1 or kind not in KINDS:
            raise ValueError(
                f"{text!r}: unknown type {kind!r}: write f (files), d (directories), l (links), p (pipes), "
                "s (sockets), b or c (devices), with commas between them"
            )
    return frozenset(kinds)


def common_types(several: Iterable[frozenset[str]]) -> frozenset[str]:
    """Return the types that are in each of several lists, or no types (the default types) if there is no list.

    Raises  ValueError if no type is in all lists, since an empty result would mean the default types
    """
    lists = list(several)
    common = frozenset.intersection(*lists) if lists else frozenset()
    if lists and not common:
        raise ValueError("no file has two types: write the types as one list, as in f,l")
    return common


def parse_size_bound(text: str) -> SizeBound:
    """Parse `+1M` (larger), `-1M` (smaller) or `1M` (exactly, to the byte).

    Raises  ValueError with a message for the user
    """
    sign, amount = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    if len(amount) > 1 and amount.endswith("b") and set(amount[:-1]) <= set("0123456789."):
        raise ValueError(f"{text!r}: in find, b means blocks of 512 bytes: write {text[:-1]} for bytes")
    try:
        size = parse_size(amount)
    except ValueError as error:
        how = "write, for example, +1M for larger, -64K for smaller, or 4096 for exactly 4,096 bytes"
        raise ValueError(f"{text!r} is not a size limit: {how}") from error
    if sign == "-" and size == 0:
        raise ValueError(f"{text!r}: nothing is smaller than 0 bytes; write 0 for exactly 0 bytes")
    if sign == "+":
        return SizeBound(least=size + 1)
    return SizeBound(most=size - 1) if sign else SizeBound(size, size)


def common_depths(several: Iterable[tuple[int, int | None]]) -> tuple[int, int | None]:
    """Return the depths that are in each of several ranges, or all depths if there is no range.

    Raises  ValueError if there are no such depths, since nothing would be selected
    """
    ranges = list(several)
    least = max((one for one, _most in ranges), default=1)
    most = min((most for _least, most in ranges if most is not None), default=None)
    if most is not None and most < least:
        raise ValueError(
            f"no depth is both at least {least} and at most {most}: write one range, as in {most}..{least}"
        )
    return least, most


def parse_depths(text: str) -> tuple[int, int | None]:
    """Parse the least and the greatest depth below the directory from `3` (at most), `2..3`, `2..` or `..3`.

    Raises  ValueError with a message for the user
    """
    match = re.fullmatch(r"(?:([0-9]*)\.\.)?([0-9]*)", text, re.ASCII)
    if not match or not text.strip("."):
        raise ValueError(f"{text!r} is not a depth: write, for example, 2 for at most two levels, 2..3, 2.. or ..3")
    if max(map(len, match.groups(default=""))) > _DEPTH_DIGITS_MAX:
        raise ValueError(f"{text!r} is deeper than any tree")
    least, most = int(match[1] or 1), int(match[2]) if match[2] else None
    if least < 1 or most == 0:
        raise ValueError(
            f"{text!r}: the entries of the directory are at depth 1; the directory itself is never selected"
        )
    if most is not None and most < least:
        raise ValueError(f"{text!r} is reversed")
    return least, most


def format_options(selection: Selection) -> list[str] | None:
    """Format a selection as options of `trashd sweep`, or return None if it limits several timestamps, not just one."""
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


class ListedName(NamedTuple):
    """An entry of a list in a format that contains more than paths.

    path           the path as listed; the whole line if it can't be understood
    ino            the inode number when the list was made; 0: not listed
    is_understood  whether the line was understood, so that `path` is a path
    """

    path: bytes
    ino: int = 0
    is_understood: bool = True


NOT_NAMES = frozenset((b"", b".", b".."))
"""Texts that may follow a path's last slash, but do not name an entry of the directory before it."""


class ListedNames(NamedTuple):
    """Plain names (no slash, not `.` or `..`) in one directory. directory: what precedes each name in its path"""

    directory: bytes
    names: list[str]


ListedPath = bytes | ListedName
"""A path, with or without more information about it."""


class ListFormat(Enum):
    """The format of a list; docs/howto/clusters.md names the programs that write each format."""

    LINES = "lines"
    NUL = "nul"
    MMAPPLYPOLICY = "mmapplypolicy"
