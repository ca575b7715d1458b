"""A table on the whole screen, a filter above it, and below what is meant, what happened and which keys there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

from rich.cells import set_cell_size
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, Static

from fusefs.browse.command_app import CommandApp
from fusefs.browse.row_table import RowTable
from fusefs.browse.table_rows import Column, TableRow, shortened


class TableScreen(Screen[None]):
    """What orphans and entries of one have in common on a screen."""

    AUTO_FOCUS = ""
    COLUMNS: ClassVar[tuple[Column, ...]] = ()
    KEYS: ClassVar[str] = ""
    """What is told of keys: `key word  key word`."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "first", show=False),
        Binding("end", "last", show=False),
        Binding("slash", "filter", show=False, priority=True),
        Binding("escape", "back", show=False),
        Binding("ctrl+r,f5", "look", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._is_troubled = False

    def compose(self) -> ComposeResult:
        """See Screen."""
        yield Static(id="title")
        with Horizontal(id="find"):
            yield Static("Find: ")
            yield Input(compact=True, placeholder="(/)", select_on_focus=False)
        yield RowTable(self.COLUMNS)
        yield Static(id="detail")
        yield Static(id="status")
        yield Static(_keys(self.KEYS), id="keys")

    @property
    def browser(self) -> CommandApp:
        """The program."""
        return cast("CommandApp", self.app)

    @property
    def table(self) -> RowTable:
        """What is listed."""
        return self.query_one(RowTable)

    @property
    def wanted(self) -> str:
        """What is looked for, as it is typed."""
        return self.query_one(Input).value

    def title_text(self) -> str:
        """What it is that is listed."""
        raise NotImplementedError

    def detail_text(self) -> Sequence[str]:
        """What there is no room for in its line: two lines."""
        raise NotImplementedError

    def refilter(self) -> None:
        """Show what is looked for."""
        raise NotImplementedError

    def look(self) -> None:
        """Look again at what there is."""
        raise NotImplementedError

    def fill(self, rows: Sequence[TableRow], empty: str) -> None:
        """Show these. empty: what is said if there are none"""
        self.table.fill(rows, empty)
        self.redraw()

    def picked(self, rows: Sequence[TableRow]) -> Sequence[TableRow]:
        """Those that are looked for."""
        wanted = self.wanted.casefold()
        return [row for row in rows if wanted in row.text().casefold()] if wanted else rows

    def redraw(self) -> None:
        """Tell anew what is meant."""
        place, width = self.table.place(), self.size.width
        room = width - len(place) - 1
        title = set_cell_size(shortened(self.title_text(), room), room)
        self.query_one("#title", Static).update(Content(f"{title} {place}").stylize("bold"))
        detail = [shortened(line, width) for line in self.detail_text()]
        self.query_one("#detail", Static).update(Content("\n".join(detail)))

    def is_left(self) -> bool:
        """Whether it is being taken down: what is found out now has no place any more."""
        return not self.query(RowTable)

    def tell(self, *lines: str) -> None:
        """Say what happened."""
        self.query_one("#status", Static).update(Content("\n".join(lines)))

    def tell_trouble(self, lines: Sequence[str]) -> None:
        """Say what was wrong with a look, until nothing is any more."""
        if lines or self._is_troubled:
            self.tell(*lines)
        self._is_troubled = bool(lines)

    def waiting(self) -> str:
        """What is said in place of what nobody knows yet."""
        return "" if self._is_troubled else "looking..."

    def on_input_changed(self, _typed: Input.Changed) -> None:
        """A letter more or less is looked for."""
        self.refilter()

    def on_input_submitted(self, _typed: Input.Submitted) -> None:
        """What is looked for is typed."""
        self.set_focus(None)

    def on_resize(self) -> None:
        """There is more room, or less."""
        self.call_after_refresh(self.redraw)

    def action_move(self, n_rows: int) -> None:
        """Choose another one."""
        self.table.move(n_rows)
        self.redraw()

    def action_page(self, n_pages: int) -> None:
        """Choose another one, a screen further."""
        self.action_move(n_pages * self.table.n_seen())

    def action_first(self) -> None:
        """Choose the first one."""
        self.table.move_to(0)
        self.redraw()

    def action_last(self) -> None:
        """Choose the last one."""
        self.table.move_to_end()
        self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """See Screen. The key that begins a filter comes first: letters right behind it are not meant as verbs."""
        return action != "filter" or self.focused is None

    def action_filter(self) -> None:
        """Type what is looked for."""
        self.set_focus(self.query_one(Input))

    def action_back(self) -> None:
        """Look for nothing any more, or leave."""
        if self.focused is not None or self.wanted:
            self.clear_filter()
        else:
            self.leave()

    def clear_filter(self) -> None:
        """Look for nothing any more."""
        self.set_focus(None)
        self.query_one(Input).value = ""

    def leave(self) -> None:
        """Go back to where one came from."""

    def action_look(self) -> None:
        """Look again."""
        self.look()


def _keys(told: str) -> Content:
    """`key word  key word`, the keys in bold."""
    pairs = [pair.partition(" ") for pair in told.split("  ")]
    parts = [part for key, gap, word in pairs for part in ((key, "bold ansi_cyan"), f"{gap}{word}  ")]
    return Content.assemble(*parts)
