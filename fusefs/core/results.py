"""The results of commands that process many items: what was done, what failed, and what was spared and why.

A loop over many items continues after a failure and returns one of these results.
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
"""Called with the numbers of removed entries and freed bytes since the last call (bytes: as far as sizes were read)."""


ShouldStop = Callable[[], bool]
"""Called now and then: once it returns True, the work in progress stops and no more begins."""


class Report(NamedTuple):
    """The result of a removal.

    removed   number of deleted entries
    failures  the first entries that could not be removed, at most `core.record.MAX_FAILURES`
    n_failed  number of all entries that could not be removed
    n_bytes   bytes that were freed; None if not known (it would take a stat for each file)
    stopped   the removal was stopped before its end
    """

    removed: int
    failures: tuple[Failure, ...]
    n_failed: int
    n_bytes: int | None = None
    stopped: bool = False


class Reaped(NamedTuple):
    """The result of reaping one orphan.

    lost        why another process had the orphan; None if this process reaped it
    report      what was removed and what failed; if something failed, the orphan is in quarantine now
    survey      the result of counting the orphan before the reap, if that was requested
    """

    id: ContainerId
    lost: str | None
    report: Report
    survey: Survey | None = None


class WaitReasonKind(Enum):
    """The kind of reason why a wait has not reached its goal."""

    OPEN = "open"  # a process still has deleted files open
    LEFT = "left"  # not everything could be removed, so the orphan is in quarantine
    RESTORED = "restored"
    PINNED = "pinned"  # another process has locked the orphan
    NOBODY = "nobody"  # no reaper serves the volume
    PAUSED = "paused"
    BROKEN = "broken"  # the reaper pauses after too many errors
    LESS = "less"  # the trees are gone, but less space than requested became free


class WaitReason(NamedTuple):
    """A reason why a wait has not ended. n_bytes: size of the deleted files that a process has open; otherwise 0"""

    kind: WaitReasonKind
    detail: str
    n_bytes: int = 0


class Waited(NamedTuple):
    """The result of waiting for one volume.

    volume      the directory that holds the store
    goal_bytes  bytes to be freed; 0: the goal is that all trees are deleted
    came_bytes  the largest increase of free space since the start
    reasons     why the goal has not been reached
    hint        what to do next; may be empty
    """

    volume: bytes
    goal_bytes: int
    is_reached: bool
    came_bytes: int
    reasons: tuple[WaitReason, ...]
    hint: str


STORE = "store"
PINNED = "pinned"
LATE_ARRIVAL = "came-in"
"""The reason for a directory that may have been moved into the tree after the swap."""
EXPLANATIONS = {
    STORE: "a trash store that is not empty; restore its orphans (trashd list --volume DIR, where DIR is the "
    "directory above it), or delete it too with trashd reap --with-stores ID",
    PINNED: "pinned in a trash store, so nothing outside that store deletes it; restore it, or release it "
    "(trashd keep --release) with --volume DIR, where DIR is the directory above that store",
    LATE_ARRIVAL: "it was moved in or changed after the swap, perhaps by a user with no right to delete it; "
    "trashd restore ID restores it, and trashd reap --force ID deletes it",
}
"""For each reason why root does not delete an entry, an explanation for people."""


def is_kept_for_owner(failures: Iterable[Failure]) -> bool:
    """Whether entries remain that root must not delete, because their owner may want them back."""
    return any(failure.call in EXPLANATIONS for failure in failures)


def add_failures(noted: list[Failure], more: Iterable[Failure]) -> None:
    """Add failures, as many as a record can hold. If any has a reason in EXPLANATIONS, at least one of these is kept.

    Decisions that depend on such a reason must not miss it among thousands of failures.
    """
    for one in more:
        if len(noted) < MAX_FAILURES:
            noted.append(one)
        elif one.call in EXPLANATIONS and not is_kept_for_owner(noted):
            noted[-1] = one


def own_reasons_first(failures: Iterable[Failure]) -> list[Failure]:
    """Sort failures with a reason in EXPLANATIONS first, so that they are kept if a record can't hold all failures."""
    return sorted(failures, key=lambda failure: failure.call not in EXPLANATIONS)


class ListedDirectory(NamedTuple):
    """A directory, and the names in it that are to be removed.

    given   what preceded each name on the command line: empty, or a path that ends in a slash
    path    the directory's absolute path, without symbolic links
    packed  the names, each followed by a NUL: as objects, they would need ten times the memory
    """

    given: bytes
    path: bytes
    packed: bytearray

    def names(self) -> Iterator[bytes]:
        import re  # imported late: needed only if there are names

        return (found[0] for found in re.finditer(rb"[^\0]+", self.packed))

    def paths_as_given(self) -> Iterator[bytes]:
        return (self.given + name for name in self.names())

    def paths(self) -> Iterator[bytes]:
        """Return the absolute paths of the names."""
        above = self.path.rstrip(b"/") + b"/"
        return (above + name for name in self.names())


class RemovalGroup(NamedTuple):
    """Names on one mount. directory: an ancestor directory of all of them"""

    directory: bytes
    directories: tuple[ListedDirectory, ...]

    def n_names(self) -> int:
        return sum(listed.packed.count(b"\0") for listed in self.directories)

    def paths_as_given(self) -> Iterator[bytes]:
        return chain.from_iterable(listed.paths_as_given() for listed in self.directories)

    def paths_without(self, remaining: Container[bytes]) -> Iterator[bytes]:
        """Return the absolute paths of the names whose paths, as the user gave them, are not in `remaining`."""
        paths = chain.from_iterable(listed.paths() for listed in self.directories)
        return (path for given, path in zip(self.paths_as_given(), paths, strict=True) if given not in remaining)


OUTSIDE = "outside the directory"
"""The `call` of a failure for a listed path outside the directory."""
DOTS = "ends in . or .."
"""The same for a listed path that ends in `.` or `..`."""
UNCLEAR = "not in the list's format"
"""The same for a line of a list that can't be understood, or is ambiguous."""
LOCKED_BY_OTHERS = "locked by a user who is neither its owner nor root"
LOCKED_BY_UNKNOWN = "locked by a process that is not visible here"
KEPT_BY_OTHERS = "contains a .trashd-keep of a user who is neither its owner nor root"
"""The `call` of a failure for a directory with a keep mark, for each kind of ReportedMark."""
OTHER_INODE = "its inode number differs from the one in the list"
"""The reason why a listed name is spared."""
NOT_TAKEN = "another user's directory, which no earlier run found there"
NOT_GIVEN = "the destination is another user's directory, or one that others can write to"
"""The `call` of a failure for entries that root does not move across the boundary between users."""


class SweepSums(NamedTuple):
    """The progress of a sweep.

    n_seen      entries that were checked, at least by name
    n_vanished  matches that another process removed in the meantime; not failures
    n_missing   listed names that did not exist; not matches
    n_unmatched  listed names that do not match the selection
    n_mounts    directories that are mount points, which were skipped
    n_spared    entries that a guard or an action left in place on purpose
    n_inside    entries inside a matched directory; not matches themselves
    n_bytes     total size of the files that were handled, as far as sizes were read
    taken_bytes  their disk space, without files that have hard links, which may have been counted already
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
        """Return how many names are missing, vanished, failed, spared or mount points, whether they match or not."""
        return self.n_missing + self.n_vanished + self.n_failed + self.n_mounts + self.n_spared

    def plus(self, other: SweepSums) -> SweepSums:
        return SweepSums(*map(sum, zip(self, other, strict=True)))


SHOWN_MATCHES_MAX = 5
"""The number of largest and of oldest entries that a dry run prints."""


class Match(NamedTuple):
    """A match in a dry run: its path relative to the directory, its size, and the time that the selection uses."""

    path: bytes
    n_bytes: int
    time_ns: int


class Spared(NamedTuple):
    """An entry that was left in place on purpose: its path relative to the directory, and why."""

    name: bytes
    why: str


class ReportedMark(NamedTuple):
    """A keep mark whose directory is reported as a failure.

    why      one of LOCKED_BY_OTHERS, LOCKED_BY_UNKNOWN and KEPT_BY_OTHERS
    is_spared  the whole directory is left in place; otherwise its content is swept and only the directory itself stays
    """

    why: str
    is_spared: bool


class Swept(NamedTuple):
    """The result of a sweep.

    failures    the first failures, at most `core.record.MAX_FAILURES`
    spared      the first entries that were spared
    is_stopped  the sweep was stopped, on request or because of `why`
    is_limited  there are more matches than `Request.most`; the others were not touched
    orphan      the container of the trashed entries; None if there are none
    expires_ns  wall time at which the orphan expires; None: never automatically
    store       the user's folder that holds the orphan
    volume      the directory that holds the store, if it is not the root of the mount: commands then need --volume
    where       the directory to which entries were moved
    looks       whether sizes were read, so that `sums.n_bytes` is meaningful
    largest, oldest  the largest and the oldest matches of a dry run, a few of each
    warnings    steps that are unfinished, which the next command completes
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
    """A problem that was found and left as it is: where, what, and what a person can do about it."""

    where: str
    what: str
    hint: str
