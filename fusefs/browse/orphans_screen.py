"""The screens of `trashd browse`: the list of orphans, a directory in an orphan, and the dialogs."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from fusefs.browse.command_app import CommandApp
from fusefs.browse.table_screen import (
    INSIDE_COLUMNS,
    ORDERS,
    ORPHAN_COLUMNS,
    InsideRow,
    OrphanRow,
    TableScreen,
    inside_row,
    orphan_row,
)
from fusefs.core.container_states import State
from fusefs.core.human_units import format_size
from fusefs.core.printable_names import printable, printable_text

T = TypeVar("T")


class _Dialog(ModalScreen[T]):
    """A dialog with a heading, a text, and a line with the keys that answer it."""

    AUTO_FOCUS = ""

    def __init__(self, heading: str, lines: list[str], keys: str) -> None:
        super().__init__()
        self._heading, self._lines, self._keys = heading, lines, keys

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static(Content(self._heading).stylize("bold"))
            yield Static(Content("\n".join(["", *self._lines, ""])))
            yield from self.compose_answer()
            yield Static(Content(self._keys))

    def compose_answer(self) -> ComposeResult:
        """Yield the input field, if the dialog has one."""
        yield from ()

    def action_scroll(self, n_lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=n_lines, animate=False)


class Notice(_Dialog[None]):
    """A message to read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,space,q", "dismiss", show=False),
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
    ]

    def __init__(self, heading: str, lines: list[str]) -> None:
        super().__init__(heading, lines, "Enter: continue")


class YesOrNo(_Dialog[bool]):
    """A question to which only `y` means yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", show=False),
        Binding("n,escape,enter,q", "dismiss(False)", show=False),
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
    ]

    def __init__(self, question: str, lines: list[str], yes: str) -> None:
        """yes: a description of what `y` does"""
        super().__init__(question, lines, f"y: {yes}   n, Esc: no")


class LineTyped(_Dialog[str | None]):
    """A dialog that asks for a line of text, and returns None if the user cancels."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", show=False)]

    def __init__(self, heading: str, lines: list[str], nothing: str, enter: str) -> None:
        """nothing: the meaning of an empty line; enter: a description of what Enter does"""
        super().__init__(heading, lines, f"Enter: {enter}   Esc: no")
        self._nothing = nothing

    def compose_answer(self) -> ComposeResult:
        yield Input(compact=True, select_on_focus=False, placeholder=f"({self._nothing})")
        yield Static("")

    def on_input_submitted(self, typed: Input.Submitted) -> None:
        self.dismiss(typed.value.strip())


async def restore(app: CommandApp, row: OrphanRow, inside: bytes | None = None) -> None:
    """Ask for a target path, then restore an orphan or a part of it."""
    part = [] if inside is None else [printable(inside), "of"]
    lines = [*part, row.path(), "", "Target path on the same filesystem:"]
    to = await app.push_screen_wait(LineTyped("Restore", lines, "its original path", "restore"))
    if to is None:
        return
    place = ("--to", os.path.expanduser(to)) if to else ()
    which = () if inside is None else (inside,)
    await _run_and_show(app, f"restoring {' '.join(lines[:-2])}", row, "restore", *place, "--", row.entry.id, *which)


async def keep(app: CommandApp, row: OrphanRow) -> None:
    """Ask how long to keep an orphan, then keep it."""
    lines = [row.path(), "", "Keep it for how long (12h, 7d, 2w)?"]
    term = await app.push_screen_wait(LineTyped("Keep", lines, "until you release it with u", "keep"))
    if term is not None:
        await _run_and_show(
            app, f"keeping {row.path()}", row, "keep", *(("--for", term) if term else ()), "--", row.entry.id
        )


async def release(app: CommandApp, row: OrphanRow) -> None:
    """Release a kept orphan, after a confirmation."""
    lines = [
        row.path(),
        "",
        "Its normal retention, counted from the swap, then applies again, so it may expire immediately.",
    ]
    if await app.push_screen_wait(YesOrNo("Release it?", lines, "release it")):
        await _run_and_show(app, f"releasing {row.path()}", row, "keep", "--release", "--", row.entry.id)


async def reap(app: CommandApp, row: OrphanRow) -> None:
    """Delete an orphan, after a confirmation."""
    now_ns = time.time_ns()
    left = row.left(now_ns)
    will_expire = row.entry.state is State.ORPHANS and not row.entry.problem
    term = {"kept": "It is kept, so it does not expire.", "expired": "It has expired."}.get(
        left, f"It expires in {left}." if will_expire else f"Its state is: {left}."
    )
    size = "of unknown size" if row.n_bytes < 0 else row.size
    lines = [row.path(), f"{row.owner}'s, {size}, {row.age(now_ns)} old.", term, "It can't be restored afterwards."]
    if await app.push_screen_wait(YesOrNo("Delete it permanently?", lines, "delete")):
        await _run_and_show(app, f"deleting {row.path()}", row, "reap", "--now", "--", row.entry.id)


async def count(app: CommandApp, row: OrphanRow) -> None:
    """Measure the space that an orphan uses; afterwards, the list shows the size."""
    app.show_message(f"counting {row.path()}...")
    volume = row.entry.base_path()
    answer = await app.commands.ask(dict, "du", "--json", "--volume", volume, "--", row.entry.id)
    for counted in answer.objects:
        is_known = counted["n_bytes"] is not None
        size = format_size(counted["n_bytes"]) if is_known else "an unknown amount"
        bound = "at least " if is_known and counted["is_at_least"] else ""
        app.show_message(f"{row.path()} uses {bound}{size}")
    if answer.err:
        app.push_screen(Notice(f"counting {row.path()}", answer.err))
    app.reload()


async def _run_and_show(app: CommandApp, doing: str, row: OrphanRow, command: str, *words: str | bytes) -> None:
    """Run a command and show its output on the status line, or in a dialog if it failed."""
    app.show_message(f"{doing}...")
    answer = await app.commands.act(doing, command, "--volume", row.entry.base_path(), *words)
    app.show_message(*answer.out)
    if answer.code or answer.err:
        app.push_screen(Notice(f"{doing}:", [*answer.out, *answer.err]))
    app.reload()


_MOST = 5000
"""How many entries of a directory are listed: nobody reads more, and on some disks, listing more takes too long."""
_REST_S = 0.3
"""How many seconds without a key press pass before a filter is applied to a large directory."""


class InsideScreen(TableScreen):
    """The screen that lists a directory in an orphan."""

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
        self.reload()

    def reload(self) -> None:
        self.run_worker(self._load(), exclusive=True, group="look")

    async def _load(self, rest_s: float = 0.0) -> None:
        await asyncio.sleep(rest_s)
        place = f"{self._orphan.entry.id}:".encode() + self._path
        if self._rows is None:
            self.refilter()
        literal = re.sub(r"([*?\[\]\\])", r"\\\1", self.filter_text)
        glob = ("--iname", f"*{literal}*") if self._is_cut and literal else ()
        volume = self._orphan.entry.base_path()
        answer = await self.browser.commands.ask(
            inside_row, "ls", "--json", "--first", str(_MOST + 1), *glob, "--volume", volume, "--", place
        )
        if self.is_left():
            return
        self.show_errors(answer.err)
        if not answer.code:
            self._is_cut = bool(glob) or len(answer.objects) > _MOST
            self._rows = answer.objects[:_MOST]
        self.refilter_here()
        self.table.move_to_key(self._came_from)
        self._came_from = ""
        self.redraw()

    def refilter(self) -> None:
        if self._is_cut and self._rows is not None:
            self.run_worker(self._load(_REST_S), exclusive=True, group="look")
        else:
            self.refilter_here()

    def refilter_here(self) -> None:
        """Apply the filter to the entries that have been listed."""
        rows = self._rows
        found = "no matching entries" if rows or self._is_cut else "empty"
        nothing = self.waiting() if rows is None else found
        self.fill(self.picked(rows or []), nothing)

    def title_text(self) -> str:
        cut = f"  (first {_MOST:,} entries; / finds others)" if self._is_cut else ""
        return f"{self._orphan.path()}: /{printable(self._path)}{cut}"

    def detail_text(self) -> Sequence[str]:
        row = self.table.chosen()
        return "" if row is None else row.text(), self._orphan.entry.id

    def _go(self, path: bytes, came_from: str) -> None:
        self._path, self._came_from = path, came_from
        self._rows, self._is_cut = None, False
        self.clear_filter()
        self.reload()

    def action_enter(self) -> None:
        """Open the selected directory."""
        row = self.table.chosen()
        if isinstance(row, InsideRow) and row.is_directory():
            self._go(os.path.join(self._path, row.name), "")

    def action_up(self) -> None:
        """Go to the parent directory, or back to the orphans."""
        if self._path:
            above, _slash, name = self._path.rpartition(b"/")
            self._go(above, os.fsdecode(name))
        else:
            self.dismiss()

    def leave(self) -> None:
        self.action_up()

    def action_restore(self) -> None:
        """Restore only the selected entry."""
        if isinstance(row := self.table.chosen(), InsideRow):
            self.browser.run_worker(restore(self.browser, self._orphan, os.path.join(self._path, row.name) or None))


_VERBS: dict[str, Callable[[CommandApp, OrphanRow], Coroutine[None, None, None]]] = {
    "restore": restore, "keep": keep, "release": release, "reap": reap, "count": count,
}  # fmt: skip
_LEAST_S, _MOST_S = 3.0, 60.0
_SHARE = 10
"""Listing the orphans takes at most a tenth of the time."""


class OrphansScreen(TableScreen):
    """The screen that lists the orphans."""

    COLUMNS = ORPHAN_COLUMNS
    KEYS = "Enter open  r restore  k keep  d delete  s size  o order  / find  ? help  q quit"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,right", "enter", show=False),
        Binding("r", "act('restore')", show=False),
        Binding("k", "act('keep')", show=False),
        Binding("u", "act('release')", show=False),
        Binding("d,delete", "act('reap')", show=False),
        Binding("s", "act('count')", show=False),
        Binding("o", "order", show=False),
    ]

    def __init__(self, volumes: Sequence[bytes]) -> None:
        super().__init__()
        self._volumes = volumes
        self._rows: list[OrphanRow] | None = None
        self._order = 0
        self._is_wanted = asyncio.Event()

    def on_mount(self) -> None:
        self.refilter()
        self.run_worker(self._reload_periodically())

    async def _reload_periodically(self) -> None:
        """List the orphans periodically, since other commands, the service and other nodes change the stores."""
        while True:
            self._is_wanted.clear()
            began_s = time.monotonic()
            await self._load()
            ended_s = time.monotonic()
            # The longer ago the last key was pressed, the longer the pauses are.
            pause_s = max(_LEAST_S, _SHARE * (ended_s - began_s), (ended_s - self.browser.typed_s) / 10)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_wanted.wait(), min(pause_s, _MOST_S))

    async def _load(self) -> None:
        words = [word for volume in self._volumes for word in (b"--volume", volume)]
        answer = await self.browser.commands.ask(orphan_row, "list", "--json", *words)
        if self.is_left():
            return
        self.show_errors(answer.err)
        if answer.code == 0 or answer.objects:
            self._rows = answer.objects
        self.refilter()

    def reload(self) -> None:
        self._is_wanted.set()

    def refilter(self) -> None:
        order = ORDERS[self._order]
        rows = sorted(self._rows or (), key=lambda row: row.rank(order))
        nothing = "no matching orphans" if rows else "no orphans" if self._rows is not None else self.waiting()
        self.fill(self.picked(rows), nothing)

    def title_text(self) -> str:
        rows = self._rows or []
        known_bytes = sum(row.n_bytes for row in rows if row.n_bytes >= 0)
        n_unknown = sum(row.n_bytes < 0 for row in rows)
        unknown = f" and {n_unknown:,} of unknown size" if n_unknown else ""
        where = ", ".join(map(printable, self._volumes))
        orphans = "1 orphan" if len(rows) == 1 else f"{len(rows):,} orphans"
        title = f"trashd: {orphans}, {format_size(known_bytes)}{unknown}, by {ORDERS[self._order]}"
        return f"{title}  {where}" if where else title

    def detail_text(self) -> Sequence[str]:
        row = self.table.chosen()
        if not isinstance(row, OrphanRow):
            return ()
        note = f"  # {printable_text(row.entry.note)}" if row.entry.note else ""
        return row.path(), f"{row.entry.id}{note}"

    def action_enter(self) -> None:
        """Open the selected orphan."""
        if isinstance(row := self.table.chosen(), OrphanRow):
            self.browser.push_screen(InsideScreen(row))

    def action_order(self) -> None:
        """Sort by the next column."""
        self._order = (self._order + 1) % len(ORDERS)
        self.refilter()

    def action_act(self, verb: str) -> None:
        """Apply a verb of _VERBS to the selected orphan."""
        if isinstance(row := self.table.chosen(), OrphanRow):
            self.browser.run_worker(_VERBS[verb](self.browser, row))
