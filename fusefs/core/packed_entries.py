"""The entries of a whole directory, packed: some 40 bytes each where a list of tuples takes five times as much."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate
from sys import getsizeof

Dirent = tuple[bytes, int, int, int]
"""Name, inode number, offset of the next entry, type (DT_DIR and so on; DT_UNKNOWN where the filesystem won't say)."""


class PackedEntries:
    """Entries in the order of their directory; grows at its end only, and no more once a cache has it."""

    __slots__ = ("_following", "_inos", "_kinds", "_names", "_starts")

    def __init__(self, entries: Iterable[Dirent] = ()) -> None:
        """Begin with some."""
        self._names = bytearray()
        self._starts = array("Q", (0,))
        self._inos = array("Q")
        self._following = array("q")
        self._kinds = bytearray()
        self.extend(entries)

    def extend(self, entries: Iterable[Dirent]) -> None:
        """Add what comes next."""
        columns = tuple(zip(*entries, strict=True))
        if not columns:
            return
        names, inos, following, kinds = columns
        self._starts.extend(accumulate(map(len, names[1:]), initial=len(self._names) + len(names[0])))
        self._names += b"".join(names)
        self._inos.extend(inos)
        self._following.extend(following)
        self._kinds += bytes(kinds)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._inos)

    def __getitem__(self, index: int) -> Dirent:
        """The entry at an index from 0 on."""
        name = bytes(self._names[self._starts[index] : self._starts[index + 1]])
        return name, self._inos[index], self._following[index], self._kinds[index]

    def after(self, offset: int) -> int | None:
        """The index of what an offset leads to, which the entry before it has told; None: none has."""
        try:
            return self._following.index(offset) + 1
        except ValueError:
            return None

    def __iter__(self) -> Iterator[Dirent]:
        """All, in order."""
        return map(self.__getitem__, range(len(self)))

    @property
    def n_bytes(self) -> int:
        """The memory that they take."""
        columns = (self._names, self._starts, self._inos, self._following, self._kinds)
        return getsizeof(self) + sum(map(getsizeof, columns))
