"""A selection of entries by name, kind, size, times and owner: as people type it, as a value, and packed for C."""

from __future__ import annotations

import re
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol

from fusefs.core.glob import Matches, NameEnds, compile_glob, name_ends
from fusefs.core.human_units import SECOND_NS, parse_size

Field = Literal["mtime", "atime", "ctime", "btime"]
_MOST: Final = 1 << 100
_LEAST: Final = -_MOST
_ANY: Final = (_LEAST, _MOST)
_ANY_SIZE: Final = (0, _MOST)
_WORD: Final = (1 << 63) - 1
"""Packed, it is without end."""
TIMES: Final[tuple[Field, ...]] = ("mtime", "atime", "ctime", "btime")
_PACKED: Final = struct.Struct("=12qI2B")
"""struct bounds of linux/native/look.c"""
_WHOEVER: Final = -1


class SizeBound(NamedTuple):
    """Sizes in bytes, from and to, both included; most None: without end."""

    least: int = 0
    most: int | None = None


class TimeBound(NamedTuple):
    """Times in nanoseconds since the epoch, later than one and earlier than another; None: whenever."""

    field: Field
    after_ns: int | None = None
    before_ns: int | None = None


class SelectionStat(Protocol):
    """What os.stat tells, as far as it matters."""

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
"""From and to, both included."""


class StatBounds(NamedTuple):
    """All that must hold; as wide as can be where nothing is asked.

    size         in bytes
    times        in nanoseconds since the epoch, by TIMES
    asks_birth   the last of them: an entry whose birth is not known is not taken
    uids, gids   all of them: two that differ are nobody's
    must_be_empty  a file without a byte; or a directory, whose reader looks
    """

    size: Bound = _ANY_SIZE
    times: tuple[Bound, Bound, Bound, Bound] = (_ANY,) * 4
    asks_birth: bool = False
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    must_be_empty: bool = False

    def checks(self) -> list[Check]:
        """What asks one thing each."""
        checks: list[Check] = []
        if self.size != _ANY_SIZE:
            least, most = self.size
            checks.append(lambda st, _btime_ns: least <= st.st_size <= most)
        checks += [
            _is_timed(f"st_{name}_ns", bound)
            for name, bound in zip(TIMES[:3], self.times[:3], strict=True)
            if bound != _ANY
        ]
        if self.asks_birth:
            from_ns, to_ns = self.times[3]
            checks.append(lambda _st, btime_ns: bool(btime_ns) and from_ns <= (btime_ns or 0) <= to_ns)
        if self.uids:
            checks.append(lambda st, _btime_ns: {st.st_uid}.issuperset(self.uids))
        if self.gids:
            checks.append(lambda st, _btime_ns: {st.st_gid}.issuperset(self.gids))
        if self.must_be_empty:
            checks.append(_is_empty)
        return checks

    def takes(self) -> Check:
        """What asks for all of it."""
        checks = self.checks()
        if len(checks) == 1:
            return checks[0]

        def hold(st: SelectionStat, btime_ns: int | None = None) -> bool:
            for check in checks:  # noqa: SIM110  a generator takes three times as long
                if not check(st, btime_ns):
                    return False
            return True

        return hold

    def packed(self, formats: Iterable[int]) -> bytes | None:
        """For one call that looks at many; None: 64 bits have no room for a time that is asked for.

        formats  the types that are meant, as listings tell them (d_type)
        """
        size = self.size if len(self.uids) < 2 and len(self.gids) < 2 else (1, 0)
        bounds = [value for bound in (size, *self.times) for value in bound]
        if any(_WORD <= abs(value) < _MOST for value in bounds):
            return None
        owners = [next(iter(ids), _WHOEVER) for ids in (self.uids, self.gids)]
        kinds = sum(1 << format_ for format_ in formats)
        words = [max(-_WORD, min(value, _WORD)) for value in bounds]
        return _PACKED.pack(*words, *owners, kinds, self.asks_birth, self.must_be_empty)


def stat_bounds(selection: Selection) -> StatBounds:
    """What must hold of an entry's stat."""
    sizes, times = selection.sizes, selection.times
    least, most = [bound.least for bound in sizes], [bound.most for bound in sizes]
    mtime, atime, ctime, btime = [
        (
            _within(max, [bound.after_ns for bound in times if bound.field == name], _LEAST, 1),
            _within(min, [bound.before_ns for bound in times if bound.field == name], _MOST, -1),
        )
        for name in TIMES
    ]
    return StatBounds(
        (_within(max, least, 0), _within(min, most, _MOST)),
        (mtime, atime, ctime, btime),
        any(bound.field == "btime" for bound in times),
        frozenset(selection.uids),
        frozenset(selection.gids),
        selection.empty,
    )


def _within(closest: Callable[[Iterable[int]], int], bounds: Sequence[int | None], widest: int, step: int = 0) -> int:
    """The closest of some bounds. step: from one that is not included to one that is"""
    told = [bound + step for bound in bounds if bound is not None]
    return closest([widest, *told])


def _is_timed(name: str, bound: Bound) -> Check:
    from_ns, to_ns = bound
    return lambda st, _btime_ns: from_ns <= getattr(st, name) <= to_ns


def _is_empty(st: SelectionStat, _btime_ns: int | None) -> bool:
    return st.st_size == 0 if stat.S_ISREG(st.st_mode) else stat.S_ISDIR(st.st_mode)


FORMATS: Final = {
    "f": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK, "p": stat.S_IFIFO, "s": stat.S_IFSOCK, "b": stat.S_IFBLK,
    "c": stat.S_IFCHR,
}  # fmt: skip
"""Kinds of entries as find writes them (file, directory, link, pipe, socket, block and character device), and as modes
do.
"""
KINDS: Final = "".join(FORMATS)
_LETTERS = {format_: letter for letter, format_ in FORMATS.items()}
DIRECTORY = frozenset("d")
DEVICES = frozenset("bc")
_ALL = frozenset(KINDS)


def letter_of(mode: int) -> str:
    """What a mode says of the kind, as in KINDS; `?` for one that find has no letter for."""
    return _LETTERS.get(stat.S_IFMT(mode), "?")


class Selection(NamedTuple):
    """What must all hold for an entry; nothing told: for everything but directories.

    names, inames  globs against the name, inames ignoring case
    paths          globs against the path relative to the directory
    regexes        against the whole of that path; a `.` is any character
    excludes       globs: what one of them matches is neither taken nor entered; against the path if it has a slash
    types          of KINDS; empty: all but directories, and with `empty` files and directories
    uids, gids     all of them, as with everything: two that differ match nothing
    empty          files without a byte, and directories without an entry
    max_depth      None: any; the directory's own entries are at depth 1
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
        """Whether nothing narrows it."""
        return self == Selection()


class Matcher:
    """A selection, ready to be asked often; one for each process. Names and paths are as os.fsdecode has them.

    needs_stat       names and kinds don't tell all: ask `takes`
    needs_birth      `takes` asks for birth times
    needs_emptiness  a directory that is chosen must have no entry: its reader looks
    types            the kinds that are meant, all of them named
    bounds           what `takes` asks for
    ends             those of each name that is chosen, as far as globs that heed case tell them
    takes            whether an entry is chosen, as far as its stat tells: size, times, owner; not: of a directory if
                     empty. With its birth time; None or 0: the filesystem has none, and nothing that asks for it
                     takes the entry
    """

    def __init__(self, selection: Selection) -> None:
        """Raises  ValueError for a glob or a regular expression that is none."""
        names = [compile_glob(text) for text in selection.names]
        names += [compile_glob(text, ignores_case=True) for text in selection.inames]
        paths = [compile_glob(text) for text in selection.paths]
        paths += [_whole(text) for text in selection.regexes]
        pruned = [(text, compile_glob(text)) for text in selection.excludes]
        ends = [name_ends(text) for text in selection.names]
        self.ends = NameEnds(*(max((one[at] for one in ends), key=len, default=b"") for at in range(2)))
        self._by_name, self._by_path = _all(names), _all(paths)
        self._pruned_name = _any([matches for text, matches in pruned if "/" not in text])
        self._pruned_path = _any([matches for text, matches in pruned if "/" in text])
        self._min_depth, self._max_depth = selection.min_depth, selection.max_depth
        self.bounds = stat_bounds(selection)
        self.takes: Check = self.bounds.takes()
        self.types = selection.types or (_ALL if selection.empty else _ALL - DIRECTORY)
        if selection.empty:
            self.types &= frozenset("fd")
        self.needs_birth = self.bounds.asks_birth
        self.needs_emptiness = selection.empty and "d" in self.types
        asked = self.bounds._replace(must_be_empty=self.bounds.must_be_empty and not self.types <= DIRECTORY)
        self.needs_stat = bool(asked.checks())

    def names_in(self, upper: str) -> Matches | None:
        """What says which names in a directory are chosen, as far as names tell; None: all.

        upper  the directory's relative path; empty for the one that the sweep is of
        """
        return _all(_here(upper, self._by_name, self._by_path))

    def pruned_in(self, upper: str) -> Matches | None:
        """What says which names in a directory are neither taken nor entered; None: none. upper: as for `names_in`"""
        return _any(_here(upper, self._pruned_name, self._pruned_path))

    def has_depth(self, depth: int) -> bool:
        """Whether entries of a depth are meant."""
        return self._min_depth <= depth and (self._max_depth is None or depth <= self._max_depth)

    def goes_below(self, depth: int) -> bool:
        """Whether any entries are meant that are deeper than a depth."""
        return self._max_depth is None or depth < self._max_depth


def _whole(text: str) -> Matches:
    fullmatch = re.compile(text, re.DOTALL).fullmatch
    return lambda path: fullmatch(path) is not None


def _all(several: Sequence[Matches]) -> Matches | None:
    """What holds if each of several does; None if there are none."""
    match several:
        case []:
            return None
        case [one]:
            return one
        case [one, other]:
            return lambda text: one(text) and other(text)
    return lambda text: all(one(text) for one in several)


def _any(several: Sequence[Matches]) -> Matches | None:
    """What holds if one of several does; None if there are none."""
    match several:
        case []:
            return None
        case [one]:
            return one
        case [one, other]:
            return lambda text: one(text) or other(text)
    return lambda text: any(one(text) for one in several)


def _here(upper: str, by_name: Matches | None, by_path: Matches | None) -> list[Matches]:
    """What there is of two, both for names in a directory."""
    if by_path is not None and upper:
        by_path = _below(upper + "/", by_path)
    return [one for one in (by_name, by_path) if one is not None]


def _below(above: str, by_path: Matches) -> Matches:
    return lambda name: by_path(above + name)


_DEPTH_DIGITS_MAX = 9


def check_name(text: str, *, ignores_case: bool = False) -> str:
    """A glob for names, as it is. Raises  ValueError with a message for the person who typed it"""
    compile_glob(text, ignores_case=ignores_case)
    if "/" in text:
        raise ValueError(f"{text!r} contains a slash, which no name contains: match the path (--path) instead")
    return text


def check_path(text: str) -> str:
    """A glob for paths relative to the directory, as it is.

    What no such path can match is refused: as something to be left out it would leave out nothing.
    Raises  ValueError with a message for the person who typed it
    """
    compile_glob(text)
    if text.startswith(("/", "./", "../")):
        raise ValueError(f"{text!r}: paths are relative to the swept directory, without a leading ./")
    if text.endswith("/"):
        raise ValueError(f"{text!r} ends in a slash, which no path does: write {text.rstrip('/')!r}")
    if "//" in text:
        raise ValueError(f"{text!r} contains two consecutive slashes, which no path does")
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
        raise ValueError(f"{text!r} is not a regular expression: {error.msg}{place}") from error
    except Warning as warning:
        raise ValueError(rf"{text!r} is ambiguous: {warning}: write \ before a literal character") from warning
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    return text


def parse_types(text: str) -> frozenset[str]:
    """Kinds from a list such as `f,l`. Raises  ValueError with a message for the person who typed it"""
    kinds = [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        if len(kind) != 1 or kind not in KINDS:
            raise ValueError(
                f"{text!r}: unknown type {kind!r}: write f (files), d (directories), l (links), p (pipes), "
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
        raise ValueError("no file has two types: write the types as one list, as in f,l")
    return common


def parse_size_bound(text: str) -> SizeBound:
    """Sizes from `+1M` (larger), `-1M` (smaller) or `1M` (exactly), to the byte.

    Raises  ValueError with a message for the person who typed it
    """
    sign, amount = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    if len(amount) > 1 and amount.endswith("b") and set(amount[:-1]) <= set("0123456789."):
        raise ValueError(f"{text!r}: for find, b means blocks of 512 bytes: write {text[:-1]} for bytes")
    try:
        size = parse_size(amount)
    except ValueError as error:
        how = "write +1M for larger, -64K for smaller, 4096 for exactly 4,096 bytes"
        raise ValueError(f"{text!r} is not a size limit: {how}") from error
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
        raise ValueError(
            f"no depth is both at least {least} and at most {most}: write one range, as in {most}..{least}"
        )
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
        raise ValueError(
            f"{text!r}: the entries of the directory are at depth 1; the directory itself is never selected"
        )
    if most is not None and most < least:
        raise ValueError(f"{text!r} is reversed")
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


class ListedName(NamedTuple):
    """What a list says that has more than names.

    path           as it is listed; what can't be understood, if it is that
    ino            its inode number when the list was made; 0: not told
    is_understood  whether it is a path
    """

    path: bytes
    ino: int = 0
    is_understood: bool = True


NO_NAMES = frozenset((b"", b".", b".."))
"""What may stand behind a path's last slash, and names nothing in the directory before it."""


class ListedTogether(NamedTuple):
    """Several names of one directory, none of them `.`, `..` or with a slash. directory: as of a path"""

    directory: bytes
    names: list[str]


Listed = bytes | ListedName
"""A path alone, or with what else is known of it."""


class ListFormat(Enum):
    """How a list is written; docs/hpc.md says by which program."""

    LINES = "lines"
    NUL = "nul"
    MMAPPLYPOLICY = "mmapplypolicy"
