"""The result of a sweep, done or only looked at, as its caller is told."""

from __future__ import annotations

from typing import NamedTuple

from fusefs.core.names import ContainerId
from fusefs.core.record import Failure

OUTSIDE = "outside of the directory"
"""What failures name as their call for a listed path that leads elsewhere."""
DOTS = "ends in a dot"
"""The same for a listed path that ends in `.` or `..`."""
UNCLEAR = "not as the format has it"
"""The same for a line of a list that can't be understood, or could mean two things."""
LOCKED_BY_OTHERS = "locked by a user who is neither its owner nor root"
LOCKED_BY_UNKNOWN = "locked by a process that is not seen here"
KEPT_BY_OTHERS = "holds .trashd-keep of a user who is neither its owner nor root"
"""The same for a directory with a mark that is reported."""
ANOTHER = "it is another one than the list tells: its inode number differs"
"""Why a listed name is spared."""
NOT_TAKEN = "another user's directory, which no earlier run saw there"
NOT_GIVEN = "another user's directory, or one that others can write in, is in its place"
"""What failures name as their call for what root does not carry across the boundary between users."""


class SweepSums(NamedTuple):
    """How far a sweep is.

    n_seen      entries that were looked at, at least by name
    n_vanished  matches that another process took meanwhile: no failure
    n_missing   listed names that nothing had when they were looked for: no matches
    n_unmatched  listed names that the selection does not choose
    n_mounts    directories with something mounted on them, which were skipped
    n_spared    what a guard, or an action, left alone on purpose
    n_inside    entries that went with a matched directory; no matches themselves
    n_bytes     in the files that it was done to, as far as they were looked at
    taken_bytes  that these take, but for those with other names, of which it is not known whether they are counted yet
    """

    n_seen: int = 0
    n_matched: int = 0
    n_done: int = 0
    n_vanished: int = 0
    n_missing: int = 0
    n_unmatched: int = 0
    n_failed: int = 0
    n_mounts: int = 0
    n_spared: int = 0
    n_inside: int = 0
    n_bytes: int = 0
    taken_bytes: int = 0

    def n_not_chosen(self) -> int:
        """How many names were counted before they could be chosen."""
        return self.n_missing + self.n_vanished + self.n_failed + self.n_mounts + self.n_spared

    def plus(self, other: SweepSums) -> SweepSums:
        """Both together."""
        return SweepSums(*map(sum, zip(self, other, strict=True)))


MATCHES_MAX = 5
"""The largest, and the oldest, that a dry run tells."""


class Match(NamedTuple):
    """One entry of a dry run: the path relative to the directory, its bytes, its time (the one of the selection)."""

    path: bytes
    n_bytes: int
    time_ns: int


class Spared(NamedTuple):
    """What was left alone on purpose: its path relative to the directory, and why."""

    name: bytes
    why: str


class ReportedMark(NamedTuple):
    """A mark on a directory, to leave it, that is reported as a failure.

    why      one of those above
    is_left  the directory is left all the same; otherwise only its own name is, and what is in it is swept
    """

    why: str
    is_left: bool


class Swept(NamedTuple):
    """What a sweep did.

    failures    the first by name, see `core.record.MAX_FAILURES`
    spared      the first
    is_stopped  it was asked for, or `why` says what made it useless to go on
    is_limited  there are more matches than `Request.most`; the rest is untouched
    orphan      the container that has what was trashed; None if nothing came
    expires_ns  when that may be reaped, by the wall clock; None: never by itself
    store       the user's folder that has it
    volume      the directory that holds its store, if that is not the root of the mount: commands need to be told
    where       the directory that has what was moved
    looks       whether `sums.n_bytes` says anything
    largest, oldest  of a dry run, the first five
    warnings    what could not be finished; the next command completes it
    """

    directory: bytes
    sums: SweepSums
    failures: tuple[Failure, ...] = ()
    spared: tuple[Spared, ...] = ()
    is_stopped: bool = False
    why: str = ""
    is_limited: bool = False
    orphan: ContainerId | None = None
    volume: bytes | None = None
    store: bytes | None = None
    where: bytes | None = None
    looks: bool = False
    largest: tuple[Match, ...] = ()
    oldest: tuple[Match, ...] = ()
    warnings: tuple[str, ...] = ()
    expires_ns: int | None = None
