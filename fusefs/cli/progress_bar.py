"""The progress bar of a reap: entries and rate; bytes and the time that is left where they are known."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Self

from fusefs.core.durations import format_duration
from fusefs.core.freed_space import Survey
from fusefs.core.sizes import format_size

_REDRAW_S = 0.1


class ProgressBar:
    """Drawn by the thread that removes: a forked child has no other. It draws nothing if stderr is no terminal.

    is_seen  whether it is drawn
    """

    def __init__(self, title: str, *, shown: bool) -> None:
        self.is_seen = shown and sys.stderr.isatty()
        self._began = time.monotonic()
        self._drawn = 0.0
        self._n_entries = 0
        self._n_bytes = 0
        self._of: tuple[int, int] | None = None
        if not self.is_seen:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        columns: list[Any] = [
            SpinnerColumn(),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[told]}  {task.description}", markup=False),  # a name may look like one
        ]
        self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self._task = self._bar.add_task(title, total=None, told="")

    def __enter__(self) -> Self:
        if self.is_seen:
            self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self.is_seen:
            self._bar.stop()

    def counting(self, n_entries: int, _n_bytes: int) -> None:
        """So much more is counted."""
        self._n_entries += n_entries
        self._draw(lambda _elapsed_s: f"{self._n_entries:,} counted")

    def counted(self, survey: Survey) -> None:
        """So much there is to do."""
        self._n_entries = 0
        self._of = survey.n_entries, survey.n_bytes
        self._began = time.monotonic()
        if self.is_seen:
            self._bar.update(self._task, total=survey.n_entries)

    def advance(self, n_entries: int, n_bytes: int) -> None:
        """So much more is gone."""
        self._n_entries += n_entries
        self._n_bytes += n_bytes
        self._draw(self._told)

    def _draw(self, tell: Callable[[float], str]) -> None:
        now = time.monotonic()
        if self.is_seen and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            told = tell(max(now - self._began, 0.001))
            self._bar.update(self._task, completed=self._n_entries, told=told)
            self._bar.refresh()

    def _told(self, elapsed_s: float) -> str:
        of = "" if self._of is None else f" of {self._of[0]:,}"
        parts = [f"{self._n_entries:,}{of} entries, {self._n_entries / elapsed_s:,.0f}/s"]
        if self._n_bytes:
            parts.append(f"{format_size(self._n_bytes)}, {format_size(int(self._n_bytes / elapsed_s))}/s")
        if self._of is not None:
            n_entries, n_bytes = self._of
            # Paced, the time goes by bytes or by entries, whichever of the two is further behind.
            done = min(_part(self._n_entries, n_entries), _part(self._n_bytes, n_bytes) if self._n_bytes else 1.0)
            left_s = elapsed_s / done - elapsed_s if done else 0.0
            parts.append(f"{format_duration(round(left_s))} left")
        return ", ".join(parts)


def _part(n: int, of: int) -> float:
    return min(n / of, 1.0) if of else 1.0
