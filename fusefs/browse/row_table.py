"""A table of which only the lines that are seen are made, however many rows it has."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from fusefs.browse.table_rows import Column, Mood, TableRow, lined_up

_HEAD = Style(bold=True, underline=True)
_PLAIN = Style()
_CHOSEN = Style(reverse=True)
_STYLES = {
    Mood.PLAIN: _PLAIN, Mood.SAFE: Style(color="green"), Mood.URGENT: Style(color="yellow"),
    Mood.PAST: Style(color="red"), Mood.OPENS: Style(bold=True),
}  # fmt: skip
"""Colours of the terminal's own, which suit its background. Words tell the same."""


class RowTable(Widget):
    """A head, and as many rows as there is room for; one of them is chosen."""

    def __init__(self, columns: tuple[Column, ...]) -> None:
        super().__init__()
        self._columns = columns
        self._rows: Sequence[TableRow] = ()
        self._at = 0
        self._top = 0
        self._empty = ""

    def fill(self, rows: Sequence[TableRow], empty: str) -> None:
        """Show these; the row that was chosen stays so, or what has its place. empty: what is said if there are none"""
        if chosen := self.chosen():
            here = rows[self._at].key if self._at < len(rows) else ""
            if here != chosen.key:
                self._at = next((at for at, row in enumerate(rows) if row.key == chosen.key), self._at)
        self._rows, self._empty = rows, empty
        self.move_to(self._at)

    def chosen(self) -> TableRow | None:
        """The row that is meant; None: there is none."""
        return self._rows[self._at] if self._rows else None

    def place(self) -> str:
        """Which of how many that is."""
        return f"{self._at + 1:,}/{len(self._rows):,}" if self._rows else "0/0"

    def move(self, n_rows: int) -> None:
        """Choose another one, so many further down."""
        self.move_to(self._at + n_rows)

    def move_to(self, at: int) -> None:
        """Choose another one, and have it seen."""
        self._at = max(0, min(at, len(self._rows) - 1))
        most = max(len(self._rows) - self.n_seen(), 0)
        self._top = min(max(self._top, self._at - self.n_seen() + 1), self._at, most)
        self.refresh()

    def move_to_end(self) -> None:
        """Choose the last one."""
        self.move_to(len(self._rows))

    def move_to_key(self, key: str) -> None:
        """Choose the one that has it, if there is one."""
        self.move_to(next((at for at, row in enumerate(self._rows) if row.key == key), self._at))

    def n_seen(self) -> int:
        """How many rows there is room for."""
        return max(self.size.height - 1, 1)

    def on_resize(self) -> None:
        """Have the chosen one seen still."""
        self.move_to(self._at)

    def render_line(self, y: int) -> Strip:
        """One line. y: from the top"""
        width = self.size.width
        at = self._top + y - 1
        text, style = "", _PLAIN
        if y == 0:
            text, style = lined_up(self._columns, tuple(column.name for column in self._columns), width), _HEAD
        elif at < len(self._rows):
            row, now_ns = self._rows[at], time.time_ns()
            text = lined_up(self._columns, row.cells(now_ns), width)
            style = _CHOSEN if at == self._at else _STYLES[row.mood(now_ns)]
        elif y == 2 and not self._rows:
            text = self._empty
        return Strip([Segment(text, style)]).adjust_cell_length(width)
