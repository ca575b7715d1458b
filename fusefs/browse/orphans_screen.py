"""All orphans, looked at again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import ClassVar

from textual.binding import Binding, BindingType

from fusefs.browse import verbs
from fusefs.browse.command_app import CommandApp
from fusefs.browse.inside_screen import InsideScreen
from fusefs.browse.table_rows import ORDERS, ORPHAN_COLUMNS, OrphanRow, orphan_row
from fusefs.browse.table_screen import TableScreen
from fusefs.core.printable_names import printable, show
from fusefs.core.sizes import format_size

_LEAST_S, _MOST_S = 3.0, 60.0
_SHARE = 10
"""Looks take at most one part of so many of the time."""


class OrphansScreen(TableScreen):
    """What came into the stores."""

    COLUMNS = ORPHAN_COLUMNS
    KEYS = "Enter open  r restore  k keep  d delete  s size  o order  / find  ? help  q quit"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,right", "enter", show=False),
        Binding("r", "restore", show=False),
        Binding("k", "keep", show=False),
        Binding("u", "release", show=False),
        Binding("d,delete", "reap", show=False),
        Binding("s", "count", show=False),
        Binding("o", "order", show=False),
    ]

    def __init__(self, volumes: Sequence[bytes]) -> None:
        super().__init__()
        self._volumes = volumes
        self._rows: list[OrphanRow] | None = None
        self._order = 0
        self._is_wanted = asyncio.Event()

    def on_mount(self) -> None:
        """Begin."""
        self.refilter()
        self.run_worker(self._look_again_and_again())

    async def _look_again_and_again(self) -> None:
        """Others change the stores, too: swaps, the service, other nodes, of which no kernel tells all."""
        while True:
            self._is_wanted.clear()
            began_s = time.monotonic()
            await self._look()
            ended_s = time.monotonic()
            # Who left his terminal open is looked for less and less.
            pause_s = max(_LEAST_S, _SHARE * (ended_s - began_s), (ended_s - self.browser.typed_s) / 10)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_wanted.wait(), min(pause_s, _MOST_S))

    async def _look(self) -> None:
        words = [word for volume in self._volumes for word in (b"--volume", volume)]
        answer = await self.browser.commands.ask(orphan_row, "list", "--json", *words)
        if self.is_left():
            return
        self.tell_trouble(answer.err)
        if answer.code == 0 or answer.objects:
            self._rows = answer.objects
        self.refilter()

    def look(self) -> None:
        """See TableScreen."""
        self._is_wanted.set()

    def refilter(self) -> None:
        """See TableScreen."""
        order = ORDERS[self._order]
        rows = sorted(self._rows or (), key=lambda row: row.rank(order))
        nothing = "no such orphans" if rows else "no orphans" if self._rows is not None else self.waiting()
        self.fill(self.picked(rows), nothing)

    def title_text(self) -> str:
        """See TableScreen."""
        rows = self._rows or []
        known = sum(row.n_bytes for row in rows if row.n_bytes >= 0)
        n_unknown = sum(row.n_bytes < 0 for row in rows)
        unknown = f" and {n_unknown:,} of unknown size" if n_unknown else ""
        where = ", ".join(map(printable, self._volumes))
        orphans = "1 orphan" if len(rows) == 1 else f"{len(rows):,} orphans"
        told = f"trashd: {orphans}, {format_size(known)}{unknown}, by {ORDERS[self._order]}"
        return f"{told}  {where}" if where else told

    def detail_text(self) -> Sequence[str]:
        """See TableScreen."""
        row = self._chosen()
        if row is None:
            return ()
        note = f"  # {show(row.entry.note)}" if row.entry.note else ""
        return row.path(), f"{row.entry.id}{note}"

    def _chosen(self) -> OrphanRow | None:
        row = self.table.chosen()
        return row if isinstance(row, OrphanRow) else None

    def action_enter(self) -> None:
        """Look into it."""
        if row := self._chosen():
            self.browser.push_screen(InsideScreen(row))

    def action_order(self) -> None:
        """Order them in another way."""
        self._order = (self._order + 1) % len(ORDERS)
        self.refilter()

    def action_restore(self) -> None:
        """Take it back."""
        self._act(verbs.restore)

    def action_keep(self) -> None:
        """Have it kept."""
        self._act(verbs.keep)

    def action_release(self) -> None:
        """Have it kept no longer."""
        self._act(verbs.release)

    def action_reap(self) -> None:
        """Have it deleted."""
        self._act(verbs.reap)

    def action_count(self) -> None:
        """Find out what it takes."""
        self._act(verbs.count)

    def _act(self, verb: Callable[[CommandApp, OrphanRow], Coroutine[None, None, None]]) -> None:
        if row := self._chosen():
            self.browser.run_worker(verb(self.browser, row))
