"""What a plan says: rules, each of what is to be done where."""

from __future__ import annotations

from typing import NamedTuple

from fusefs.core.durations import DEFAULT_RETENTION_S
from fusefs.core.moments import SECOND_NS
from fusefs.core.selection import Field, Selection
from fusefs.core.toml_reader import Place


class Trash(NamedTuple):
    """What matches can be restored for so long."""

    keep_for_s: int = DEFAULT_RETENTION_S


class Delete(NamedTuple):
    """What matches is gone at once."""


class Move(NamedTuple):
    """What matches is moved into a directory; see sweep.request.ToMove."""

    target: bytes
    flat: bool = False
    if_exists: str = "skip"
    copy: bool = False


class Purge(NamedTuple):
    """Lists of what will be taken within a time, a file for each user, in a directory for them alone."""

    directory: bytes
    ahead_s: int


class Age(NamedTuple):
    """What is old: whatever has no time of these fields that is `before_ns` or later."""

    fields: tuple[Field, ...]
    before_ns: int


class Rule(NamedTuple):
    """What is to be done where.

    place      where it stands
    directory  absolute; with wildcards, as a shell's
    selection  what is meant in there
    age        what is old, if it has to be
    is_unit    the directory's own entries are units: each is taken whole, if all in it is old; otherwise entries at any
               depth are looked at by themselves, and `selection` says what is old
    most       of its matches; None: all
    """

    place: Place
    directory: bytes
    selection: Selection
    act: Trash | Delete | Move = Trash()
    age: Age | None = None
    is_unit: bool = False
    most: int | None = None
    purge: Purge | None = None

    def soon(self) -> Selection:
        """What `selection` will mean when the time of its purge list is over, if nothing changes."""
        ahead_ns = 0 if self.purge is None else self.purge.ahead_s * SECOND_NS
        times = self.selection.times
        later = [b if b.before_ns is None else b._replace(before_ns=b.before_ns + ahead_ns) for b in times]
        return self.selection._replace(times=tuple(later))
