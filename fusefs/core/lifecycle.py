"""The states of a container, the moves between them, and how long it is kept unless told otherwise."""

from __future__ import annotations

from enum import Enum

DEFAULT_RETENTION_S = 24 * 3600
"""How long an orphan can be restored unless told otherwise: a night to notice a mistake."""


class State(Enum):
    """The directory that a container is in; only a rename changes it (I4)."""

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
        (State.REAPING, State.ORPHANS),  # given back: who keeps it was faster
        (State.REAPING, State.RESTORING),  # the same, of what an ended reaper left
        (State.REAPING, State.QUARANTINE),  # set aside
        (State.QUARANTINE, State.REAPING),  # tried again
        (State.QUARANTINE, State.RESTORING),  # taken back after all
        (State.RESTORING, State.ORPHANS),  # given back
        (State.RESTORING, State.QUARANTINE),  # the same, of what was taken from there
    }
)
