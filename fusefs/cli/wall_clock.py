"""Clocks for commands: the wall clock may have been set, and nothing is called old because of that."""

from __future__ import annotations

from contextlib import suppress

from fusefs.cli import output
from fusefs.core.durations import format_duration
from fusefs.core.orphan_age import STEP_NS, Clock
from fusefs.linux.clocks import moment
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import state_dir


def watched(*, notes: bool = True) -> tuple[Clock, ...]:
    """What this user's service and commands remember of the wall clock; nothing for a user without a home.

    notes  have the next command know what the clock is now
    """
    from fusefs.service.clock_file import watched_clocks

    with suppress(FileNotFoundError):
        return watched_clocks(state_dir(), notes=notes)
    return ()


class AgeCutoffs:
    """The moments before which files are so old, however the wall clock was set since it was noted last."""

    def __init__(self, kernel: Kernel, *, notes: bool) -> None:
        """notes: have the next command know what the clock is now."""
        self.now = moment(kernel, watched(notes=notes))
        self._set_ns = 0

    def ago(self, span_ns: int) -> int:
        """The one for so many nanoseconds."""
        cutoff_ns = self.now.cutoff_ns(span_ns)
        self._set_ns = max(self._set_ns, self.now.wall_ns - span_ns - cutoff_ns)
        return cutoff_ns

    def tell(self) -> None:
        """Say so if files were called older than they are."""
        if self._set_ns >= STEP_NS:
            ahead = format_duration(round(self._set_ns / 1e9))
            output.warn(f"the wall clock was set forward by {ahead}: what only seems to be old because of it stays")
