"""The states of a container, the moves between them, and how recovery completes or undoes unfinished moves.

Every crash window in docs/internals/crash-windows.md has a StageAction or RestoringAction. This module also defines the
default retention.
"""

from __future__ import annotations

from enum import Enum

from fusefs.core.identity import Identity, IdentityMatch, compare, is_marked
from fusefs.core.record import Method, Record

DEFAULT_RETENTION_S = 24 * 3600
"""How long an orphan can be restored by default: users have a night to notice a mistake."""


class State(Enum):
    """The directory that a container is in; only a rename changes the state (I4)."""

    STAGE = "stage"
    ORPHANS = "orphans"
    REAPING = "reaping"
    RESTORING = "restoring"
    QUARANTINE = "quarantine"


LEGAL_MOVES = frozenset(
    {
        (State.STAGE, State.ORPHANS),  # adopt
        (State.ORPHANS, State.REAPING),  # claim by the reaper
        (State.ORPHANS, State.RESTORING),  # claim by a restore
        (State.REAPING, State.ORPHANS),  # given back: its record changed before the claim, e.g. it was pinned
        (State.REAPING, State.RESTORING),  # claim by a restore, after an interrupted reap
        (State.REAPING, State.QUARANTINE),  # set aside
        (State.QUARANTINE, State.REAPING),  # tried again
        (State.QUARANTINE, State.RESTORING),  # claim by a restore
        (State.RESTORING, State.ORPHANS),  # given back
        (State.RESTORING, State.QUARANTINE),  # given back to where it was
    }
)


class StageAction(Enum):
    """An action on a container in stage/ that no process holds."""

    UNMADE = "rmdir the container: without a record, it never held a victim"
    BACK = "the victim was never moved in: drop the prepared entries"
    FORWARD = "the victim is here: adopt"
    PLACE = "the victim is here and its name is missing: place the replacement, then adopt"
    GATHERED = "a sweep's own tree: adopt the entries moved into it; if there are none, drop it"
    KEEP = "not understood: keep and report"


class RestoringAction(Enum):
    """An action on a container in restoring/ that no process holds."""

    RETIRE = "the tree is back at its name: drop the container"
    GIVE_BACK = "the tree is still here: it is an orphan again"
    PLACE = "the replacement was set aside and the name is missing: place the tree"
    REST = "a sweep's tree, put back entry by entry: the rest is an orphan again; without a rest, drop the container"
    KEEP = "not understood: keep and report"


def decide_stage(
    record: Record | None, tree: Identity | None, fresh: Identity | None, name: Identity | None
) -> StageAction:
    """Decide what to do with a container in stage/ that no process holds.

    record  the container's record; None if there is none (a record is durable before anything moves, I3)
    tree    the identity of `tree` in the container; None if there is none
    fresh   the identity of `fresh` in the container (two renames only); None if there is none
    name    the identity of the object at the victim's path; None if there is none
    Source  docs/internals/crash-windows.md
    """
    if record is None:
        return StageAction.UNMADE
    if tree is None:
        return StageAction.BACK
    is_victim = compare(tree, record.victim)
    if record.method is Method.EXCHANGE:
        if is_victim is IdentityMatch.SAME:
            return StageAction.FORWARD
        if compare(tree, record.fresh) is IdentityMatch.SAME:
            return StageAction.BACK
        return StageAction.FORWARD if _lacks_the_mark(tree, record, is_victim) else StageAction.KEEP
    # The other methods put nothing but the tree itself at `tree`. So an identity that proves nothing is accepted (on
    # network filesystems), but not one that contradicts the record.
    if is_victim is IdentityMatch.OTHER:
        return StageAction.KEEP
    if record.method is Method.SWEEP:
        return StageAction.GATHERED
    if record.method is Method.TWO_RENAME and fresh is not None and name is None:
        return StageAction.PLACE
    return StageAction.FORWARD


def decide_restoring(
    record: Record | None, tree: Identity | None, fresh: Identity | None, name: Identity | None
) -> RestoringAction:
    """Decide what to do with a container in restoring/ that no process holds; arguments as for `decide_stage`."""
    if record is None:
        return RestoringAction.RETIRE if tree is None else RestoringAction.KEEP
    if tree is None:
        return RestoringAction.RETIRE
    if record.fresh is not None and compare(tree, record.fresh) is IdentityMatch.SAME:
        return RestoringAction.RETIRE  # exchanged back: `tree` is the replacement now
    is_victim = compare(tree, record.victim)
    # A dropped tree may have no recorded identity, but nothing else was ever at `tree`.
    exchanged = record.method is Method.EXCHANGE and is_victim is not IdentityMatch.SAME
    exchanged = exchanged and not _lacks_the_mark(tree, record, is_victim)
    if is_victim is IdentityMatch.OTHER or exchanged:
        return RestoringAction.KEEP
    if record.method is Method.SWEEP:
        return RestoringAction.REST
    if fresh is not None and name is None:
        return RestoringAction.PLACE
    return RestoringAction.GIVE_BACK


def _lacks_the_mark(tree: Identity, record: Record, is_victim: IdentityMatch) -> bool:
    """Whether a tree of unknown identity must be the victim, because it lacks the mark of the replacement.

    If this is the replacement after all and has lost its mark, it is adopted as an empty orphan; no data is lost.
    """
    return is_victim is IdentityMatch.UNKNOWN and is_marked(record.fresh) and not is_marked(tree)
