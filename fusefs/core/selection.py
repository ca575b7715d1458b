"""Which entries below a directory are meant: by name, kind, size, times and owner, and how it is told fast."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, Literal, NamedTuple, Protocol

from fusefs.core.glob import Matches, compile_glob

Field = Literal["mtime", "atime", "ctime", "btime"]
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
_ALL = frozenset(KINDS)
_FOREVER = 1 << 100


def letter_of(mode: int) -> str:
    """What a mode says of the kind, as in KINDS; `?` for one that find has no letter for."""
    return _LETTERS.get(stat.S_IFMT(mode), "?")


class SizeBound(NamedTuple):
    """Sizes in bytes, from and to, both included; most None: without end."""

    least: int = 0
    most: int | None = None


class TimeBound(NamedTuple):
    """Times in nanoseconds since the epoch, later than one and earlier than another; None: whenever."""

    field: Field
    after_ns: int | None = None
    before_ns: int | None = None


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


class Matcher:
    """A selection, ready to be asked often; one for each process. Names and paths are as os.fsdecode has them.

    needs_stat       names and kinds don't tell all: ask `takes`
    needs_birth      `takes` asks for birth times
    needs_emptiness  a directory that is chosen must have no entry: its reader looks
    types            the kinds that are meant, all of them named
    takes            whether an entry is chosen, as far as its stat tells: size, times, owner; not: of a directory if
                     empty. With its birth time; None or 0: the filesystem has none, and nothing that asks for it
                     takes the entry
    """

    def __init__(self, selection: Selection) -> None:
        """Raises  ValueError for a glob or a regular expression that is none."""
        names = [compile_glob(text) for text in selection.names]
        names += [compile_glob(text, ignores_case=True) for text in selection.inames]
        paths = [compile_glob(text) for text in selection.paths]
        paths += [_whole(re.compile(text, re.DOTALL)) for text in selection.regexes]
        pruned = [(text, compile_glob(text)) for text in selection.excludes]
        self._by_name, self._by_path = _all(names), _all(paths)
        self._pruned_name = _any([matches for text, matches in pruned if "/" not in text])
        self._pruned_path = _any([matches for text, matches in pruned if "/" in text])
        self._min_depth, self._max_depth = selection.min_depth, selection.max_depth
        checks = _checks(selection)
        self.takes: Check = _every(checks)
        self.types = _types(selection)
        self.needs_birth = any(bound.field == "btime" for bound in selection.times)
        self.needs_emptiness = selection.empty and "d" in self.types
        self.needs_stat = bool(checks) and not (checks == [_is_empty] and self.types <= DIRECTORY)

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


def _whole(pattern: re.Pattern[str]) -> Matches:
    fullmatch = pattern.fullmatch
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


def _types(selection: Selection) -> frozenset[str]:
    if not selection.empty:
        return selection.types or _ALL - DIRECTORY
    return (selection.types or _ALL) & frozenset("fd")


def _checks(selection: Selection) -> list[Check]:
    """What a stat must hold; all bounds of a kind as one."""
    checks: list[Check] = []
    if selection.sizes:
        checks.append(_is_sized(selection.sizes))
    for field in ("mtime", "atime", "ctime", "btime"):
        bounds = [bound for bound in selection.times if bound.field == field]
        if bounds:
            checks.append(_is_timed(f"st_{field}_ns", bounds))
    if selection.uids:
        checks.append(lambda st, _btime_ns: {st.st_uid}.issuperset(selection.uids))
    if selection.gids:
        checks.append(lambda st, _btime_ns: {st.st_gid}.issuperset(selection.gids))
    if selection.empty:
        checks.append(_is_empty)
    return checks


def _every(checks: Sequence[Check]) -> Check:
    """That all hold."""
    if len(checks) == 1:
        return checks[0]

    def hold(st: SelectionStat, btime_ns: int | None = None) -> bool:
        for check in checks:  # noqa: SIM110  a generator takes three times as long
            if not check(st, btime_ns):
                return False
        return True

    return hold


def _is_sized(bounds: Sequence[SizeBound]) -> Check:
    least = max(bound.least for bound in bounds)
    most = min((bound.most for bound in bounds if bound.most is not None), default=_FOREVER)
    return lambda st, _btime_ns: least <= st.st_size <= most


def _is_timed(name: str, bounds: Sequence[TimeBound]) -> Check:
    after_ns = max((bound.after_ns for bound in bounds if bound.after_ns is not None), default=-_FOREVER)
    before_ns = min((bound.before_ns for bound in bounds if bound.before_ns is not None), default=_FOREVER)
    if name == "st_btime_ns":
        return lambda _st, btime_ns: bool(btime_ns) and after_ns < (btime_ns or 0) < before_ns
    time_ns = attrgetter(name)
    return lambda st, _btime_ns: after_ns < time_ns(st) < before_ns


def _is_empty(st: SelectionStat, _btime_ns: int | None) -> bool:
    return st.st_size == 0 if stat.S_ISREG(st.st_mode) else stat.S_ISDIR(st.st_mode)
