"""As much of a directory as memory allows, in the order in which it is to be deleted."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

from fusefs.reaper.strategy import Strategy

_CHUNK = 1024


class Window(NamedTuple):
    """Entries of a directory, to be taken from the end.

    names    to unlink; directories too where listings don't tell types
    subdirs  directories
    is_all   nothing else is in there
    """

    names: list[str]
    subdirs: list[str]
    is_all: bool


def read_window(entries: Iterator[os.DirEntry[str]], passed: Collection[str], strategy: Strategy) -> Window:
    """The first entries that are not passed over: bounded by their number, and by the length of their names."""
    if passed:
        entries = (entry for entry in entries if entry.name not in passed)
    names: list[str] = []
    subdirs: list[str] = []
    inos: list[int] = []
    n_chars = 0
    # Entries are let go of chunk by chunk: each takes as much memory as four names.
    while len(names) + len(subdirs) < strategy.window and n_chars < strategy.window_chars:
        chunk = list(islice(entries, _CHUNK))
        files = [e for e in chunk if not e.is_dir(follow_symlinks=False)] if strategy.tells_types else chunk
        if len(files) < len(chunk):
            subdirs += [e.name for e in chunk if e.is_dir(follow_symlinks=False)]
        found = [e.name for e in files]
        names += found
        n_chars += sum(map(len, found))
        if strategy.by_inode:
            inos += [e.inode() for e in files]
        if len(chunk) < _CHUNK:
            break
    if strategy.by_inode:
        names = [names[at] for at in sorted(range(len(inos)), key=inos.__getitem__, reverse=True)]
    else:
        names.reverse()
    return Window(names, subdirs, next(entries, None) is None)
