"""The progress bar of a reap: entries and rate; bytes and the time that is left where they are known."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from fusefs.core.durations import format_duration
from fusefs.core.sizes import format_size

_REDRAW_S = 0.1


class Shows(Protocol):
    """What is told how a removal goes."""

    def advance(self, n_entries: int, n_bytes: int) -> None:
        """So much more is gone."""

    def counted(self, n_entries: int, n_bytes: int) -> None:
        """So much there is to do."""


class Nobody:
    """No terminal: nobody looks."""

    def advance(self, n_entries: int, n_bytes: int) -> None:
        """See Shows."""

    def counted(self, n_entries: int, n_bytes: int) -> None:
        """See Shows."""


def bar(title: str, *, shown: bool) -> AbstractContextManager[Shows]:
    """A bar for who looks at a terminal; nothing for the rest."""
    return Bar(title) if shown and sys.stderr.isatty() else nullcontext(Nobody())


class Bar(AbstractContextManager[Shows]):
    """Drawn by the thread that removes: a forked child has no other."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns: list[Any] = [
            SpinnerColumn(),
            TextColumn("{task.description}: {task.completed:,} entries{task.fields[told]}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
        ]
        self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self._task = self._bar.add_task(title, total=None, told="")
        self._began = time.monotonic()
        self._drawn = 0.0
        self._n_entries = 0
        self._n_bytes = 0
        self._of: tuple[int, int] | None = None

    def __enter__(self) -> Shows:
        self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()

    def counted(self, n_entries: int, n_bytes: int) -> None:
        """See Shows."""
        self._of = n_entries, n_bytes
        self._began = time.monotonic()
        self._bar.update(self._task, total=n_entries)

    def advance(self, n_entries: int, n_bytes: int) -> None:
        """See Shows."""
        self._n_entries += n_entries
        self._n_bytes += n_bytes
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._bar.update(self._task, completed=self._n_entries, told=self._told(max(now - self._began, 0.001)))
            self._bar.refresh()

    def _told(self, elapsed_s: float) -> str:
        parts = [f" ({self._n_entries / elapsed_s:,.0f}/s)"]
        if self._n_bytes:
            parts.append(f"{format_size(self._n_bytes)} ({format_size(int(self._n_bytes / elapsed_s))}/s)")
        if self._of is not None:
            n_entries, n_bytes = self._of
            # Paced, the time goes by bytes or by entries, whichever of the two is further behind.
            done = min(_part(self._n_entries, n_entries), _part(self._n_bytes, n_bytes) if self._n_bytes else 1.0)
            left_s = elapsed_s / done - elapsed_s if done else 0.0
            parts += [f"of {n_entries:,} entries, {format_size(n_bytes)}", f"{format_duration(round(left_s))} left"]
        return ", ".join(parts)


def _part(n: int, of: int) -> float:
    return min(n / of, 1.0) if of else 1.0
