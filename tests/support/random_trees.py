"""Trees of odd entries, made of random values: what a selection has to tell apart as find does."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st

MOMENT_S = 1_700_000_000
SECOND_NS = 10**9
OWNERS = (0, 1, 54_321)
N_SIZES, N_MOMENTS = 5, 4
_PLAIN = [b"a", b"b", b"A", b"1", b".log", b".", b"-", b"\n", b" ", b"*", b"[", b"]", b"\\", b"?", b"'", b"~"]
INVALID = [*_PLAIN, b"\xff", b"\xfe"]
"""Parts of names that are ASCII, or no UTF-8."""
FOREIGN = [*_PLAIN, "é".encode(), "Ж".encode(), "ж".encode(), "字".encode()]
"""Parts of names that are UTF-8."""
_NAME_MAX = 255


class Odd(NamedTuple):
    """One entry.

    parent  which of the directories before it holds it; if there are so many, else the top
    kind    as find's -type
    moment  of its times: so many seconds, and nanoseconds, after MOMENT_S; the access a moment later
    """

    parent: int
    name: bytes
    kind: str
    size: int
    moment: int
    owner: int


def odd_trees(parts: Sequence[bytes]) -> st.SearchStrategy[list[Odd]]:
    """A few entries with names of such parts."""
    short = st.lists(st.sampled_from(parts), min_size=1, max_size=5).map(b"".join)
    entry = st.builds(
        Odd,
        st.integers(0, 5),
        (short | short | short.map(_longest)).filter(lambda name: name not in (b".", b"..")),
        st.sampled_from("fffffddddlps"),
        st.integers(0, N_SIZES),
        st.integers(0, N_MOMENTS),
        st.sampled_from(OWNERS),
    )
    return st.lists(entry, max_size=14)


def _longest(name: bytes) -> bytes:
    return (name * (_NAME_MAX // len(name))).ljust(_NAME_MAX, b"a")


def moment_ns(moment: int) -> int:
    """What an entry's time is."""
    return (MOMENT_S + moment) * SECOND_NS + moment


def make_tree(top: Path, entries: Sequence[Odd]) -> None:
    """Make them below a directory; the second of a name is left out."""
    directories = [os.fsencode(top)]
    made: dict[bytes, Odd] = {}
    for entry in entries:
        above = directories[entry.parent] if entry.parent < len(directories) else directories[0]
        path = os.path.join(above, entry.name)
        if path not in made:
            _make(path, entry)
            made[path] = entry
            directories += [path] * (entry.kind == "d")
    for path, entry in reversed(made.items()):
        os.utime(path, ns=(moment_ns(entry.moment + 1), moment_ns(entry.moment)), follow_symlinks=False)
        if os.geteuid() == 0:
            os.chown(path, entry.owner, OWNERS[entry.owner == 0], follow_symlinks=False)


def _make(path: bytes, entry: Odd) -> None:
    match entry.kind:
        case "d":
            os.mkdir(path)
        case "l":
            os.symlink(b"." * max(entry.size, 1), path)
        case "p":
            os.mkfifo(path)
        case "s":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case _:
            Path(os.fsdecode(path)).write_bytes(b"x" * entry.size)
