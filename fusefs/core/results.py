"""Results of commands over many items: what was done, and what failed or was spared and why.

A loop over many items goes on after a failure and returns one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from enum import Enum
from itertools import chain
from typing import NamedTuple

from fusefs.core.names import ContainerId
from fusefs.core.orphan_sums import Survey
from fusefs.core.record import MAX_FAILURES, Failure

Progress = Callable[[int, int], None]
"""Called with the entries removed and the bytes freed since the last call (bytes: as far as they were looked at)."""


Stops = Callable[[], bool]
"""Asked now and then: after a yes what is under way comes to its end."""


class Report(NamedTuple):
    """What a removal did.

    removed   entries that are gone
    failures  the first that could not be removed, see `core.record.MAX_FAILURES`
    n_failed  how many there are in all
    n_bytes   freed by what was removed; None if that was not looked at (it costs a stat a file), nor was known before
    stopped   it was asked to stop before it was done
    """

    removed: int
    failures: tuple[Failure, ...]
    n_failed: int
    n_bytes: int | None = None
    stopped: bool = False


class Reaped(NamedTuple):
    """What became of one orphan.

    lost        why it was not ours to reap; None if it was
    report      what was removed and what failed; with failures it is in quarantine now
    survey      what was in it before, if that was asked for
    """

    id: ContainerId
    lost: str | None
    report: Report
    survey: Survey | None = None


class WaitReasonKind(Enum):
    """Why a goal is not reached."""

    OPEN = "open"  # a process has deleted files open
    LEFT = "left"  # not everything could be removed: the orphan is in quarantine
    RESTORED = "restored"
    PINNED = "pinned"  # another process has locked the orphan
    NOBODY = "nobody"  # no reaper serves the volume
    PAUSED = "paused"
    BROKEN = "broken"  # the reaper rests after too many errors
    LESS = "less"  # the trees are gone, and less space than requested is free


class WaitReason(NamedTuple):
    """One reason. n_bytes: what a process has open; 0 for all other kinds"""

    kind: WaitReasonKind
    detail: str
    n_bytes: int = 0


class Waited(NamedTuple):
    """How the waiting for one volume ended.

    volume      the directory that holds the store
    goal_bytes  what was to come back; 0: all trees are gone
    came_bytes  the most that was free at any time, above what was free before
    reasons     why the goal is not reached
    hint        the next step; empty for none
    """

    volume: bytes
    goal_bytes: int
    is_reached: bool
    came_bytes: int
    reasons: tuple[WaitReason, ...]
    hint: str


STORE = "store"
PINNED = "pinned"
CAME_IN = "came-in"
"""Of a directory that is not known to have been there when the tree came."""
WORDS = {
    STORE: "a trash store that is not empty; restore its orphans (trashd list --volume DIR, where DIR is the "
    "directory above it), or delete it too with trashd reap --with-stores ID",
    PINNED: "pinned in a trash store, so nothing deletes it from outside; restore it, or release it "
    "(trashd keep --release), with --volume DIR, where DIR is the directory above that store",
    CAME_IN: "it was moved in or changed after the swap, perhaps by a user who may not delete it; "
    "trashd restore ID restores it, trashd reap --force ID deletes it",
}

"""What a person is told of each."""


def keeps_for_its_owner(failures: Iterable[Failure]) -> bool:
    """Whether something was left that is not root's to take over or to decide on: its owner may want it back."""
    return any(failure.call in WORDS for failure in failures)


def add_failures(noted: list[Failure], more: Iterable[Failure]) -> None:
    """Remember so many failures as a record has room for; one of our own reasons is among them, if there is any.

    A decision by it must not miss it among thousands.
    """
    for one in more:
        if len(noted) < MAX_FAILURES:
            noted.append(one)
        elif one.call in WORDS and not keeps_for_its_owner(noted):
            noted[-1] = one


def ours_first(failures: Iterable[Failure]) -> list[Failure]:
    """Failures with our own reasons before all others: where not all have room, these do."""
    return sorted(failures, key=lambda failure: failure.call not in WORDS)


class ListedDirectory(NamedTuple):
    """A directory, and names in it that are to be removed.

    given   what was told before each name: empty, or a path with a slash at its end
    path    its path, absolute, without links
    packed  the names, a NUL behind each: as objects they take ten times the memory
    """

    given: bytes
    path: bytes
    packed: bytearray

    def names(self) -> Iterator[bytes]:
        """The names, one by one."""
        import re  # where there are any

        return (found[0] for found in re.finditer(rb"[^\0]+", self.packed))

    def all_given(self) -> Iterator[bytes]:
        """Their paths, as they were given."""
        return (self.given + name for name in self.names())

    def paths(self) -> Iterator[bytes]:
        """Their paths, absolute."""
        above = self.path.rstrip(b"/") + b"/"
        return (above + name for name in self.names())


class RemovalGroup(NamedTuple):
    """Names on one mount. directory: above all of them"""

    directory: bytes
    directories: tuple[ListedDirectory, ...]

    def n(self) -> int:
        """How many there are."""
        return sum(listed.packed.count(b"\0") for listed in self.directories)

    def all_given(self) -> Iterator[bytes]:
        """Their paths, as they were given."""
        return chain.from_iterable(listed.all_given() for listed in self.directories)

    def paths_without(self, left: Container[bytes]) -> Iterator[bytes]:
        """The paths of all but these. left: as they were given"""
        paths = chain.from_iterable(listed.paths() for listed in self.directories)
        return (path for given, path in zip(self.all_given(), paths, strict=True) if given not in left)


OUTSIDE = "outside the directory"
"""What failures name as their call for a listed path that leads elsewhere."""
DOTS = "ends in . or .."
"""The same for a listed path that ends in `.` or `..`."""
UNCLEAR = "not in the format of the list"
"""The same for a line of a list that can't be understood, or could mean two things."""
LOCKED_BY_OTHERS = "locked by a user who is neither its owner nor root"
LOCKED_BY_UNKNOWN = "locked by a process that is not visible here"
KEPT_BY_OTHERS = "contains a .trashd-keep of a user who is neither its owner nor root"
"""The same for a directory with a mark that is reported."""
ANOTHER = "its inode number differs from the one in the list"
"""Why a listed name is spared."""
NOT_TAKEN = "another user's directory, which no earlier run found there"
NOT_GIVEN = "the destination is another user's directory, or one that others can write to"
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


class Finding(NamedTuple):
    """Something that was found and kept: where, what, and what a person can do about it."""

    where: str
    what: str
    hint: str
