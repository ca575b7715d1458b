"""Converts user and group names to IDs, and reads the ranges of subordinate IDs in subuid(5)."""

from __future__ import annotations

import os
import pwd
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd

_FILE = b"/etc/subuid"
_MAX_BYTES = 1 << 20


class SubuidRange(NamedTuple):
    """A range of UIDs, and the user who may use them."""

    start: int
    n_uids: int
    holder: int


class Subordinates:
    """All ranges of subordinate UIDs on a system."""

    def __init__(self, ranges: Iterable[SubuidRange]) -> None:
        self._ranges = sorted(ranges)
        self._starts = [one.start for one in self._ranges]

    def holder_of(self, uid: int) -> int:
        """Return the user who may use a subordinate UID; any other UID is returned as it is."""
        index = bisect_right(self._starts, uid) - 1
        if index >= 0 and uid < self._ranges[index].start + self._ranges[index].n_uids:
            return self._ranges[index].holder
        return uid


def read_subordinates(path: bytes = _FILE) -> Subordinates:
    """Read the system's ranges of subordinate UIDs; a missing file or an invalid line defines no range.

    Source  subuid(5): login name or UID, first UID, number of UIDs
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
    return SubuidRange(int(start), int(n_uids), _uid_of_holder(name, int(start)))


def _uid_of_holder(name: str, start: int) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return -1 - start  # an unknown user, but always the same one for this range


_ID_MAX = (1 << 32) - 2
"""The largest ID; the kernel uses the next number for "no ID"."""


def uid_of(text: str) -> int:
    """Convert a user name or a number to a UID; names take precedence over numbers, as in find and chown.

    Raises  ValueError with a message if there is no such user
    """
    return _id_of(text, "user", lambda name: pwd.getpwnam(name).pw_uid)


def gid_of(text: str) -> int:
    """Convert a group name or a number to a GID; names take precedence over numbers."""
    import grp

    return _id_of(text, "group", lambda name: grp.getgrnam(name).gr_gid)


def _id_of(text: str, what: str, find: Callable[[str], int]) -> int:
    try:
        return find(text)
    except (KeyError, UnicodeEncodeError):  # the latter for a lone surrogate, which no name can contain
        pass
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(_ID_MAX)) and int(text) <= _ID_MAX):
        raise ValueError(f"unknown {what}: {printable(os.fsencode(text))}")
    return int(text)
