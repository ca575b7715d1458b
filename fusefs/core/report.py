"""What a loop over many items did: it goes on after a failure and returns this."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fusefs.core.names import ContainerId

Progress = Callable[[int], None]
"""Called with the number of entries removed since the last call."""


class Failure(NamedTuple):
    """One thing that could not be done.

    name   path of the entry inside the tree
    errno  what the kernel said
    call   the call that it said it to
    """

    name: bytes
    errno: int
    call: str


class Report(NamedTuple):
    """Entries removed, failures (the first ones, see `MAX_FAILURES`), and how many failed in all."""

    removed: int
    failures: tuple[Failure, ...]
    n_failed: int


class Reaped(NamedTuple):
    """What became of one orphan.

    lost    why it was not ours to reap; None if it was
    report  what was removed and what failed; with failures it is in quarantine now
    """

    id: ContainerId
    lost: str | None
    report: Report


MAX_FAILURES = 50
"""Failures kept by name: a record must stay below 64 KiB, and nobody reads the millionth."""
