"""What is shown of an orphan, and of an entry in one: rows of cells, every word as a terminal may see it."""

from __future__ import annotations

import os
import stat
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size

from fusefs.core.durations import format_duration
from fusefs.core.lifecycle import State
from fusefs.core.printable_names import printable, show
from fusefs.core.record import Method
from fusefs.core.sizes import format_size
from fusefs.core.timestamps import in_calendar
from fusefs.linux.act_as_user import user_name
from fusefs.store.list_orphans import ListedContainer

_LATE = {
    State.REAPING: "reaping",
    State.QUARANTINE: "quarantine",
    State.RESTORING: "restoring",
    State.STAGE: "unfinished",
}
ORDERS = ("age", "left", "size", "path", "owner")
"""How orphans can be ordered: the newest first, those that go soonest, the largest, by path, by whose they are."""
_FOREVER_NS = 1 << 70
_SOON_S = 3600


class Column(NamedTuple):
    """A column of a table. width: in cells; 0: what is left"""

    name: str
    width: int
    is_number: bool = False


class Mood(Enum):
    """What a row says at first sight."""

    PLAIN = "plain"
    SAFE = "safe"
    URGENT = "urgent"
    PAST = "past"
    OPENS = "opens"


class OrphanRow(NamedTuple):
    """An orphan. owner, size: in words; n_bytes: as far as that is known; -1: not at all"""

    entry: ListedContainer
    owner: str
    size: str
    n_bytes: int

    @property
    def key(self) -> str:
        """Its place: copies of a volume have the same ids."""
        return f"{self.entry.id} {printable(self.entry.base_path())}"

    def path(self) -> str:
        """Where it came from."""
        return "(dropped)" if self.entry.origin is None else printable(self.entry.origin)

    def left(self, now_ns: int) -> str:
        """For how long it can be restored, or what becomes of it."""
        left_s = self.entry.left_s(now_ns)
        if self.entry.problem:
            return "unreadable"
        if self.entry.state is not State.ORPHANS:
            return _LATE[self.entry.state]
        return "kept" if left_s is None else format_duration(left_s) if left_s > 0 else "expired"

    def age(self, now_ns: int) -> str:
        """For how long it has been one."""
        return "?" if self.entry.problem else format_duration(max(self.entry.age_s(now_ns), 0))

    def cells(self, now_ns: int) -> tuple[str, ...]:
        """What its line shows, for each column."""
        swept = " (swept)" if self.entry.method is Method.SWEEP else ""
        where = show(self.entry.problem) or self.path() + swept
        return (self.age(now_ns), self.left(now_ns), self.size, self.owner, where)

    def mood(self, now_ns: int) -> Mood:
        """What it says at first sight."""
        left_s = self.entry.left_s(now_ns)
        if self.entry.problem or self.entry.state is not State.ORPHANS:
            return Mood.PAST
        return Mood.SAFE if left_s is None else Mood.URGENT if left_s < _SOON_S else Mood.PLAIN

    def text(self) -> str:
        """What a filter looks at."""
        return f"{self.path()}\n{self.owner}\n{self.entry.id}\n{show(self.entry.note)}"

    def rank(self, order: str) -> tuple[Any, ...]:
        """What to sort by. order: of ORDERS"""
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
    Column("CAME FROM", 0),
)


def orphan_row(told: dict[str, Any]) -> OrphanRow:
    """One from an object of `trashd list --json`."""
    entry = ListedContainer(
        id=told["id"],
        uid=told["uid"],
        state=State(told["state"]),
        path=os.fsencode(told["path"]),
        origin=None if told["origin"] is None else os.fsencode(told["origin"]),
        method=None if told["method"] is None else Method(told["method"]),
        created_ns=told["created_ns"],
        expires_ns=told["expires_ns"],
        note=told["note"],
        problem=told["problem"],
        clock_set_ns=told["clock_set_ns"],
    )
    size = told["size"]
    if size is None:
        return OrphanRow(entry, _user(entry.uid), "?", -1)
    bound = ">=" if size["is_at_least"] else ""
    return OrphanRow(entry, _user(entry.uid), bound + format_size(size["n_bytes"]), size["n_bytes"])


class InsideRow(NamedTuple):
    """An entry of a directory in an orphan, as `trashd ls --json` tells of it. name: empty of the orphan itself"""

    name: bytes
    mode: int
    owner: str
    n_bytes: int
    mtime_ns: int
    target: bytes | None

    @property
    def key(self) -> str:
        """Its name."""
        return os.fsdecode(self.name)

    def is_directory(self) -> bool:
        """Whether it can be entered."""
        return stat.S_ISDIR(self.mode)

    def cells(self, now_ns: int) -> tuple[str, ...]:
        """What its line shows, for each column."""
        day = in_calendar(self.mtime_ns, "%Y-%m-%d %H:%M", "after 9999")
        size = "" if self.is_directory() else format_size(self.n_bytes)
        return (stat.filemode(self.mode), size, day, self.owner, self.text())

    def mood(self, now_ns: int) -> Mood:
        """What it says at first sight."""
        return Mood.OPENS if self.is_directory() else Mood.PLAIN

    def text(self) -> str:
        """What a filter looks at."""
        after = "/" if self.is_directory() else "" if self.target is None else f" -> {printable(self.target)}"
        return (printable(self.name) or "(itself)") + after


TableRow = OrphanRow | InsideRow
"""What has a line in a table."""
INSIDE_COLUMNS = (
    Column("MODE", 10),
    Column("SIZE", 8, is_number=True),
    Column("MODIFIED", 16),
    Column("OWNER", 8),
    Column("NAME", 0),
)


def inside_row(told: dict[str, Any]) -> InsideRow:
    """One from an object of `trashd ls --json`."""
    target = None if told["target"] is None else os.fsencode(told["target"])
    name = os.fsencode(told["name"])
    return InsideRow(name, told["mode"], _user(told["uid"]), told["n_bytes"], told["mtime_ns"], target)


@cache
def _user(uid: int) -> str:
    """A directory service may be asked, once for each."""
    return show(user_name(uid))


def lined_up(columns: tuple[Column, ...], cells: tuple[str, ...], width: int) -> str:
    """A line of a table, so many cells wide."""
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
    """A text without its middle: a path is known by where it begins and by its end."""
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
