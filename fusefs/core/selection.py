"""Which entries below a directory are meant: by name, kind, size, times and owner, and how it is told fast."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

from fusefs.core.glob import Matches, NameEnds, compile_glob, name_ends
from fusefs.core.stat_bounds import Check, SizeBound, TimeBound, stat_bounds

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
        self.bounds = stat_bounds(
            selection.sizes, selection.times, selection.uids, selection.gids, must_be_empty=selection.empty
        )
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
