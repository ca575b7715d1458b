"""What a loop over many items did, and what it left and why: it goes on after a failure and returns this.

Here is also how a wait for the space of such a removal ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from fusefs.core.freed_space import Survey
from fusefs.core.names import ContainerId
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
    STORE: "a trash store that holds something; restore what it holds (trashd list --volume DIR, where DIR is the "
    "directory above it), or trashd reap --with-stores ID deletes it too",
    PINNED: "kept in a trash store, and nothing deletes that from above; trashd restore it, or release it "
    "(trashd keep --release), with --volume DIR, where DIR is the directory above that store",
    CAME_IN: "it came in, or was changed, after the swap: who could move it need not be who may delete it; "
    "trashd restore ID takes it back, trashd reap --force ID deletes it",
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
