"""How much of a listing is told at a time: as much as there is room for, but to who has just jumped there.

The kernel asks for as many entries as the reader has room for, and forgets what it did not hand on to him. Who goes by
seekdir(3) from one entry to another wants one of each hundred, every one of which would have been looked at. So he is
told few; if he reads on, more and more.
"""

from __future__ import annotations

from typing import NamedTuple

_LEAST_BYTES = 1 << 9
"""Room for a name of any length; for two or three of a usual one."""
_MORE = 8
_N_READERS_MAX = 1024


class Reader(NamedTuple):
    """A thread of a client's, and the directory that it reads."""

    nodeid: int
    pid: int


class Jumps:
    """Where readers are. Who is forgotten, as others came, is told few once more."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._told: dict[Reader, tuple[int, int]] = {}

    def room(self, reader: Reader, offset: int, room: int) -> int:
        """How many bytes of the answer to fill. room: that there are"""
        end, before = self._told.pop(reader, (0, 0))
        if not offset:
            return room
        return min(room, before * _MORE if offset == end else _LEAST_BYTES)

    def told(self, reader: Reader, end: int, room: int) -> None:
        """Where the listing goes on after what a reader was told, and how much that might be."""
        self._told[reader] = end, room
        if len(self._told) > _N_READERS_MAX:
            del self._told[next(iter(self._told))]
