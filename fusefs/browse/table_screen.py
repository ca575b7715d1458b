"""A full-screen table, with a filter above it and the details of the selected row, the status and the keys below it."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, Static

from fusefs.browse.command_app import CommandApp
from fusefs.core.container_states import State
from fusefs.core.human_units import format_duration, format_size, format_utc
from fusefs.core.printable_names import printable, printable_text
from fusefs.core.record import Method
from fusefs.linux.children import user_name
from fusefs.store.orphans import ListedContainer

ORDERS = ("age", "left", "size", "path", "owner")
"""Sort orders: newest first, first to expire, largest first, by path, by owner."""
_FOREVER_NS = 1 << 70
_SOON_S = 3600
_HEAD, _CHOSEN = Style(bold=True, underline=True), Style(reverse=True)
_PLAIN, _OPENS = Style(), Style(bold=True)
_SAFE, _URGENT, _PAST = Style(color="green"), Style(color="yellow"), Style(color="red")
"""The terminal's own colours, which suit its background. The text conveys everything that the colours do."""


class Column(NamedTuple):
    """A column of a table. width: in terminal cells; 0: the remaining width"""

    name: str
    width: int
    is_number: bool = False


class OrphanRow(NamedTuple):
    """A row for an orphan. owner, size: as text; n_bytes: -1 if unknown"""

    entry: ListedContainer
    owner: str
    size: str
    n_bytes: int

    @property
    def key(self) -> str:
        """The ID and the store, since copies of a volume contain the same IDs."""
        return f"{self.entry.id} {printable(self.entry.base_path())}"

    def path(self) -> str:
        return "(dropped)" if self.entry.origin is None else printable(self.entry.origin)

    def left(self, now_ns: int) -> str:
        """Return the time until the orphan expires, or its state."""
        left_s = self.entry.remaining_s(now_ns)
        if self.entry.problem:
            return "unreadable"
        if self.entry.state is not State.ORPHANS:
            return "unfinished" if self.entry.state is State.STAGE else self.entry.state.value
        return "kept" if left_s is None else format_duration(left_s) if left_s > 0 else "expired"

    def age(self, now_ns: int) -> str:
        """Return the time since the tree was trashed."""
        return "?" if self.entry.problem else format_duration(max(self.entry.age_s(now_ns), 0))

    def cells(self, now_ns: int) -> tuple[str, ...]:
        swept = " (swept)" if self.entry.method is Method.SWEEP else ""
        where = printable_text(self.entry.problem) or self.path() + swept
        return (self.age(now_ns), self.left(now_ns), self.size, self.owner, where)

    def style(self, now_ns: int) -> Style:
        left_s = self.entry.remaining_s(now_ns)
        if self.entry.problem or self.entry.state is not State.ORPHANS:
            return _PAST
        return _SAFE if left_s is None else _URGENT if left_s < _SOON_S else _PLAIN

    def text(self) -> str:
        """Return the text to which a filter applies."""
        return f"{self.path()}\n{self.owner}\n{self.entry.id}\n{printable_text(self.entry.note)}"

    def rank(self, order: str) -> tuple[Any, ...]:
        """Return the sort key. order: one of ORDERS"""
        newest = -self.entry.created_ns - self.entry.clock_set_ns
        firsts: dict[str, Any] = {
            "age": 0,
            "left": _FOREVER_NS if self.entry.expires_ns is None else self.entry.expires_ns,
            "size": -self.n_bytes,
            "path": self.entry.origin or b"",
            "owner": self.owner,
        }
        return (firsts[order], newest)


ORPHAN_COLUMNS = (
    Column("AGE", 6, is_number=True),
    Column("LEFT", 10, is_number=True),
    Column("SIZE", 10, is_number=True),
    Column("OWNER", 8),
    Column("ORIGIN", 0),
)


def orphan_row(listed: dict[str, Any]) -> OrphanRow:
    """Make a row from an object of `trashd list --json`."""
    entry = ListedContainer(
        id=listed["id"],
        uid=listed["uid"],
        state=State(listed["state"]),
        path=os.fsencode(listed["path"]),
        origin=None if listed["origin"] is None else os.fsencode(listed["origin"]),
        method=None if listed["method"] is None else Method(listed["method"]),
        created_ns=listed["created_ns"],
        expires_ns=listed["expires_ns"],
        note=listed["note"],
        problem=listed["problem"],
        clock_set_ns=listed["clock_set_ns"],
    )
    size = listed["size"]
    if size is None:
        return OrphanRow(entry, _user(entry.uid), "?", -1)
    bound = ">=" if size["is_at_least"] else ""
    return OrphanRow(entry, _user(entry.uid), bound + format_size(size["n_bytes"]), size["n_bytes"])


class InsideRow(NamedTuple):
    """A row for an entry of a directory in an orphan. name: empty for the orphan's tree itself"""

    name: bytes
    mode: int
    owner: str
    n_bytes: int
    mtime_ns: int
    target: bytes | None

    @property
    def key(self) -> str:
        return os.fsdecode(self.name)

    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def cells(self, now_ns: int) -> tuple[str, ...]:
        day = format_utc(self.mtime_ns, "%Y-%m-%d %H:%M", "after 9999")
        size = "" if self.is_directory() else format_size(self.n_bytes)
        return (stat.filemode(self.mode), size, day, self.owner, self.text())

    def style(self, now_ns: int) -> Style:
        return _OPENS if self.is_directory() else _PLAIN

    def text(self) -> str:
        """Return the text to which a filter applies."""
        after = "/" if self.is_directory() else "" if self.target is None else f" -> {printable(self.target)}"
        return (printable(self.name) or "(itself)") + after


TableRow = OrphanRow | InsideRow
INSIDE_COLUMNS = (
    Column("MODE", 10),
    Column("SIZE", 8, is_number=True),
    Column("MODIFIED", 16),
    Column("OWNER", 8),
    Column("NAME", 0),
)


def inside_row(listed: dict[str, Any]) -> InsideRow:
    """Make a row from an object of `trashd ls --json`."""
    target = None if listed["target"] is None else os.fsencode(listed["target"])
    name = os.fsencode(listed["name"])
    return InsideRow(name, listed["mode"], _user(listed["uid"]), listed["n_bytes"], listed["mtime_ns"], target)


@cache
def _user(uid: int) -> str:
    """Return the user's name, cached, since it may have to be queried from a directory service."""
    return printable_text(user_name(uid))


def lined_up(columns: tuple[Column, ...], cells: tuple[str, ...], width: int) -> str:
    """Format one line of a table. width: in terminal cells"""
    parts = []
    room = width
    for column, cell in zip(columns, cells, strict=True):
        wide = column.width or max(room, 1)
        text = shortened(cell, wide)
        gap = " " * (wide - cell_len(text))
        parts.append(gap + text if column.is_number else text + gap)
        room -= wide + 1
    return set_cell_size(" ".join(parts), width)


def shortened(text: str, room: int) -> str:
    """Cut the middle out of a text, since the beginning and the end of a path identify it."""
    if cell_len(text) <= room:
        return text
    first = set_cell_size(text, room // 3)
    last, left = "", room - 1 - cell_len(first)
    for character in reversed(text):
        left -= cell_len(character)
        if left < 0:
            break
        last = character + last
    return f"{first}…{last}"


_ALL = 1 << 40
"""More rows than any table has."""


class RowTable(Widget):
    """A table with a header and rows, one of which is selected.

    Only visible lines are rendered, however many rows there are.
    """

    def __init__(self, columns: tuple[Column, ...]) -> None:
        super().__init__()
        self._columns = columns
        self._rows: Sequence[TableRow] = ()
        self._at = 0
        self._top = 0
        self._empty = ""

    def fill(self, rows: Sequence[TableRow], empty: str) -> None:
        """Show rows; keep the selected row or, if it is gone, its position. empty: the text if there are no rows"""
        if chosen := self.chosen():
            here = rows[self._at].key if self._at < len(rows) else ""
            if here != chosen.key:
                self._at = next((at for at, row in enumerate(rows) if row.key == chosen.key), self._at)
        self._rows, self._empty = rows, empty
        self.move_to(self._at)

    def chosen(self) -> TableRow | None:
        return self._rows[self._at] if self._rows else None

    def place(self) -> str:
        """Return the position of the selected row, such as 3/120."""
        return f"{self._at + 1:,}/{len(self._rows):,}" if self._rows else "0/0"

    def move(self, n_rows: int) -> None:
        """Move the selection down by a number of rows."""
        self.move_to(self._at + n_rows)

    def move_to(self, at: int) -> None:
        """Select a row and scroll it into view."""
        self._at = max(0, min(at, len(self._rows) - 1))
        most = max(len(self._rows) - self.n_visible(), 0)
        self._top = min(max(self._top, self._at - self.n_visible() + 1), self._at, most)
        self.refresh()

    def move_to_key(self, key: str) -> None:
        self.move_to(next((at for at, row in enumerate(self._rows) if row.key == key), self._at))

    def n_visible(self) -> int:
        return max(self.size.height - 1, 1)

    def on_resize(self) -> None:
        self.move_to(self._at)

    def render_line(self, y: int) -> Strip:
        """Render one line. y: its number, counted from the top"""
        width = self.size.width
        at = self._top + y - 1
        text, style = "", _PLAIN
        if y == 0:
            text, style = lined_up(self._columns, tuple(column.name for column in self._columns), width), _HEAD
        elif at < len(self._rows):
            row, now_ns = self._rows[at], time.time_ns()
            text = lined_up(self._columns, row.cells(now_ns), width)
            style = _CHOSEN if at == self._at else row.style(now_ns)
        elif y == 2 and not self._rows:
            text = self._empty
        return Strip([Segment(text, style)]).adjust_cell_length(width)


class TableScreen(Screen[None]):
    """The base class of both screens: a table with a filter."""

    AUTO_FOCUS = ""
    COLUMNS: ClassVar[tuple[Column, ...]] = ()
    KEYS: ClassVar[str] = ""
    """The keys that the last line shows, in the form `key word  key word`."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", f"move(-{_ALL})", show=False),
        Binding("end", f"move({_ALL})", show=False),
        Binding("slash", "filter", show=False, priority=True),
        Binding("escape", "back", show=False),
        Binding("ctrl+r,f5", "reload", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._is_troubled = False

    def compose(self) -> ComposeResult:
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
        return cast("CommandApp", self.app)

    @property
    def table(self) -> RowTable:
        return self.query_one(RowTable)

    @property
    def filter_text(self) -> str:
        return self.query_one(Input).value

    def title_text(self) -> str:
        raise NotImplementedError

    def detail_text(self) -> Sequence[str]:
        """Return two lines about the selected row, with details for which the row itself has no room."""
        raise NotImplementedError

    def refilter(self) -> None:
        """Apply the filter."""
        raise NotImplementedError

    def reload(self) -> None:
        """Refresh the rows."""
        raise NotImplementedError

    def fill(self, rows: Sequence[TableRow], empty: str) -> None:
        """Show rows. empty: the text to show if there are no rows"""
        self.table.fill(rows, empty)
        self.redraw()

    def picked(self, rows: Sequence[TableRow]) -> Sequence[TableRow]:
        """Return the rows that match the filter."""
        wanted = self.filter_text.casefold()
        return [row for row in rows if wanted in row.text().casefold()] if wanted else rows

    def redraw(self) -> None:
        """Redraw the title and the details."""
        place, width = self.table.place(), self.size.width
        room = width - len(place) - 1
        title = set_cell_size(shortened(self.title_text(), room), room)
        self.query_one("#title", Static).update(Content(f"{title} {place}").stylize("bold"))
        detail = [shortened(line, width) for line in self.detail_text()]
        self.query_one("#detail", Static).update(Content("\n".join(detail)))

    def is_left(self) -> bool:
        """Return whether the screen was closed, so that results can't be shown any more."""
        return not self.query(RowTable)

    def show_message(self, *lines: str) -> None:
        self.query_one("#status", Static).update(Content("\n".join(lines)))

    def show_errors(self, lines: Sequence[str]) -> None:
        """Show the errors of a refresh; if there are none, clear those of the previous refresh."""
        if lines or self._is_troubled:
            self.show_message(*lines)
        self._is_troubled = bool(lines)

    def waiting(self) -> str:
        """Return the text to show before the first rows arrive."""
        return "" if self._is_troubled else "loading..."

    def on_input_changed(self, _typed: Input.Changed) -> None:
        self.refilter()

    def on_input_submitted(self, _typed: Input.Submitted) -> None:
        self.set_focus(None)

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)

    def action_move(self, n_rows: int) -> None:
        """Move the selection by a number of rows, at most to the first or the last row."""
        self.table.move(n_rows)
        self.redraw()

    def action_page(self, n_pages: int) -> None:
        self.action_move(n_pages * self.table.n_visible())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Disable the key `/` while the filter has the focus, so that it is typed into the filter."""
        return action != "filter" or self.focused is None

    def action_filter(self) -> None:
        self.set_focus(self.query_one(Input))

    def action_back(self) -> None:
        """Clear the filter, or leave the screen if the filter is empty."""
        if self.focused is not None or self.filter_text:
            self.clear_filter()
        else:
            self.leave()

    def clear_filter(self) -> None:
        self.set_focus(None)
        self.query_one(Input).value = ""

    def leave(self) -> None:
        """Go back to the previous screen."""

    def action_reload(self) -> None:
        self.reload()


def _keys(text: str) -> Content:
    """Format a text such as `key word  key word`, with the keys in bold."""
    pairs = [pair.partition(" ") for pair in text.split("  ")]
    parts = [part for key, gap, word in pairs for part in ((key, "bold ansi_cyan"), f"{gap}{word}  ")]
    return Content.assemble(*parts)
