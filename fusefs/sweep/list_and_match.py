"""A directory read by windows, as memory and time allow: what is chosen there as far as names tell, what to enter."""

from __future__ import annotations

import errno
import os
import stat
import time
from itertools import compress
from typing import NamedTuple

from fusefs.core.glob import ANY_ENDS, Matches, NameEnds
from fusefs.core.names import STORE
from fusefs.core.selection import FORMATS, Matcher
from fusefs.engine.strategy import in_order
from fusefs.linux.batched_calls import look_at_all, read_on
from fusefs.linux.fd import Fd
from fusefs.linux.getdents import DirentBlock
from fusefs.linux.kernel import Kernel, Refused
from fusefs.store.layout import is_stores_own

_OWN = STORE.decode()
_LEAST = 8192
"""Entries that are listed whatever the time: on ext4 a window that is too small is no order at all."""


def kind_of(mode: int) -> int:
    """What a mode says of the type, as listings tell it (d_type)."""
    return stat.S_IFMT(mode) >> 12


def kinds_of(matcher: Matcher) -> frozenset[int]:
    """The types that a selection means, as listings tell them (d_type)."""
    return frozenset(kind_of(FORMATS[kind]) for kind in matcher.types)


DIRECTORY_KIND = kind_of(stat.S_IFDIR)
ALL_KINDS = frozenset(map(kind_of, FORMATS.values()))


def is_own(name: str) -> bool:
    """Whether a name is a store's own; quick to say no."""
    return _OWN in name and is_stores_own(os.fsencode(name))


class WantedEntries(NamedTuple):
    """What is looked for in a directory.

    is_chosen  by name; None: all are
    is_pruned  by name: neither chosen nor entered; None: none is
    kinds      of what is chosen
    enters     directories are found too
    ends       of the names that is_chosen means
    """

    is_chosen: Matches | None
    is_pruned: Matches | None
    kinds: frozenset[int]
    enters: bool
    ends: NameEnds = ANY_ENDS


class MatchedEntries(NamedTuple):
    """Entries of a directory.

    names   chosen, without directories; in the order in which they are to be acted on, from the end
    dirs    those that may be entered
    chosen  directories that are chosen
    is_all  the listing has ended
    untold  of those that might be chosen or entered, what neither the listing nor a look tells what they are, and why
    """

    names: list[str]
    dirs: list[str]
    chosen: list[str]
    n_seen: int
    is_all: bool
    untold: Refused


def depth_in(upper: bytes) -> int:
    """How deep the entries of a directory are."""
    return upper.count(b"/") + 2 if upper else 1


def wanted_in(matcher: Matcher, upper: bytes) -> WantedEntries:
    """What a selection looks for in a directory."""
    depth = depth_in(upper)
    path = os.fsdecode(upper)
    kinds = kinds_of(matcher) if matcher.has_depth(depth) else frozenset()
    return WantedEntries(
        matcher.names_in(path), matcher.pruned_in(path), kinds, matcher.goes_below(depth), matcher.ends
    )


def stripped_in(matcher: Matcher, upper: bytes) -> WantedEntries:
    """What goes with a directory that was chosen: all that is not excluded."""
    return WantedEntries(None, matcher.pruned_in(os.fsdecode(upper)), ALL_KINDS, enters=True)


def read_window(
    kernel: Kernel, fd: Fd, wanted: WantedEntries, window: int | None, ends_at: float, *, by_inode: bool
) -> MatchedEntries:
    """What the next entries of a directory are.

    window   the most that are found together; None: all there are, whatever the time
    ends_at  by the monotonic clock
    Raises   OSError
    """
    names: list[str] = []
    inos: list[int] = []
    dirs: list[str] = []
    chosen: list[str] = []
    untold: Refused = []
    is_chosen = wanted.is_chosen
    n_seen = 0
    while (block := read_on(kernel, fd, *wanted.ends)) is not None:
        n_seen += block.n_seen
        if _OWN in block.text or wanted.is_pruned is not None:
            block = _without(block, wanted)
        if 0 in block.kinds:
            block, refused = _told(kernel, fd, block)
            untold += (one for one in refused if wanted.enters or is_chosen is None or is_chosen(one[0]))
        files = _of_kinds(block, wanted.kinds)
        if is_chosen is not None:
            files = _filtered(files, [*map(is_chosen, files.names)])
        names += files.names
        if by_inode:
            inos += files.inos
        if DIRECTORY_KIND in block.kinds:
            found = [name for name, kind in zip(block.names, block.kinds, strict=True) if kind == DIRECTORY_KIND]
            if wanted.enters:
                dirs += found
            if DIRECTORY_KIND in wanted.kinds:
                chosen += found if is_chosen is None else filter(is_chosen, found)
        is_much = window is not None and len(names) + len(dirs) + len(chosen) >= window
        is_late = window is not None and n_seen >= _LEAST and time.monotonic() >= ends_at
        if is_much or is_late:
            break
    return MatchedEntries(in_order(names, inos, by_inode=by_inode), dirs, chosen, n_seen, block is None, untold)


def _told(kernel: Kernel, fd: Fd, block: DirentBlock) -> tuple[DirentBlock, Refused]:
    """A block with the types that the listing left out, as far as a look tells them; what of the others is there."""
    unknown = [name for name, kind in zip(block.names, block.kinds, strict=True) if not kind]
    looked, refused = look_at_all(kernel, fd, unknown)
    kinds = {one.name: kind_of(one.st_mode) for one in looked}
    known = [kind or kinds.get(name, 0) for name, kind in zip(block.names, block.kinds, strict=True)]
    there = [one for one in refused if one[1] != errno.ENOENT]
    return _filtered(block._replace(kinds=known), [kind != 0 for kind in known]), there


def _without(block: DirentBlock, wanted: WantedEntries) -> DirentBlock:
    """A block without what is a store's own, or pruned."""
    is_pruned = wanted.is_pruned or (lambda _name: False)
    keeps = [not (is_pruned(name) or is_own(name)) for name in block.names]
    return _filtered(block, keeps)


def _of_kinds(block: DirentBlock, kinds: frozenset[int]) -> DirentBlock:
    """What is chosen of it by its type, without directories."""
    if block.kinds.count(stat.S_IFREG >> 12) == len(block.kinds) and stat.S_IFREG >> 12 in kinds:
        return block
    return _filtered(block, [kind in kinds and kind != DIRECTORY_KIND for kind in block.kinds])


def _filtered(block: DirentBlock, keeps: list[bool]) -> DirentBlock:
    """What is kept of a block; its text stays."""
    names, inos, kinds = compress(block.names, keeps), compress(block.inos, keeps), compress(block.kinds, keeps)
    return block._replace(names=list(names), inos=list(inos), kinds=list(kinds))
