"""The question whether orphans may go that can still be restored."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from fusefs.cli import output
from fusefs.cli.confirm import is_confirmed
from fusefs.core.durations import format_duration
from fusefs.core.errors import Refused
from fusefs.linux.act_as_user import user_name
from fusefs.store.list_orphans import ListedContainer

_SHOWN_MAX = 10


def ask_about(early: Sequence[ListedContainer]) -> None:
    """Ask that person. Raises  Refused if the answer is no"""
    tell_early(early)
    which = "this" if len(early) == 1 else f"these {len(early):,}"
    if not is_confirmed(f"Delete {which} for good, before {'its' if len(early) == 1 else 'their'} time?"):
        raise Refused("nothing was deleted")


def tell_early(early: Sequence[ListedContainer]) -> None:
    """Tell on stderr which it is about."""
    now_ns = time.time_ns()
    for entry in early[:_SHOWN_MAX]:
        print(line_of(entry, now_ns), file=sys.stderr)
    if len(early) > _SHOWN_MAX:
        print(f"and {len(early) - _SHOWN_MAX:,} more (--dry-run shows all)", file=sys.stderr)


def line_of(entry: ListedContainer, now_ns: int) -> str:
    """An orphan, whose it is, where it came from, and how long it can be restored."""
    left = entry.left_s(now_ns)
    term = "kept" if left is None else f"{format_duration(left)} left" if left > 0 else "expired"
    return f"{entry.id}  {user_name(entry.uid)}  {output.origin(entry.origin)}  ({term})"
