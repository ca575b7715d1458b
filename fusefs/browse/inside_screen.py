"""A directory in an orphan. Of a large one the first entries, or those that are looked for."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from fusefs.browse import verbs
from fusefs.browse.table_rows import INSIDE_COLUMNS, InsideRow, OrphanRow, inside_row
from fusefs.browse.table_screen import TableScreen
from fusefs.core.printable_names import printable

_MOST = 5000
"""Nobody reads more, and a look at so many takes a moment on any disk."""
_REST_S = 0.3
"""For so long nothing is typed before a large directory is asked."""


class InsideScreen(TableScreen):
    """What it holds."""

    COLUMNS = INSIDE_COLUMNS
    KEYS = "Enter open  Left back  r restore  / find  ? help  q quit"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,right", "enter", show=False),
        Binding("left,backspace", "up", show=False),
        Binding("r", "restore", show=False),
    ]

    def __init__(self, orphan: OrphanRow) -> None:
        super().__init__()
        self._orphan = orphan
        self._path = b""
        self._rows: list[InsideRow] | None = None
        self._is_cut = False
        self._came_from = ""

    def on_mount(self) -> None:
        """Begin."""
        self.look()

    def look(self) -> None:
        """See TableScreen."""
        self.run_worker(self._look(), exclusive=True, group="look")

    async def _look(self, rest_s: float = 0.0) -> None:
        await asyncio.sleep(rest_s)
        place = f"{self._orphan.entry.id}:".encode() + self._path
        if self._rows is None:
            self.refilter()
        glob = ("--iname", _glob_for(self.wanted)) if self._is_cut and self.wanted else ()
        volume = self._orphan.entry.base_path()
        answer = await self.browser.commands.ask(
            inside_row, "ls", "--json", "--first", str(_MOST + 1), *glob, "--volume", volume, "--", place
        )
        if self.is_left():
            return
        self.tell_trouble(answer.err)
        if not answer.code:
            self._is_cut = bool(glob) or len(answer.objects) > _MOST
            self._rows = answer.objects[:_MOST]
        self.refilter_here()
        self.table.move_to_key(self._came_from)
        self._came_from = ""
        self.redraw()

    def refilter(self) -> None:
        """See TableScreen."""
        if self._is_cut and self._rows is not None:
            self.run_worker(self._look(_REST_S), exclusive=True, group="look")
        else:
            self.refilter_here()

    def refilter_here(self) -> None:
        """Show what is looked for among the entries that are known."""
        rows = self._rows
        found = "no such entries" if rows or self._is_cut else "nothing in it"
        nothing = self.waiting() if rows is None else found
        self.fill(self.picked(rows or []), nothing)

    def title_text(self) -> str:
        """See TableScreen."""
        cut = f"  (the first {_MOST:,}: / finds others)" if self._is_cut else ""
        return f"{self._orphan.path()}: /{printable(self._path)}{cut}"

    def detail_text(self) -> Sequence[str]:
        """See TableScreen."""
        row = self._chosen()
        return "" if row is None else row.text(), self._orphan.entry.id

    def _chosen(self) -> InsideRow | None:
        row = self.table.chosen()
        return row if isinstance(row, InsideRow) else None

    def _go(self, path: bytes, came_from: str) -> None:
        self._path, self._came_from = path, came_from
        self._rows, self._is_cut = None, False
        self.clear_filter()
        self.look()

    def action_enter(self) -> None:
        """Open a directory."""
        row = self._chosen()
        if row is not None and row.is_directory():
            self._go(os.path.join(self._path, row.name), "")

    def action_up(self) -> None:
        """Go to the directory above, or back to the orphans."""
        if self._path:
            above, _slash, name = self._path.rpartition(b"/")
            self._go(above, os.fsdecode(name))
        else:
            self.dismiss()

    def leave(self) -> None:
        """See TableScreen."""
        self.action_up()

    def action_restore(self) -> None:
        """Take this back alone."""
        if row := self._chosen():
            self.browser.run_worker(
                verbs.restore(self.browser, self._orphan, os.path.join(self._path, row.name) or None)
            )


def _glob_for(wanted: str) -> str:
    """What `trashd ls --iname` is asked for."""
    return "*" + re.sub(r"([*?\[\]\\])", r"\\\1", wanted) + "*"
