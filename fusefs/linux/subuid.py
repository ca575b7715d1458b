"""subuid(5): which user owns a range of subordinate uids; who may map one (newuidmap) is 65,536 users at once."""

from __future__ import annotations

import os
import pwd
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from fusefs.linux.fd import Fd

_FILE = b"/etc/subuid"
_MAX_BYTES = 1 << 20


class SubuidRange(NamedTuple):
    """So many uids from one on, and the user who may have them."""

    start: int
    n_uids: int
    holder: int


class Subordinates:
    """The ranges of a system."""

    def __init__(self, ranges: Iterable[SubuidRange]) -> None:
        self._ranges = sorted(ranges)
        self._starts = [one.start for one in self._ranges]

    def holder_of(self, uid: int) -> int:
        """The user who may become that uid at any time; that uid itself, if it is not subordinate."""
        index = bisect_right(self._starts, uid) - 1
        if index >= 0 and uid < self._ranges[index].start + self._ranges[index].n_uids:
            return self._ranges[index].holder
        return uid


def read_subordinates(path: bytes = _FILE) -> Subordinates:
    """What the system's file says; without one, or where it is not understood, no uid is subordinate.

    Source  subuid(5): login name or uid, first uid, how many
    """
    try:
        with Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
            text = os.pread(fd, _MAX_BYTES, 0).decode("utf-8", "replace")
    except OSError:
        return Subordinates(())
    return Subordinates(filter(None, map(_range_in, text.splitlines())))


def _range_in(line: str) -> SubuidRange | None:
    name, _, numbers = line.strip().partition(":")
    start, _, n_uids = numbers.partition(":")
    if not (name and start.isdecimal() and n_uids.isdecimal()):
        return None
    return SubuidRange(int(start), int(n_uids), _holder(name, int(start)))


def _holder(name: str, start: int) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return -1 - start  # a user whom the system does not know is one person nonetheless
