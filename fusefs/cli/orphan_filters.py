"""Which orphans `list` and `du` tell of, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from os import fsdecode
from typing import Any, NamedTuple

import click

from fusefs.cli.options import DURATION, ParsedValue, together
from fusefs.core.lifecycle import State
from fusefs.core.sizes import parse_size
from fusefs.linux.user_names import uid_of
from fusefs.store.list_orphans import ListedContainer

_STATES = {
    "restorable": State.ORPHANS, "reaping": State.REAPING, "quarantine": State.QUARANTINE,
    "restoring": State.RESTORING, "unfinished": State.STAGE,
}  # fmt: skip
_FOREVER_S = 1 << 62

larger_option = click.option(
    "--larger", "least", type=ParsedValue("size", parse_size), metavar="SIZE", help="Only those that are."
)

filter_options = together(
    (
        click.option("--user", "uid", type=ParsedValue("user", uid_of), metavar="USER", help="Whose, for root."),
        click.option("--older", "older_s", type=DURATION, metavar="AGE", help="Taken away longer ago than that."),
        click.option("--within", "within_s", type=DURATION, metavar="TIME", help="Restorable for less than that."),
        click.option("--path", "glob", metavar="GLOB", help="Came from a path that matches; * matches slashes, too."),
        click.option("--state", type=click.Choice(list(_STATES)), help="In that state."),
    )
)


class OrphanFilter(NamedTuple):
    """What is asked for, as the options are named."""

    uid: int | None
    older_s: int | None
    within_s: int | None
    glob: str | None
    state: str | None

    def picks(self, entries: Iterable[ListedContainer], now_ns: int) -> list[ListedContainer]:
        """Those that are meant. What can't be read has no age and no path."""
        return [entry for entry in entries if self.is_meant(entry, now_ns)]

    def is_meant(self, entry: ListedContainer, now_ns: int) -> bool:
        """Whether it is one of those."""
        if self.uid not in (None, entry.uid) or (self.state is not None and entry.state is not _STATES[self.state]):
            return False
        if self.older_s is not None and (entry.problem or entry.age_s(now_ns) <= self.older_s):
            return False
        if self.within_s is not None:
            left_s = None if entry.problem or entry.state is not State.ORPHANS else entry.left_s(now_ns)
            if left_s is None or left_s >= self.within_s:
                return False
        return self.glob is None or (entry.origin is not None and fnmatchcase(fsdecode(entry.origin), self.glob))


ORDERS = ("age", "left", "path", "user", "size")


def in_order(entries: list[ListedContainer], order: str, now_ns: int) -> list[ListedContainer]:
    """One of ORDERS: the oldest first, those that go soonest, by where they came from, by whose they are, the largest.

    Those whose size is not known come last of these.
    """

    def left_s(entry: ListedContainer) -> int:
        left = entry.left_s(now_ns)
        return _FOREVER_S if left is None else left

    keys: dict[str, Callable[[ListedContainer], Any]] = {
        "age": lambda entry: entry.created_ns,
        "left": left_s,
        "path": lambda entry: entry.origin or b"",
        "user": lambda entry: (entry.uid, entry.created_ns),
        "size": lambda entry: 1 if entry.size is None else -entry.size.n_bytes,
    }
    return sorted(entries, key=keys[order])
