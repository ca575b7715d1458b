"""What a loop over many items did: it goes on after a failure and returns this."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fusefs.core.names import ContainerId
from fusefs.core.record import Failure
from fusefs.core.space import Survey

Progress = Callable[[int, int], None]
"""Called with the entries removed and the bytes freed since the last call (bytes: as far as they were looked at)."""


class Report(NamedTuple):
    """What a removal did.

    removed   entries that are gone
    failures  the first that could not be removed, see `core.record.MAX_FAILURES`
    n_failed  how many there are in all
    n_bytes   freed by what was removed; None if nobody looked (that costs a stat a file)
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
    left_bytes  what was surveyed and is in quarantine now
    """

    id: ContainerId
    lost: str | None
    report: Report
    survey: Survey | None = None
    left_bytes: int = 0
