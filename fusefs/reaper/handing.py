"""Leaving an orphan to the reaper now, whatever its retention; and what is left of it if that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId
from fusefs.core.report import Progress
from fusefs.core.space import Kind, Reason, Survey
from fusefs.reaper.survey import survey
from fusefs.store.ballast import FOR_REAPER, with_room
from fusefs.store.claim import Lost, hold, look_at_record
from fusefs.store.container import move
from fusefs.store.layout import UserFolder
from fusefs.store.listing import explain_failure


class Handed(NamedTuple):
    """How an orphan was left to the reaper.

    survey     of what was in it; None if somebody else had it
    is_handed  the next reaper takes it; False if it was to be kept, or we were stopped
    """

    survey: Survey | None
    is_handed: bool


def hand_over(
    folder: UserFolder, container: ContainerId, progress: Progress, stops: Callable[[], bool], *, keeps: bool
) -> Handed:
    """Count what is in an orphan, and let the reaper have it; to be run as the folder's owner.

    It is counted while we have its lock, so that nothing of it goes meanwhile, and then claimed: what lies in
    reaping/ and nobody holds is past its retention, and the next reaper goes on with it. If we are stopped or
    killed before that, it is an orphan like any other.
    keeps   it stays an orphan for its retention
    Raises  BadRecord, OSError
    """
    held = hold(folder, State.ORPHANS, container)
    if isinstance(held, Lost):
        return Handed(None, False)
    with held:
        seen = survey(folder.store.kernel, held.fd, progress, with_shared=True, stops=stops)
        is_handed = not keeps and not stops()
        if is_handed:
            with_room(folder, FOR_REAPER, lambda: move(held, State.REAPING))
    return Handed(seen, is_handed)


def explain_left(folder: UserFolder, container: ContainerId) -> Reason:
    """What of a quarantined orphan is left, and why; to be run as the folder's owner.

    Raises  BadRecord, OSError; FileNotFoundError if it is not in quarantine any more
    """
    kernel = folder.store.kernel
    with folder.open(State.QUARANTINE) as state_fd, kernel.open_dir(state_fd, container.encode()) as fd:
        n_bytes = survey(kernel, fd).n_bytes
    failures = look_at_record(folder, State.QUARANTINE, container).failures
    why = ""
    if failures:
        more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        why = f": {explain_failure(failures[0])}{more}"
    return Reason(Kind.LEFT, n_bytes, f"could not be removed, in quarantine{why}")


def expires_ns(folder: UserFolder, container: ContainerId) -> int | None:
    """When the retention of an orphan ends by what its record says now; None for never. To be run as its owner.

    Raises  BadRecord, OSError; FileNotFoundError if it is no orphan any more
    """
    return look_at_record(folder, State.ORPHANS, container).expires_ns()
